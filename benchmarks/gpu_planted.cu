// Two kernels with deliberate faults. `gpu_sanitize.py` runs them to check that compute-sanitizer
// reports faults.

#include "ptx.cuh"

// Shared-memory race: each of 64 threads reads a value that the other warp stores, without a
// barrier. x: float [64].
__global__ void planted_race(float* x) {
  __shared__ float s[64];
  s[threadIdx.x] = x[threadIdx.x];
  x[threadIdx.x] = s[63 - threadIdx.x];
}

// Out-of-bounds store of one float after the end. x: float [n].
__global__ void planted_access(float* x, int n) { x[n] = 1.0f; }
