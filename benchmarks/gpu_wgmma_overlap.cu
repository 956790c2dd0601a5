// Cycles of a chain of wgmmas (64 x N x 32 columns) with other instructions of the same warps, two
// warp groups on each multiprocessor. Run by gpu_wgmma_overlap.py.
#include "wgmma.cuh"

constexpr int WARP_GROUPS = 2, UNITS = 64, CHAINS = 16;  // chains of a unit, as 256 x 256 weights have
#define I8(d, i) "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3]), \
  "+r"(d[i + 4]), "+r"(d[i + 5]), "+r"(d[i + 6]), "+r"(d[i + 7])
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

// d [64 x N] (+)= A [64 x 32] (u8, in registers) times B^T, B [N x 32] (s8), for N = 32 and 64.
DEVICE void wgmma_integer(int (&d)[16], const u32 (&a)[4], u64 b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k32.s32.u8.s8 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "{%16, %17, %18, %19}, %20, p;\n}"
      : I8(d, 0), I8(d, 8) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
DEVICE void wgmma_integer(int (&d)[32], const u32 (&a)[4], u64 b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.s32.u8.s8 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, p;\n}"
      : I8(d, 0), I8(d, 8), I8(d, 16), I8(d, 24)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

// Operands of a chain: codes (two words of eight for two rows) times part of their rows' scales.
DEVICE void multiply_codes(u32 (&a)[4], u32 first, u32 second, u32 scale, u32 other) {
  a[0] = (first & 0x0f0f0f0fu) * scale, a[1] = (second & 0x0f0f0f0fu) * other;
  a[2] = (first >> 4 & 0x0f0f0f0fu) * scale, a[3] = (second >> 4 & 0x0f0f0f0fu) * other;
}

// Activations of 8 bits: 6-bit scales are multiplied into the codes in two parts, so that the sums of
// 256 columns are exact integers: those of the upper two bits, times 16, plus those of the lower four.
template <int N>
__global__ __launch_bounds__(128 * WARP_GROUPS, 1) void integers(i64* cycles, float* sums, float scale) {
  extern __shared__ __align__(1024) u8 shared[];
  const u64 b = smem_descriptor(fill(shared), 0);
  const uint4* codes = (const uint4*)(shared + 40960) + threadIdx.x % 128;
  const u32 part = __float_as_uint(scale) >> 24 & 3;  // the same for all groups
  float acc[2][N / 2] = {};
  int c[2][N / 2];
  const auto finished = [&](int tile, int pending) {
    if (pending)
      wgmma_wait<1>();
    else
      wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < N / 2; ++i) asm volatile("" : "+r"(c[tile][i])::"memory");
  };
  const auto add = [&](int tile) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) acc[tile][i] += scale * (float)c[tile][i];
  };
  const i64 began = clock64();
  for (int unit = 0; unit < UNITS; ++unit) {
#pragma unroll
    for (int turn = 0; turn < 4; ++turn) {  // upper parts of tiles 0 and 1, then lower parts
      const int tile = turn % 2;
      uint4 w[CHAINS / 4];
#pragma unroll
      for (int j = 0; j < CHAINS / 4; ++j) w[j] = codes[j * 8 + tile * 4];
      wgmma_fence();
#pragma unroll
      for (int j = 0; j < CHAINS / 2; ++j) {
        u32 a[4];
        const uint4& of = w[j / 2];
        multiply_codes(a, j % 2 ? of.z : of.x, j % 2 ? of.w : of.y, part + turn / 2 * j, part + turn);
        warpgroup_fence_operand(a);
        wgmma_integer(c[tile], a, b + j % 4 * 2, turn >= 2 || j);
      }
      wgmma_commit();
      if (turn == 1 || turn == 2) {
        finished(1 - tile, 1);
        if (turn == 1)
#pragma unroll
          for (int i = 0; i < N / 2; ++i) c[0][i] <<= 4;
      }
      if (turn == 2)
#pragma unroll
        for (int i = 0; i < N / 2; ++i) c[1][i] <<= 4;
      if (turn == 3) finished(0, 1), add(0);
    }
    finished(1, 0), add(1);
  }
  cycles[blockIdx.x] = clock64() - began;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) sum += acc[i / (N / 2)][i % (N / 2)];
  sums[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
