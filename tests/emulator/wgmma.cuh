// Replacement of cuda/include/wgmma.cuh. A wgmma executes when the last lane of a warp issues it,
// which hardware may do.
#pragma once
#include "ptx.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
inline u64 smem_descriptor(const void* p, u32 block, u32 eight = 1024) {
  return (u64)(shared_address(p) >> 4) | (u64)(block >> 4) << 16 | (u64)(eight >> 4) << 32 |
         (u64)1 << 62;
}
inline u64 smem_descriptor_plain(const void* p, u32 chunk, u32 eight) {
  return (u64)(shared_address(p) >> 4) | (u64)(chunk >> 4) << 16 | (u64)(eight >> 4) << 32;
}
inline void wgmma_fence() {}
inline void wgmma_commit() { check::wgmma_commit(); }
template <int N>
void wgmma_wait() {
  char none = 0;
  machine::warp_collective("wgmma.wait", none, [](char**) {});
  check::wgmma_wait(N);
}
template <class T, int N>
void warpgroup_fence_operand(T (&)[N]) {}

// Half at byte offset `at` of shared memory, through the 128-byte swizzle.
inline float swizzled(u32 at) {
  at ^= (at >> 7 & 7) << 4;
  return from_half(*(const u16*)machine::at(at));
}
// Without swizzle: chunk `chunk` of 16 bytes of a row.
inline u32 place_of_plain_row(u64 operand, int row, int chunk) {
  return ((u32)(operand & 0x3fff) + row / 8 * (u32)(operand >> 32 & 0x3fff) +
          chunk * (u32)(operand >> 16 & 0x3fff) + row % 8) * 16;
}
inline u32 place_of_row(u64 operand, int row) {
  return (u32)(operand & 0x3fff) * 16 + row / 8 * (u32)(operand >> 32 & 0x3fff) * 16 + row % 8 * 128;
}
inline float by_row(u64 operand, int row, int column) {
  if (!(operand >> 62))
    return from_half(*(const u16*)machine::at(place_of_plain_row(operand, row, column / 8) + column % 8 * 2));
  return swizzled(place_of_row(operand, row) + column * 2);
}
inline float by_column(u64 operand, int row, int column) {
  const u32 block = (u32)(operand >> 16 & 0x3fff) * 16;
  return swizzled((u32)(operand & 0x3fff) * 16 + column / 64 * block + row * 128 + column % 64 * 2);
}

struct WgmmaLane {
  const u32* a;  // registers, or null: A is in shared memory
  float* d;
};
// Accumulate one warp's 16 rows of D, when its last lane arrives. `a` and `b` return operand values
// of shared memory at (row, k) and (k, column).
template <int N, class A, class B>
void wgmma_accumulate(float (&d)[N], const u32* registers, int add, A a, B b) {
  using namespace products;
  WgmmaLane mine{registers, d};
  machine::warp_collective("wgmma", mine, [=](WgmmaLane** lanes) {
    double left[16][16];
    Row right[16], sum[16];
    const int first = threadIdx.x / 32 % 4 * 16;
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 8; ++i) {
        const int row = row_of_a(lane, i), k = column_of_a(lane, i);
        const u32* own = lanes[lane]->a;
        left[row][k] = own ? from_half(u16(own[i / 2] >> i % 2 * 16)) : a(first + row, k);
      }
    for (int from = 0; from < 2 * N; from += 8) {
      const auto out = [=](int row, int i) -> float& {
        return lanes[row % 8 * 4 + i / 2]->d[from / 2 + row / 8 * 2 + i % 2];
      };
      for (int i = 0; i < 128; ++i) {
        elements(right)[i] = b(i / 8, from + i % 8);
        elements(sum)[i] = add ? out(i / 8, i % 8) : 0;
      }
      add_product(sum, left, right);
      for (int i = 0; i < 128; ++i) out(i / 8, i % 8) = (float)elements(sum)[i];
    }
  });
}
// Report to the race checker what a wgmma reads: 16 columns of up to 64 rows, or 16 rows of 256
// columns. Lane 0 of each warp reports all of it, since the ISA does not say which warp reads which
// part.
inline void record_read_by_row(u64 operand, int rows = 64) {
  if (machine::self->lane) return;
  for (int row = 0; row < rows; ++row)
    for (u32 i = 0; i < 2; ++i) {
      const u32 at = place_of_row(operand, row) + i * 16;
      check::wgmma_reads(machine::at(operand >> 62 ? at ^ (at >> 7 & 7) << 4
                                                   : place_of_plain_row(operand, row, i)), 16);
    }
}
inline void record_read_by_column(u64 operand) {
  if (machine::self->lane) return;
  for (u32 i = 0; i < 4; ++i)
    check::wgmma_reads(
        machine::at((u32)(operand & 0x3fff) * 16 + i * (u32)(operand >> 16 & 0x3fff) * 16),
        16 * 128);
}
inline void wgmma_m64n64_ss(float (&d)[32], u64 a, u64 b, int add) {
  check::Quiet quiet;
  record_read_by_row(a), record_read_by_row(b);
  wgmma_accumulate(
      d, nullptr, add, [=](int row, int k) { return by_row(a, row, k); },
      [=](int k, int column) { return by_row(b, column, k); });
}
inline void wgmma_m64n256_ss_mn(float (&d)[128], u64 a, u64 b, int add) {
  check::Quiet quiet;
  record_read_by_row(a), record_read_by_column(b);
  wgmma_accumulate(
      d, nullptr, add, [=](int row, int k) { return by_row(a, row, k); },
      [=](int k, int column) { return by_column(b, k, column); });
}
inline float no_shared_a(int, int) { return 0; }
inline void wgmma_m64n256_rs_mn(float (&d)[128], const u32 (&a)[4], u64 b, int add) {
  check::Quiet quiet;
  record_read_by_column(b);
  wgmma_accumulate(
      d, a, add, no_shared_a, [=](int k, int column) { return by_column(b, k, column); });
}
template <int N>  // B has 2 N rows
void wgmma_rs(float (&d)[N], const u32 (&a)[4], u64 b, int add) {
  check::Quiet quiet;
  if (b >> 62 && (b & 0x3fff) * 16 % 1024 >= 128) machine::fail("an operand that is not on 1024 bytes");
  record_read_by_row(b, 2 * N);
  wgmma_accumulate(
      d, a, add, no_shared_a, [=](int k, int column) { return by_row(b, column, k); });
}
#endif
