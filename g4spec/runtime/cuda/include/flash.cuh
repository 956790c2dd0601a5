// What attention kernels of sm_90 share: scores become weights in the registers of those who computed
// them. A row is a token and one of a KV head's queries.
#pragma once
#include "wgmma.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr float LOG2E = 1.4426950408889634f;

#define NEVER __int_as_float(0xff800000)  // minus infinity

// The rows that a thread holds: two of its group's 64.
struct Rows {
  float most[2] = {NEVER, NEVER}, sum[2] = {0, 0}, shrink[2];
  int last[2], least[2];      // visible keys: (least, last]
  int whole_from, whole_to;   // tiles that begin in (from, to] are visible to all rows

  DEVICE Rows(int row, int group, int lane, int warp, int offset, int window) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      last[i] = (row + warp * 16 + i * 8 + lane / 4) / group + offset;
      least[i] = last[i] - window;
    }
    whole_from = (row + 63) / group + offset - window;
    whole_to = row / group + offset - 63;
  }

  // Scores of 64 keys from `first` on become weights; the sums so far are to be made smaller.
  DEVICE void weigh(float (&s)[32], int first, int lane) {
    if (first <= whole_from || first > whole_to) {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const int key = first + i / 4 * 8 + lane % 4 * 2 + i % 2, r = i / 2 % 2;
        if (key > last[r] || key <= least[r]) s[i] = NEVER;
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = most[r];
#pragma unroll
      for (int j = 0; j < 8; ++j) top = fmaxf(top, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
      top = fmaxf(top, __shfl_xor_sync(FULL, top, 1));
      top = fmaxf(top, __shfl_xor_sync(FULL, top, 2));
      const float base = top == NEVER ? 0.0f : top * LOG2E;
      shrink[r] = exp2_fast(most[r] * LOG2E - base);
      most[r] = top;
      float total = 0;
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s[4 * j + 2 * r + e];
          x = exp2_fast(x * LOG2E - base);
          total += x;
        }
      sum[r] = sum[r] * shrink[r] + total;
    }
  }
};

DEVICE void make_smaller(float (&o)[128], const float (&by)[2]) {
#pragma unroll
  for (int i = 0; i < 128; ++i) o[i] *= by[i / 2 % 2];
}
DEVICE void to_halves(u32 (&p)[16], const float (&s)[32]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) p[i] = pack_halves(s[2 * i], s[2 * i + 1]);
}
DEVICE void release(u64* bar, int lane) {
  __syncwarp();
  if (lane == 0) barrier_arrive(bar);
}
#endif
