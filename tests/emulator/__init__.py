"""The CUDA kernels run on the CPU: compiled by the system's C++ compiler, threads as fibers."""
