// GEMM for formats with 4- or 5-bit codes and half-precision factors per 32 values (Q4_0, Q4_1,
// Q5_0, Q5_1), in packed order (g4spec/runtime/cuda/weights/packing.py). Value = d * (code - ZERO),
// or with MINIMUM d * code + m.
#pragma once
#include "fragments.cuh"
#include "gemm_tile.cuh"
#include "quads.cuh"
#include "raw_values.cuh"

template <int K, int BITS, bool MINIMUM>
struct Blocks32 {
  static constexpr int CODES = K * 64, UPPER = BITS == 5 ? K * 16 : 0, PLANE = K * 8;
  static constexpr int UNIT = K, UNIT_BYTES = CODES + UPPER + PLANE * (MINIMUM ? 2 : 1);
  static constexpr int SCRATCH = 0, SUMS = SUMS32, SUMS_BYTES = 64;  // of 8 rows of a block
  // Codes are subnormals, multiplied by RISE in rows g + 8. LOW, HIGH: the zero point as a code of rows
  // g and g + 8, divided by 1024 as sums of activations are multiplied by -1024.
  static constexpr float RISE = upper_factor(BITS), ZERO = MINIMUM ? 0 : 1 << (BITS - 1);
  static constexpr float LOW = ZERO / 1024 / SUBNORMAL_SCALE, HIGH = LOW * RISE;

  template <int NT>
  using Lane = StatelessLane<Blocks32, NT>;

