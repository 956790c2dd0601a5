// Q4_K in packed order (g4spec/runtime/cuda/packing.py): a value is d * scale * q - dmin * min.
#pragma once
#include "product.cuh"

struct Q4K {
  static constexpr int UNIT = 256, UNIT_BYTES = 18432, SCRATCH = 1664;

  template <int NT>
  static DEVICE void multiply(Acc<NT>& acc, const u8* unit, const u8* act, u8* scratch, int warp,
                              int lane) {
    float* scales = (float*)scratch;         // [8 groups][row slot]
    u32* mins = (u32*)(scratch + 1024);      // [row][4] pairs of halves
    float* dmins = (float*)(scratch + 1536);  // [row slot]
    expand(unit + 16384 + (warp * 32 + lane) * 16, scales, mins, dmins, lane);
    const int g = lane / 4, t = lane % 4;
    const uint4* codes = (const uint4*)unit + warp * 2 * 128;
#pragma unroll
    for (int k64 = 0; k64 < 4; ++k64) {
      const uint4 w[2] = {codes[k64 * 32 + lane], codes[128 + k64 * 32 + lane]};
      const auto rows = activations<NT>(act, k64);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        u32 b[2][NT][2];
        rows.fragments(b, h, lane);
        const float4 s = *(const float4*)(scales + (k64 * 2 + h) * 32 + g * 4);
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
          u32 a0[4], a1[4];
          from_nibbles(a0, h ? w[tile].z : w[tile].x);
          from_nibbles(a1, h ? w[tile].w : w[tile].y);
#pragma unroll
          for (int nt = 0; nt < NT; ++nt) {
            const float2 n = rows.sums32(h, nt, t);
            float c[4] = {n.x, n.y, n.x, n.y};
            mma_f16(c, a0, b[0][nt][0], b[0][nt][1], c);
            mma_f16(c, a1, b[1][nt][0], b[1][nt][1], c);
            fold(acc[tile][nt], c, tile ? s.z : s.x, tile ? s.w : s.y);
          }
        }
      }
    }
    subtract_mins<NT>(acc, act, mins, dmins, g, t);
  }

  // One lane a row: 6-bit integers become the factors of its groups. Rows g + 8 of a tile carry
  // codes times 16, so their factors are divided by it.
  static DEVICE void expand(const u8* header, float* scales, u32* mins, float* dmins, int lane) {
    const uint4 h = *(const uint4*)header;
    const float d = from_half(h.x) * (lane & 8 ? 0.0625f : 1.0f);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 8; ++i)
      scales[i * 32 + row_slot(lane)] = d * small_float(funnel(h.y, h.w & 0xffff, 6 * i) & 63);
    u32 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 two = funnel(h.z, h.w >> 16, 12 * i);
      pairs[i] = sub_half2(and_or(two << 10, 0x3f0000u, and_or(two, 0x3fu, MAGIC)), MAGIC);
    }
    *(uint4*)(mins + lane * 4) = {pairs[0], pairs[1], pairs[2], pairs[3]};
    dmins[row_slot(lane)] = from_half(h.x >> 16);
    __syncwarp();
  }

  // The minima are whole numbers: one product with the sums of the activations, whose upper and
  // lower halves are the two sides of its K.
  template <int NT>
  static DEVICE void subtract_mins(Acc<NT>& acc, const u8* act, const u32* mins,
                                   const float* dmins, int g, int t) {
    const float4 dmin = *(const float4*)(dmins + g * 4);
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      const auto rows = activations<NT>(act, t);
      const float s0 = rows.sum32(0, nt * 8 + g), s1 = rows.sum32(1, nt * 8 + g);
      const u16 h0 = to_half(s0), h1 = to_half(s1);
      const u32 high = (u32)h0 | (u32)h1 << 16;
      const u32 low = pack_halves(s0 - from_half(h0), s1 - from_half(h1));
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const u32 m0 = mins[(tile * 16 + g) * 4 + t], m1 = mins[(tile * 16 + g + 8) * 4 + t];
        const u32 a[4] = {m0, m1, m0, m1};
        float c[4] = {0, 0, 0, 0};
        mma_f16(c, a, high, low, c);
        fold(acc[tile][nt], c, tile ? -dmin.z : -dmin.x, tile ? -dmin.w : -dmin.y);
      }
    }
  }
};
