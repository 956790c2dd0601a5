// Reductions over a warp or a block. The order of operations depends on the number of warps only,
// so that results are the same in every launch.
#pragma once
#include "ptx.cuh"

struct Sum {
  DEVICE float operator()(float a, float b) const { return a + b; }
};
struct MaxNan {  // NaN if any value is NaN
  DEVICE float operator()(float a, float b) const { return max_nan(a, b); }
};

template <class Op>
DEVICE float warp_reduce(float v, Op op) {
#pragma unroll
  for (int step = 16; step; step /= 2) v = op(v, __shfl_xor_sync(FULL_MASK, v, step));
  return v;
}

// Reduce one value per thread over the block; every thread gets the result. `slots` [WARPS] is
// shared memory. Each call needs its own: there is no barrier after the last read.
template <int WARPS, class Op>
DEVICE float block_reduce(float v, float* slots, Op op) {
  v = warp_reduce(v, op);
  if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = v;
  __syncthreads();
  v = slots[0];
#pragma unroll
  for (int i = 1; i < WARPS; ++i) v = op(v, slots[i]);
  return v;
}

// Sums of two values per thread, with one block barrier.
template <int WARPS>
DEVICE float2 block_reduce2(float a, float b, float* slots_a, float* slots_b) {
  a = warp_reduce(a, Sum()), b = warp_reduce(b, Sum());
  if (threadIdx.x % 32 == 0) slots_a[threadIdx.x / 32] = a, slots_b[threadIdx.x / 32] = b;
  __syncthreads();
  a = slots_a[0], b = slots_b[0];
#pragma unroll
  for (int i = 1; i < WARPS; ++i) a += slots_a[i], b += slots_b[i];
  return {a, b};
}