  template <int NT>
  static DEVICE void add(Acc<NT>& acc, const u8* unit, const u8* act, int warp, int lane) {
    const int g = lane / 4, t = lane % 4;
    const uint4* codes = (const uint4*)unit + warp * K + lane;
    const u32* upper = (const u32*)(unit + CODES) + warp * K + lane;
    const uint2* d = (const uint2*)(unit + CODES + UPPER) + warp * 8 + g;
    const uint2* m = (const uint2*)(unit + CODES + UPPER + PLANE) + warp * 8 + g;
#pragma unroll 4
    for (int k32 = 0; k32 < K / 32; ++k32) {
      const int k64 = k32 / 2, h = k32 % 2;
      const uint4 w[2] = {codes[k64 * 32], codes[K / 2 + k64 * 32]};
      u32 last[2] = {};
      if constexpr (BITS == 5) last[0] = upper[k64 * 32], last[1] = upper[K / 2 + k64 * 32];
      const auto rows = activations<NT>(act, k64);
      u32 b[2][NT][2];
      rows.fragments(b, h, lane);
      const uint2 scales = d[k32 * 32];
      uint2 least;
      if constexpr (MINIMUM) least = m[k32 * 32];
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        u32 a[2][4];
        subnormal_codes<BITS>(a[0], w[tile], last[tile], h * 2);
        subnormal_codes<BITS>(a[1], w[tile], last[tile], h * 2 + 1);
        const float2 s = factors(tile ? scales.y : scales.x);
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
          const float2 n = rows.sums32(h, nt, t);
          float c[4] = {n.x * LOW, n.y * LOW, n.x * HIGH, n.y * HIGH};
          mma_f16(c, a[0], b[0][nt][0], b[0][nt][1], c);
          mma_f16(c, a[1], b[1][nt][0], b[1][nt][1], c);
          scale_add(acc[tile][nt], c, s.x, s.y);
          if constexpr (MINIMUM) {  // m * sum of activations; n is -1024 times the sum
            const float2 low = minima(tile ? least.y : least.x);
            scale_add(acc[tile][nt], {n.x, n.y, n.x, n.y}, low.x, low.y);
          }
        }
      }
    }
  }

  template <int NT, int G>
  static DEVICE void add_row_groups(Acc<NT * G>& acc, const u8* unit,
                                    const GroupedActivations& act, int warp, int lane) {
    constexpr int BLOCKS = K / 64, GROUP_SUM_BYTES = BLOCKS * SUMS_BYTES * NT;  // of a group
    const int t = lane % 4;
    const u32 place = ldmatrix_offset<BLOCKS>(lane);
    const uint4* codes = (const uint4*)unit + warp * K + lane;
    const u32* upper = (const u32*)(unit + CODES) + warp * K + lane;
    const uint2* d = (const uint2*)(unit + CODES + UPPER) + warp * 8 + lane / 4;
    const uint2* m = (const uint2*)(unit + CODES + UPPER + PLANE) + warp * 8 + lane / 4;
#pragma unroll 2
    for (int k32 = 0; k32 < K / 32; ++k32) {
      const int k64 = k32 / 2, h = k32 % 2;
      const uint2 scales = d[k32 * 32];
      uint2 least;
      if constexpr (MINIMUM) least = m[k32 * 32];
      u32 a[2][2][4];  // [tile][step]
      float2 s[2], low[2];
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const uint4 w = codes[tile * (K / 2) + k64 * 32];
        const u32 last = BITS == 5 ? upper[tile * (K / 2) + k64 * 32] : 0;
        subnormal_codes<BITS>(a[tile][0], w, last, h * 2);
        subnormal_codes<BITS>(a[tile][1], w, last, h * 2 + 1);
        s[tile] = factors(tile ? scales.y : scales.x);
        if constexpr (MINIMUM) low[tile] = minima(tile ? least.y : least.x);
      }
#pragma unroll
      for (int g = 0; g < G; ++g) {
        scheduling_barrier();
        u32 b[2][NT][2];
        ldmatrix_b_fragments<NT>(b, act.halves + (g * NT * BLOCKS + k64) * TILE_BYTES, place, h);
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
          const float2 n = grouped_sums32(act.sums + g * GROUP_SUM_BYTES, k32, nt, t);
#pragma unroll
          for (int tile = 0; tile < 2; ++tile) {
            float c[4] = {n.x * LOW, n.y * LOW, n.x * HIGH, n.y * HIGH};
            mma_f16(c, a[tile][0], b[0][nt][0], b[0][nt][1], c);
            mma_f16(c, a[tile][1], b[1][nt][0], b[1][nt][1], c);
            scale_add(acc[tile][g * NT + nt], c, s[tile].x, s[tile].y);
            if constexpr (MINIMUM)
              scale_add(acc[tile][g * NT + nt], {n.x, n.y, n.x, n.y}, low[tile].x, low[tile].y);
          }
        }
      }
    }
  }

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  template <int G>
  static DEVICE void add_wgmma(Acc<2 * G>& acc, const u8* unit, const GroupedActivations& act,
                               int warp, int lane) {
    constexpr int GROUP_SUM_BYTES = K / 32 * SUMS_BYTES;  // of a group
    const int t = lane % 4;
    const ActivationDescriptors<K / 64> b(act.halves);
    const uint4* codes = (const uint4*)unit + warp * K + lane;
    const u32* upper = (const u32*)(unit + CODES) + warp * K + lane;
    const uint2* d = (const uint2*)(unit + CODES + UPPER) + warp * 8 + lane / 4;
    const uint2* m = (const uint2*)(unit + CODES + UPPER + PLANE) + warp * 8 + lane / 4;
#pragma unroll 2
    for (int k32 = 0; k32 < K / 32; ++k32) {
      const int k64 = k32 / 2, h = k32 % 2;
      const uint2 scales = d[k32 * 32];
      uint2 least;
      if constexpr (MINIMUM) least = m[k32 * 32];
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const uint4 w = codes[tile * (K / 2) + k64 * 32];
        u32 a[2][4];
        const u32 last = BITS == 5 ? upper[tile * (K / 2) + k64 * 32] : 0;
        subnormal_codes<BITS>(a[0], w, last, h * 2);
        subnormal_codes<BITS>(a[1], w, last, h * 2 + 1);
        WgmmaAcc<G> c;
#pragma unroll
        for (int i = 0; i < 2 * G; ++i) {
          const float2 n = grouped_sums32(act.sums + i / 2 * GROUP_SUM_BYTES, k32, i % 2, t);
          c[4 * i] = n.x * LOW, c[4 * i + 1] = n.y * LOW;
          c[4 * i + 2] = n.x * HIGH, c[4 * i + 3] = n.y * HIGH;
        }
        issue_wgmmas<G>(c, a, b, k32 * 2, true);
        wait_wgmmas<G>(c, 0);
        const float2 s = factors(tile ? scales.y : scales.x);
        scale_add_tiles<G>(acc[tile], c, s.x, s.y);
        if constexpr (MINIMUM) {
          const float2 low = minima(tile ? least.y : least.x);
#pragma unroll
          for (int i = 0; i < 2 * G; ++i) {
            const float2 n = grouped_sums32(act.sums + i / 2 * GROUP_SUM_BYTES, k32, i % 2, t);
            scale_add(acc[tile][i], {n.x, n.y, n.x, n.y}, low.x, low.y);
          }
        }
      }
    }
  }
#endif

  // Factors of rows g and g + 8, for their fragments.
  static DEVICE float2 factors(u32 pair) {
    return {from_half((u16)pair) * SUBNORMAL_SCALE,
            from_half((u16)(pair >> 16)) * (SUBNORMAL_SCALE / RISE)};
  }
  static DEVICE float2 minima(u32 pair) {
    return {from_half((u16)pair) * (-1.0f / 1024), from_half((u16)(pair >> 16)) * (-1.0f / 1024)};
  }
};

