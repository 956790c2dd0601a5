// Q4_K in packed order (g4spec/runtime/cuda/packing.py): a value is d * scale * q - dmin * min. Q5_K
// is the same with a fifth bit.
#pragma once
#include "product.cuh"

template <int BITS>
struct Affine {
  static constexpr int UPPER = 16384, HEADER = UPPER + (BITS - 4) * 4096;
  static constexpr int UNIT = 256, UNIT_BYTES = HEADER + 2048, SCRATCH = 1664;
  static constexpr int MINS = 1024, DMINS = 1536;  // in the scratch of a warp

  // The factors of a row's groups, one lane a row.
  template <int PARTS>
  struct Factors {
    float scales[8 / PARTS], dmin;
    u32 mins[4 / PARTS];  // pairs of codes

    // Rows g + 8 of a tile carry codes times 16, so their scales are divided by it. All factors
    // undo the 2^-24 of the codes.
    DEVICE void load(const u8* unit, int warp, int lane, int part) {
      const uint4 h = *(const uint4*)(unit + HEADER + (warp * 32 + lane) * 16);
      const float d = from_half(h.x) * (SUBNORMAL * (lane & 8 ? 0.0625f : 1.0f));
      const float bias = -8388608.0f * d;
      u32 scale = h.y, scale_end = h.w & 0xffff, min = h.z, min_end = h.w >> 16;
      if (PARTS > 1 && part) {
        scale = bits_from(scale, scale_end, 24);
        min = bits_from(min, min_end, 24);
      }
      dmin = from_half(h.x >> 16) * SUBNORMAL;
#pragma unroll
      for (int i = 0; i < 8 / PARTS; ++i) {  // d * (2^23 + scale) - d * 2^23, which is exact
        const u32 bits = and_or(bits_from(scale, scale_end, 6 * i), 63, 0x4b000000u);
        scales[i] = fmaf(d, __uint_as_float(bits), bias);
      }
#pragma unroll
      for (int i = 0; i < 4 / PARTS; ++i) {
        const u32 two = bits_from(min, min_end, 12 * i);
        mins[i] = and_or(two << 10, 0x3f0000u, two & 0x3fu);
      }
    }
    DEVICE void store(u8* scratch, int lane) const {
#pragma unroll
      for (int i = 0; i < 8 / PARTS; ++i) ((float*)scratch)[i * 32 + row_slot(lane)] = scales[i];
      if constexpr (PARTS == 1)
        ((uint4*)(scratch + MINS))[lane] = {mins[0], mins[1], mins[2], mins[3]};
      else
        ((uint2*)(scratch + MINS / 2))[lane] = {mins[0], mins[1]};
      ((float*)(scratch + DMINS / PARTS))[row_slot(lane)] = dmin;
    }
  };

  template <int NT, int PARTS>
  static DEVICE void multiply(Acc<NT>& acc, const u8* unit, const u8* act, const u8* scratch,
                              int warp, int lane, int part) {
    const float* scales = (const float*)scratch;  // [8 / PARTS groups][row slot]
    const int g = lane / 4, t = lane % 4;
    const uint4* codes = (const uint4*)unit + warp * 2 * 128;
    const u32* upper = (const u32*)(unit + UPPER) + warp * 2 * 128;
#pragma unroll
    for (int j = 0; j < 4 / PARTS; ++j) {
      const int k64 = part * (4 / PARTS) + j;
      const uint4 w[2] = {codes[k64 * 32 + lane], codes[128 + k64 * 32 + lane]};
      u32 fifths[2];
      if constexpr (BITS == 5)
        fifths[0] = upper[k64 * 32 + lane], fifths[1] = upper[128 + k64 * 32 + lane];
      const auto rows = activations<NT>(act, k64);
      u32 b[2][2][NT][2];
      float c[2][2][NT][4];  // [half][tile]: chains of two products, side by side
      float zero[4] = {0, 0, 0, 0};
      rows.fragments(b[0], 0, lane);
      rows.fragments(b[1], 1, lane);
#pragma unroll
      for (int step = 0; step < 2; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int h = i / 2, tile = i % 2;
          u32 a[4];
          subnormal_nibbles(a, step ? (h ? w[tile].w : w[tile].y) : (h ? w[tile].z : w[tile].x));
          if constexpr (BITS == 5) add_fifths(a, fifths[tile], h * 2 + step);
#pragma unroll
          for (int nt = 0; nt < NT; ++nt) {
            const auto& frag = b[h][step][nt];
            mma_f16(c[h][tile][nt], a, frag[0], frag[1], step ? c[h][tile][nt] : zero);
          }
        }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float4 s = *(const float4*)(scales + (j * 2 + h) * 32 + g * 4);
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
          fold(acc[0][nt], c[h][0][nt], s.x, s.y);
          fold(acc[1][nt], c[h][1][nt], s.z, s.w);
        }
      }
    }
    subtract_mins<NT, PARTS>(acc, act, (const u32*)(scratch + MINS / PARTS),
                             (const float*)(scratch + DMINS / PARTS), g, t, part);
  }

  // The minima are whole numbers: one product with the sums of the activations, whose upper and
  // lower halves are the two sides of its K.
  template <int NT, int PARTS>
  static DEVICE void subtract_mins(Acc<NT>& acc, const u8* act, const u32* mins,
                                   const float* dmins, int g, int t, int part) {
    constexpr int PAIRS = 4 / PARTS;  // of groups; the lanes beyond them hold zeros
    const float4 dmin = *(const float4*)(dmins + g * 4);
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      u32 high = 0, low = 0;
      if (t < PAIRS) {
        const auto rows = activations<NT>(act, part * PAIRS + t);
        const float s0 = rows.sum32(0, nt * 8 + g), s1 = rows.sum32(1, nt * 8 + g);
        high = pack_halves(s0, s1);
        low = pack_halves(s0 - from_half(high), s1 - from_half(high >> 16));
      }
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        u32 m0 = 0, m1 = 0;
        if (t < PAIRS) {
          m0 = mins[(tile * 16 + g) * PAIRS + t];
          m1 = mins[(tile * 16 + g + 8) * PAIRS + t];
        }
        const u32 a[4] = {m0, m1, m0, m1};
        float c[4] = {0, 0, 0, 0};
        mma_f16(c, a, high, low, c);
        fold(acc[tile][nt], c, tile ? -dmin.z : -dmin.x, tile ? -dmin.w : -dmin.y);
      }
    }
  }
};

using Q4K = Affine<4>;
