// Two faults, so that who watches a program has something to report: `gpu_sanitize.py`.

#include "ptx.cuh"

// Each of 64 threads reads what one of the other warp stores, with nothing between. x: float [64].
__global__ void planted_race(float* x) {
  __shared__ float s[64];
  s[threadIdx.x] = x[threadIdx.x];
  x[threadIdx.x] = s[63 - threadIdx.x];
}

// One thread stores behind the end. x: float [n].
__global__ void planted_access(float* x, int n) { x[n] = 1.0f; }
