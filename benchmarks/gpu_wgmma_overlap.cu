// Cycles of a chain of two wgmmas (64 x N x 32 columns) with other instructions of the same warps, two
// warp groups on each multiprocessor. Run by gpu_wgmma_overlap.py.
#include "wgmma.cuh"

constexpr int WARP_GROUPS = 2, UNITS = 64, CHAINS = 16;  // chains of a unit, as 256 x 256 weights have
enum Op { ADD_INT, ADD_FLOAT, MULTIPLY_ADD };
enum Operand { CONSTANT, DEQUANTIZED, SHARED };

template <Op OP>
DEVICE void apply(float& x, float y, float scale) {
  if (OP == ADD_INT) asm volatile("add.u32 %0, %0, %1;" : "+r"(*(u32*)&x) : "r"(*(u32*)&scale));
  if (OP == ADD_FLOAT) asm volatile("add.f32 %0, %0, 0f3fc00000;" : "+f"(x));
  if (OP == MULTIPLY_ADD) asm volatile("fma.rn.f32 %0, %1, %2, %0;" : "+f"(x) : "f"(y), "f"(scale));
}

// Halves of 1.0 for both operands, and room for codes behind them.
DEVICE u8* fill(u8* shared) {
  for (int i = threadIdx.x; i < 12 * 1024; i += blockDim.x) ((u32*)shared)[i] = 0x3c003c00u;
  fence_proxy_async_shared();
  __syncthreads();
  return shared;
}

// Chains that add to their accumulators, beside COUNT instructions on other registers each.
template <int N, int OP, int COUNT>
__global__ __launch_bounds__(128 * WARP_GROUPS, 1) void beside(i64* cycles, float* sums, float scale) {
  extern __shared__ __align__(1024) u8 shared[];
  const u64 b = smem_descriptor(fill(shared), 0);
  const u32 a[4] = {__float_as_uint(scale), 2, 3, 4};
  float c[2][N / 2] = {}, x[32], y[32];
#pragma unroll
  for (int i = 0; i < 32; ++i) x[i] = threadIdx.x * i, y[i] = scale * i + threadIdx.x;
  const i64 began = clock64();
  for (int unit = 0; unit < UNITS; ++unit) {
#pragma unroll
    for (int j = 0; j < CHAINS; ++j) {
      wgmma_fence();
      wgmma_rs(c[j % 2], a, b + j % 4 * 2, 1);
      wgmma_rs(c[j % 2], a, b + j % 4 * 2, 1);
      wgmma_commit();
#pragma unroll
      for (int i = 0; i < COUNT; ++i) apply<(Op)OP>(x[i % 32], y[i % 32], scale);
      wgmma_wait<1>();
    }
  }
  wgmma_wait<0>();
  cycles[blockIdx.x] = clock64() - began;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) sum += c[i / (N / 2)][i % (N / 2)] + x[i % 32];
  sums[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

// Chains whose sums are scaled and added one chain later, as in linear_wide: two weight tiles in turns.
template <int N, int A>
__global__ __launch_bounds__(128 * WARP_GROUPS, 1) void scaled(i64* cycles, float* sums, float scale) {
  extern __shared__ __align__(1024) u8 shared[];
  const u64 b = smem_descriptor(fill(shared), 0), from = smem_descriptor(shared + 32768, 0);
  const uint4* codes = (const uint4*)(shared + 40960) + threadIdx.x % 128;
  const float scales[2] = {scale, scale * 1.5f};
  float acc[2][N / 2] = {}, c[2][N / 2];
  const auto finish = [&](int tile, int pending) {
    if (pending)
      wgmma_wait<1>();
    else
      wgmma_wait<0>();
    warpgroup_fence_operand(c[tile]);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) acc[tile][i] += scales[i / 2 % 2] * c[tile][i];
  };
  const i64 began = clock64();
  for (int unit = 0; unit < UNITS; ++unit) {
    uint4 w[2];
#pragma unroll
    for (int j = 0; j < CHAINS; ++j) {
      const int tile = j % 2;
      if (j % 4 == 0) w[0] = codes[j * 8], w[1] = codes[j * 8 + 4];
      u32 a[2][4] = {{1, 2, 3, 4}, {5, 6, 7, 8}};
      if (A == DEQUANTIZED)
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          const uint4& of = w[tile];
          const u32 word = j % 4 < 2 ? (step ? of.y : of.x) : (step ? of.w : of.z);
          a[step][0] = word & 0xf000fu, a[step][1] = word & 0xf000f0u;
          a[step][2] = word >> 8 & 0xf000fu, a[step][3] = word >> 8 & 0xf000f0u;
        }
      warpgroup_fence_operand(a[0]), warpgroup_fence_operand(a[1]);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        if constexpr (A == SHARED)
          wgmma_m64n64_ss(c[tile], from, b + (j % 4 + step) * 2, step);
        else
          wgmma_rs(c[tile], a[step], b + (j % 4 + step) * 2, step);
      }
      wgmma_commit();
      if (j) finish(1 - tile, 1);
    }
    finish(1, 0);
  }
  cycles[blockIdx.x] = clock64() - began;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) sum += acc[i / (N / 2)][i % (N / 2)];
  sums[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
