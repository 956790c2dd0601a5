// Online softmax of the sm_90 prefill attention kernels (as FlashAttention-3): scores become
// weights in the registers of the threads that hold the wgmma accumulator. A row is a token and one
// of the KV head's query heads.
#pragma once
#include "math.cuh"
#include "mbarrier.cuh"
#include "wgmma.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// State of the two rows (of the warp group's 64) that a thread holds.
struct OnlineSoftmax {
  float row_max[2] = {NEG_INF, NEG_INF}, sum[2] = {0, 0}, rescale[2];
  int last[2], before_first[2];  // visible keys: (before_first, last]
  int whole_from, whole_to;      // tiles whose first key is in (whole_from, whole_to] need no mask

  DEVICE OnlineSoftmax(int row, int group, int lane, int warp, int offset, int window) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      last[i] = (row + warp * 16 + i * 8 + lane / 4) / group + offset;
      before_first[i] = last[i] - window;
    }
    whole_from = (row + 63) / group + offset - window;
    whole_to = row / group + offset - 63;
  }

  // Mask the scores of 64 keys from `first` on, update maximum and sum, and replace the scores by
  // weights. The caller rescales its accumulator by `rescale`.
  DEVICE void update(float (&s)[32], int first, int lane) {
    if (first <= whole_from || first > whole_to) {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const int key = first + i / 4 * 8 + lane % 4 * 2 + i % 2, r = i / 2 % 2;
        if (key > last[r] || key <= before_first[r]) s[i] = NEG_INF;
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = row_max[r];
#pragma unroll
      for (int j = 0; j < 8; ++j) top = fmaxf(top, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
      top = fmaxf(top, __shfl_xor_sync(FULL_MASK, top, 1));
      top = fmaxf(top, __shfl_xor_sync(FULL_MASK, top, 2));
      const float base = top == NEG_INF ? 0.0f : top * LOG2E;
      rescale[r] = exp2_approx(row_max[r] * LOG2E - base);
      row_max[r] = top;
      float total = 0;
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s[4 * j + 2 * r + e];
          x = exp2_approx(x * LOG2E - base);
          total += x;
        }
      sum[r] = sum[r] * rescale[r] + total;
    }
  }
};

DEVICE void rescale_output(float (&o)[128], const float (&by)[2]) {
#pragma unroll
  for (int i = 0; i < 128; ++i) o[i] *= by[i / 2 % 2];
}
DEVICE void pack_weights(u32 (&p)[16], const float (&s)[32]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) p[i] = pack_half2(s[2 * i], s[2 * i + 1]);
}
DEVICE void warp_release(u64* bar, int lane) {
  __syncwarp();
  if (lane == 0) mbarrier_arrive(bar);
}
#endif
