// Q8_0 in packed order (g4spec/runtime/cuda/packing.py): a value is d * (q - 128), q unsigned.
#pragma once
#include "product.cuh"

template <int K>
struct Q80 {
  static constexpr int UNIT = K, UNIT_BYTES = K * 136, SCRATCH = 0;

  template <int NT, int PARTS>
  static DEVICE void multiply(Acc<NT>& acc, const u8* unit, const u8* act, u8*, int warp, int lane,
                              int part) {
    constexpr int STEPS = K / 32 < PARTS ? 1 : K / 32 / PARTS;  // of 32 k
    if (part * STEPS >= K / 32) return;
    const int g = lane / 4, t = lane % 4;
    const uint4* codes = (const uint4*)unit + warp * 2 * K;
    const uint2* scales = (const uint2*)(unit + K * 128);
#pragma unroll
    for (int j = 0; j < STEPS; ++j) {
      const int k32 = part * STEPS + j;
      const auto rows = activations<NT>(act, k32 / 2);
      u32 b[2][NT][2];
      rows.fragments(b, k32 % 2, lane);
      const uint2 d = scales[(k32 * 4 + warp) * 8 + g];
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const uint4 w = codes[tile * K + k32 * 32 + lane];
        const u32 a0[4] = {permute(w.x, MAGIC, 0x5150), permute(w.x, MAGIC, 0x5352),
                           permute(w.y, MAGIC, 0x5150), permute(w.y, MAGIC, 0x5352)};
        const u32 a1[4] = {permute(w.z, MAGIC, 0x5150), permute(w.z, MAGIC, 0x5352),
                           permute(w.w, MAGIC, 0x5150), permute(w.w, MAGIC, 0x5352)};
        const u32 pair = tile ? d.y : d.x;
        const float low = from_half((u16)pair), high = from_half((u16)(pair >> 16));
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
          const float2 n = rows.sums32(k32 % 2, nt, t);
          float c[4] = {n.x * 1.125f, n.y * 1.125f, n.x * 1.125f, n.y * 1.125f};  // 1024 + 128
          mma_f16(c, a0, b[0][nt][0], b[0][nt][1], c);
          mma_f16(c, a1, b[1][nt][0], b[1][nt][1], c);
          fold(acc[tile][nt], c, low, high);
        }
      }
    }
  }
};
