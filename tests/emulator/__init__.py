"""Emulator: compiles the CUDA kernels with g++ and runs them on a CPU, with threads as fibers."""