namespace raw {

template <int BITS, bool MINIMUM>
struct Blocks32 {  // Q4_0 Q4_1 Q5_0 Q5_1
  static constexpr int VALUES = 32, HIGH = MINIMUM ? 4 : 2, CODES = HIGH + (BITS == 5 ? 4 : 0);
  static constexpr int BYTES = CODES + 16, ALIGN = MINIMUM ? 4 : 2;

  static DEVICE void values(float (&w)[8], const u8* row, int k) {
    const u8* block = row + k / 32 * BYTES;
    uint2 codes = shifted(load8<ALIGN>(block + CODES + k % 16), k % 32 / 16 * 4, 0x0f0f0f0fu);
    if constexpr (BITS == 5) {  // spread 4 bits to the low bits of 4 bytes by a multiplication
      const u16* high = (const u16*)(block + HIGH);
      const u32 bits = (high[0] | (u32)high[1] << 16) >> (k % 32);
      codes.x |= ((bits & 15) * 0x00204081u & 0x01010101u) << 4;
      codes.y |= ((bits >> 4 & 15) * 0x00204081u & 0x01010101u) << 4;
    }
    const float zero = MINIMUM ? 0 : 1 << (BITS - 1);
    affine(w, codes, zero, load_half(block), MINIMUM ? load_half(block + 2) : 0.0f);
  }
};

}  // namespace raw

namespace quad {

template <int BITS, bool MINIMUM>
struct Blocks32 {
  static constexpr int BLOCK = 32, HEAD = MINIMUM ? 4 : 2, CODES = HEAD + (BITS == 5 ? 4 : 0);
  static constexpr int BYTES = CODES + 16;
  static constexpr int BIAS = MINIMUM ? 0 : 1 << (BITS - 1);

  static DEVICE float4 raw(const u8* b, int k) {
    CodeQuad f;
    f.scale = half_at(b), f.offset = MINIMUM ? half_at(b + 2) : 0.0f;
    const u32 high = BITS == 5 ? word_at(b + HEAD) : 0;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int at = k + e;
      f.code[e] = (b[CODES + at % 16] >> (at / 16 * 4) & 15) | (high >> at & 1) << 4;
      f.code[e] -= BIAS;
    }
    return f.values();
  }
  static DEVICE float4 packed(const PackedQuad& p) {
    const int planes = p.columns * (BITS == 5 ? 80 : 64);
    CodeQuad f;
    f.scale = p.plane(planes, 0), f.offset = MINIMUM ? p.plane(planes, 1) : 0.0f;
#pragma unroll
    for (int e = 0; e < 4; ++e) f.code[e] = (BITS == 5 ? p.five_bits(e) : p.nibble(e)) - BIAS;
    return f.values();
  }
};

}  // namespace quad

namespace fragment {

template <int BITS, bool MINS, int K>
struct Blocks32 {
  static constexpr int CODES = K * 64, PLANE = BITS == 5 ? K * 16 : 0, SCALES = K / 32 * 256;
  static constexpr int UNIT = K, BYTES = CODES + PLANE + SCALES * (MINS ? 2 : 1);
  const u8* unit;
  int tile, lane;

  DEVICE Blocks32(const u8* unit, int tile, int lane) : unit(unit), tile(tile), lane(lane) {}
  DEVICE void values(int k64, Values& v) const {
    const int at = (tile * (K / 64) + k64) * 32 + lane;
    const uint4 q = load_streaming((const uint4*)unit + at);
    const u32 last = BITS == 5 ? ((const u32*)(unit + CODES))[at] : 0;
    const u32 words[5] = {q.x, q.y, q.z, q.w, last};
    const float bias = MINS ? 0 : BITS == 5 ? 16 : 8;
#pragma unroll
    for (int k32 = 0; k32 < 2; ++k32) {
      const u8* plane = unit + CODES + PLANE;
      const u32 d = plane_pair(plane, k64 * 2 + k32, tile, lane);
      const u32 m = MINS ? plane_pair(plane + SCALES, k64 * 2 + k32, tile, lane) : 0;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float s = from_half(d >> (16 * r)), least = from_half(m >> (16 * r));
#pragma unroll
        for (int j = 2 * k32; j < 2 * k32 + 2; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float x = s * bits_to_float(code_bits<BITS>(words, r, e, j), 31, bias);
            v[r][j][e] = MINS ? x + least : x;
          }
      }
    }
  }
};

}  // namespace fragment
