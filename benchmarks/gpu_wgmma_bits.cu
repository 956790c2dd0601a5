// Compare the bits of wgmma (A in registers, m64n64k16) with those of mma.sync m16n8k16 on the same
// operands, two steps of 16 along K. One block of 128 threads (a warp group) per case; `wrong`
// counts differing values. Run by gpu_wgmma_bits.py.
#include "wgmma.cuh"
DEVICE void wgmma_m64n64_rs(float (&d)[32], const u32 (&a)[4], u64 b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}"
      : G4_F32(d, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
// a [blocks][128 threads][2 steps][4]: A fragments; b [blocks][64 rows][64] halves; c
// [blocks][128][32]: initial accumulators (`zero`: start from zero); both: one pair of differing
// values.
template <int N>
__global__ void bits(const u32* a, const u16* b, const float* c, i32* wrong, float* both, int zero) {
  __shared__ __align__(1024) u16 tile[64 * 64];
  const int t = threadIdx.x, lane = t % 32, g = lane / 4, q = lane % 4;
  for (int i = t; i < 64 * 8; i += 128) {
    const int row = i / 8, piece = i % 8;
    ((uint4*)tile)[row * 8 + (piece ^ (row % 8))] = ((const uint4*)(b + (i64)blockIdx.x * 4096))[i];
  }
  fence_proxy_async_shared();
  __syncthreads();
  u32 v[2][4];
  for (int i = 0; i < 8; ++i) v[i / 4][i % 4] = a[((i64)blockIdx.x * 128 + t) * 8 + i];
  float w[32], m[8][4];
#pragma unroll
  for (int i = 0; i < 32; ++i) w[i] = m[i / 4][i % 4] = zero ? 0.0f : c[((i64)blockIdx.x * 128 + t) * 32 + i];
  warpgroup_fence_operand(w);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 2; ++k)
    wgmma_m64n64_rs(w, v[k], smem_descriptor((const u8*)tile + k * 32, 0), k || !zero);
  wgmma_commit();
  wgmma_wait<0>();
  warpgroup_fence_operand(w);
#pragma unroll
  for (int nt = 0; nt < 8; ++nt)
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const u32* row = (const u32*)tile + (nt * 8 + g) * 32;
      const u32 b0 = row[((2 * k) ^ g) * 4 + q], b1 = row[((2 * k + 1) ^ g) * 4 + q];
      mma_f16(m[nt], v[k], b0, b1, m[nt]);
    }
  int bad = 0;
#pragma unroll
  for (int i = 0; i < 32; ++i)
    if (__float_as_uint(w[i]) != __float_as_uint(m[i / 4][i % 4])) {
      ++bad;
      both[0] = w[i], both[1] = m[i / 4][i % 4];
    }
  if (bad) atomicAdd(wrong, bad);
}
