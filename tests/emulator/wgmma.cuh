// What cuda/include/wgmma.cuh has. A product is done when it is issued: hardware may do so.
#pragma once
#include "ptx.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
inline u64 smem_descriptor(const void* p, u32 block, u32 eight = 1024) {
  return (u64)(shared_address(p) >> 4) | (u64)(block >> 4) << 16 | (u64)(eight >> 4) << 32;
}
inline void wgmma_fence() {}
inline void wgmma_commit() { check::wgmma_commit(); }
template <int N>
void wgmma_wait() {
  char none = 0;
  machine::together("wgmma.wait", none, [](char**) {});
  check::wgmma_wait(N);
}
template <class T, int N>
void warpgroup_fence_operand(T (&)[N]) {}

// Value of 16 bits in the 128-byte swizzle.
inline float swizzled(u32 at) {
  at ^= (at >> 7 & 7) << 4;
  return from_half(*(const u16*)machine::at(at));
}
inline u32 place_of_row(u64 operand, int row) {
  return (u32)(operand & 0x3fff) * 16 + row / 8 * (u32)(operand >> 32 & 0x3fff) * 16 + row % 8 * 128;
}
inline float by_row(u64 operand, int row, int column) {
  return swizzled(place_of_row(operand, row) + column * 2);
}
inline float by_column(u64 operand, int row, int column) {
  const u32 block = (u32)(operand >> 16 & 0x3fff) * 16;
  return swizzled((u32)(operand & 0x3fff) * 16 + column / 64 * block + row * 128 + column % 64 * 2);
}

// One warp's 16 rows of a sum; `a` and `b` give values of operands by (row, k) and (k, column).
template <int N, class A, class B>
void add_product(float (&d)[N], int add, A a, B b) {
  const int lane = machine::self->lane, warp = threadIdx.x / 32 % 4;
  for (int i = 0; i < N; ++i) {
    const int row = lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    double x = add ? d[i] : 0.0;
    for (int k = 0; k < 16; ++k) x += (double)a(warp * 16, row, k) * b(k, column);
    d[i] = (float)x;
  }
}
// What a product reads: 16 columns of 64 rows, or fewer; 16 rows of 256 columns. Told by a lane of each warp,
// for all four: which of them reads what is not defined.
inline void read_by_row(u64 operand, int rows = 64) {
  if (machine::self->lane) return;
  for (int row = 0; row < rows; ++row)
    for (u32 i = 0; i < 2; ++i) {
      const u32 at = place_of_row(operand, row) + i * 16;
      check::wgmma_reads(machine::at(at ^ (at >> 7 & 7) << 4), 16);
    }
}
inline void read_by_column(u64 operand) {
  if (machine::self->lane) return;
  for (u32 i = 0; i < 4; ++i)
    check::wgmma_reads(
        machine::at((u32)(operand & 0x3fff) * 16 + i * (u32)(operand >> 16 & 0x3fff) * 16),
        16 * 128);
}
inline void wgmma_m64n64_ss(float (&d)[32], u64 a, u64 b, int add) {
  check::Quiet quiet;
  read_by_row(a), read_by_row(b);
  add_product(d, add, [=](int first, int row, int k) { return by_row(a, first + row, k); },
              [=](int k, int column) { return by_row(b, column, k); });
}
inline void wgmma_m64n256_ss_mn(float (&d)[128], u64 a, u64 b, int add) {
  check::Quiet quiet;
  read_by_row(a), read_by_column(b);
  add_product(d, add, [=](int first, int row, int k) { return by_row(a, first + row, k); },
              [=](int k, int column) { return by_column(b, k, column); });
}
// Operand a of one warp's 16 rows, from what its lanes hold.
struct Fragment {
  const u32* mine;
  float all[16][16];

  explicit Fragment(const u32 (&a)[4]) : mine(a), all{} {
    machine::together("wgmma", *this, [](Fragment** lanes) {
      for (int to = 0; to < 32; ++to)
        for (int lane = 0; lane < 32; ++lane)
          for (int i = 0; i < 8; ++i)
            lanes[to]->all[lane / 4 + i / 2 % 2 * 8][2 * (lane % 4) + i % 2 + i / 4 * 8] =
                from_half(u16(lanes[lane]->mine[i / 2] >> i % 2 * 16));
    });
  }
};
inline void wgmma_m64n256_rs_mn(float (&d)[128], const u32 (&a)[4], u64 b, int add) {
  check::Quiet quiet;
  read_by_column(b);
  const Fragment f(a);
  add_product(d, add, [&](int, int row, int k) { return f.all[row][k]; },
              [=](int k, int column) { return by_column(b, k, column); });
}
template <int N>  // 2 N rows of b
void wgmma_rs(float (&d)[N], const u32 (&a)[4], u64 b, int add) {
  check::Quiet quiet;
  if ((b & 0x3fff) * 16 % 1024 >= 128) machine::fail("an operand that is not on 1024 bytes");
  read_by_row(b, 2 * N);
  const Fragment f(a);
  add_product(d, add, [&](int, int row, int k) { return f.all[row][k]; },
              [=](int k, int column) { return by_row(b, column, k); });
}
#endif
