// Q6_K: a value is d * scale * (q - 32). Views: formats.cuh.
#pragma once
#include "fragments.cuh"
#include "gemm_scaled.cuh"
#include "quads.cuh"
#include "raw_values.cuh"

struct Q6K {
  static constexpr int UNIT = 256, UNIT_BYTES = 26880, SCRATCH = Q6_K_SCRATCH;
  static constexpr int UPPER = 16384, SCALES = 24576, D = SCALES + 2048;
  static constexpr int SUMS = SPLIT16, SUMS_BYTES = 0;  // no sums of activations

  // The factors of one row; one lane per row.
  struct Factors {
    u32 scales[8];  // of 16 groups of 16: pairs of halves
    float d;        // times 2^24, because codes are subnormal halves

    // Fragments hold the codes of rows g + 8 times 16, so `share` divides their scales by 16.
    DEVICE Factors(const u8* header, float d, u32 share, u32 bias) : d(d * SUBNORMAL_SCALE) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {  // (1152 + scale) * share - 1152 * share: exact
        const u32 four = ((const u32*)header)[i / 2] ^ 0x80808080u;
        scales[i] = fma_half2(permute(four, HALF2_1024, i % 2 ? 0x5352 : 0x5150), share, bias);
      }
    }
  };

  template <int NT>
  struct Lane : ScaledLane<Lane<NT>, NT> {
    static constexpr int FACTORS = 1024;  // in scratch
    struct Weights {
      uint4 low;
      uint2 upper;
    };
    struct Scales {  // rows g, g + 8; four groups of 16 each; and -32 times as much
      u32 low[2], high[2], low_zero[2], high_zero[2];
    };
    u32 share, bias;               // of a row's scales
    u32 codes, upper, header, ds;  // offsets
    u8 *put, *put_d;               // in scratch
    const u8 *own_scales, *own_d;

    DEVICE Lane(u8* scratch, int warp, int lane) : ScaledLane<Lane<NT>, NT>(lane) {
      const int unit = warp / 4 * UNIT_BYTES, at = warp % 4 * 256 + lane,
                row = warp % 4 * 32 + lane;
      share = materialize(lane & 8 ? 0x2c002c00u : 0x3c003c00u);  // 1/16 or 1
      bias = materialize(lane & 8 ? 0xd480d480u : 0xe480e480u);   // -1152 / 16 or -1152
      codes = materialize(unit + at * 16);
      upper = materialize(unit + UPPER + at * 8);
      header = materialize(unit + SCALES + row * 16);
      ds = materialize(unit + D + row * 2);
      put = materialize_shared(scratch + scratch_slot(lane) * 8);
      put_d = materialize_shared(scratch + FACTORS + scratch_slot(lane) * 4);
      own_scales = materialize_shared(scratch + lane / 4 * 32);
      own_d = materialize_shared(scratch + FACTORS + lane / 4 * 16);
    }

    DEVICE Factors factors(const u8* unit) const {
      return {unit + header, from_half(*(const u16*)(unit + ds)), share, bias};
    }
    DEVICE const float* d() const { return (const float*)own_d; }
    DEVICE void store(const Factors& f) const {
#pragma unroll
      for (int j = 0; j < 4; ++j) ((uint2*)put)[j * 32] = {f.scales[2 * j], f.scales[2 * j + 1]};
      *(float*)put_d = f.d;
    }
    DEVICE Weights weights(const u8* unit, int tile, int j) const {
      return {((const uint4*)(unit + codes))[tile * 128 + j * 32],
              ((const uint2*)(unit + upper))[tile * 128 + j * 32]};
    }
    DEVICE Scales scales(int tile, int j) const {
      const uint4 s = ((const uint4*)own_scales)[j * 16 + tile];
      Scales of = {{s.x, s.y}, {s.z, s.w}};
#pragma unroll
      for (int i = 0; i < 2; ++i) {  // codes are over 2^24: 32 of rows g, 512 of rows g + 8
        of.low_zero[i] = mul_half2(of.low[i], 0x80208020u);
        of.high_zero[i] = mul_half2(of.high[i], 0x82008200u);
      }
      return of;
    }
    // (code - 32) * scale, rounded once if it is over 2048.
    DEVICE void fragment(u32 (&a)[4], const Weights& w, const Scales& s, int k) const {
      subnormal_nibbles(a, k == 0 ? w.low.x : k == 1 ? w.low.y : k == 2 ? w.low.z : w.low.w);
      const u32 h = k / 2 ? w.upper.y : w.upper.x;
      const u32 other = permute(h, 0, 0x2301);  // bytes of each half swapped
      if (k % 2 == 0) {
        a[0] = and_or(h, 0x00300030u, a[0]), a[2] = and_or(other, 0x00300030u, a[2]);
        a[1] = and_or(other >> 2, 0x03000300u, a[1]), a[3] = and_or(h >> 2, 0x03000300u, a[3]);
      } else {
        a[0] = and_or(h >> 2, 0x00300030u, a[0]), a[2] = and_or(other >> 2, 0x00300030u, a[2]);
        a[1] = and_or(other, 0x03000300u, a[1]), a[3] = and_or(h, 0x03000300u, a[3]);
      }
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        a[i] = fma_half2_by(a[i], s.low[k / 2], s.low_zero[k / 2], k % 2);
        a[i + 1] = fma_half2_by(a[i + 1], s.high[k / 2], s.high_zero[k / 2], k % 2);
      }
    }
  };
};

// Approximate GEMM with Q6_K weights (screen.py): reads only the upper two bits u of the codes and
// the scales, 39 % of the bytes. value ~ d * scale * (16 u - 24), as if the lower four bits were 8 (7.5
// is their average). It is 32 d * (scale / 4) * (2 u - 3): with the upper six bits of a scale the last
// two factors give an int8, and activations are int8 with one scale per unit; the error of both is
// small compared to the missing bits. A unit is one int32 sum (mma m16n8k32 s8).
struct Q6KUpper {
  static constexpr int UNIT = 256, UNIT_BYTES = Q6K::UNIT_BYTES - Q6K::UPPER;
  static constexpr int SCRATCH = Q6_K_UPPER_SCRATCH;
  static constexpr int SCALES = Q6K::SCALES - Q6K::UPPER, D = Q6K::D - Q6K::UPPER;
  // Accumulators start at the bits of 1.5 * 2^23, so that an int32 sum can be read as a float.
  static constexpr u32 ZERO = 0x4b400000u;

  // A lane's operands of 64 columns: upper bits of both weight tiles, and activations.
  template <int NT>
  struct Operands {
    uint2 bits[2];
    u32 b[2][NT][2];

    DEVICE Operands(const u8* uppers, const u8* rows, int k64) {
#pragma unroll
      for (int tile = 0; tile < 2; ++tile)
        bits[tile] = ((const uint2*)uppers)[tile * 128 + k64 * 32];
      const uint4* p = (const uint4*)rows + k64 * 32 * NT;
#pragma unroll
      for (int i = 0; i < NT; ++i) {  // both halves of one tile, or a half of both
        const uint4 v = p[i * 32];
        const int h = NT == 1 ? 1 : i, nt = NT - 1;
        b[i][0][0] = v.x, b[i][0][1] = v.y, b[h][nt][0] = v.z, b[h][nt][1] = v.w;
      }
    }
  };

  template <int NT>
  struct Lane {
    u32 upper, header, ds, rows, row_scales;  // offsets
    u32 odd;                                  // 4 in each byte, kept in a register
    u8* put;                                  // in scratch
    const u8* values;

    DEVICE Lane(u8* scratch, int warp, int lane) {
      const int unit = warp / 4 * UNIT_BYTES, row = warp % 4 * 32;
      upper = materialize(unit + (warp % 4 * 256 + lane) * 8);
      header = materialize(unit + SCALES + (row + lane) * 16);
      ds = materialize(unit + D + (row + lane / 4) * 2);
      rows = materialize(lane * 16);
      row_scales = materialize(BYTE_SCALES * NT + lane % 4 * 8);
      odd = materialize(0x04040404u);
      put = materialize_shared(scratch + scratch_slot(lane) * 4);
      values = materialize_shared(scratch + lane / 4 * 16);
    }

    // Store the four possible values of a code, scale times -3, -1, 1, 3, for each group; one lane
    // per row.
    DEVICE void store(uint4 header) const {
      const u32 four[4] = {header.x, header.y, header.z, header.w};
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const i32 scale = (i32)(four[i / 4] << (24 - i % 4 * 8)) >> 26;
        ((u32*)put)[i * 32] = (u32)(scale * 0x0300fefd + (i32)0x80808080u) ^ 0x80808080u;
      }
    }

    DEVICE void multiply(Acc<NT>& acc, const u8* unit, const u8* act) const {
      const u8 *u = unit + upper, *x = act + rows;
      const uint4 factors = *(const uint4*)(unit + header);
      Operands<NT> next(u, x, 0);
      store(factors);
      __syncwarp();
      u32 c[2][NT][4];
#pragma unroll
      for (int i = 0; i < 8 * NT; ++i) c[i / (4 * NT)][i / 4 % NT][i % 4] = ZERO;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const Operands<NT> own = next;
        if (j + 1 < 4) next = Operands<NT>(u, x, j + 1);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint4 e = ((const uint4*)values)[(j * 4 + h * 2) * 8];
          const uint4 o = ((const uint4*)values)[(j * 4 + h * 2 + 1) * 8];
          add(c[0], h ? own.bits[0].y : own.bits[0].x, own.b[h], e.x, e.y, o.x, o.y);
          add(c[1], h ? own.bits[1].y : own.bits[1].x, own.b[h], e.z, e.w, o.z, o.w);
        }
      }
      finish(acc, c, unit + ds, act + row_scales);
    }

    // MMA over 32 columns, two quant groups (even, odd), of 16 rows. *_low, *_high: the values of
    // rows g and g + 8.
    DEVICE void add(u32 (&c)[NT][4], u32 bits, const u32 (&b)[NT][2], u32 even_low, u32 even_high,
                    u32 odd_low, u32 odd_high) const {
      // Selector nibbles, alternating codes of the even group and of the odd group (+ 4).
      const u32 low = and_or(bits >> 6, 0x03030303u, and_or(bits, 0x30303030u, odd));
      const u32 high = and_or(bits << 2, 0x30303030u, and_or(bits, 0x03030303u, odd));
      const u32 a[4] = {permute_unmasked(even_low, odd_low, low),
                        permute_unmasked(even_high, odd_high, high),
                        permute_unmasked(even_low, odd_low, low >> 16),
                        permute_unmasked(even_high, odd_high, high >> 16)};
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) mma_s8(c[nt], a, b[nt][0], b[nt][1]);
    }

    static DEVICE void finish(Acc<NT>& acc, const u32 (&c)[2][NT][4], const u8* ds,
                              const u8* row_scales) {
      float d[4];  // of rows g, g + 8, g + 16, g + 24; 8 for the codes, 4 for the scales
#pragma unroll
      for (int i = 0; i < 4; ++i) d[i] = 32.0f * from_half(*(const u16*)(ds + i * 16));
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
        const float2 s = ((const float2*)row_scales)[nt * 4];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float sum = __uint_as_float(c[i / 4][nt][i % 4]) - __uint_as_float(ZERO);
          acc[i / 4][nt][i % 4] += d[i / 2] * ((i % 2 ? s.y : s.x) * sum);
        }
      }
    }
  };
};
template <>
struct PackedInput<Q6KUpper> {
  static constexpr int UNIT_STRIDE = Q6K::UNIT_BYTES, UNIT_OFFSET = Q6K::UPPER, ROWS = BYTE_ROWS;
};

namespace raw {

struct Q6K {
  static constexpr int VALUES = 256, BYTES = 210;

  static DEVICE void values(float (&w)[8], const u8* row, int k) {
    const u8* block = row + k / 256 * BYTES;
    const int half = k % 256 / 128, r = k % 128;
    uint2 codes = shifted(load8<2>(block + half * 64 + r % 64), r / 64 * 4, 0x0f0f0f0fu);
    const uint2 high = shifted(load8<2>(block + 128 + half * 32 + r % 32), r / 32 * 2, 0x03030303u);
    codes.x |= high.x << 4, codes.y |= high.y << 4;
    const float scale = load_half(block + 208) * ((const i8*)block)[192 + k % 256 / 16];
    affine(w, codes, 32.0f, scale, 0.0f);
  }
};

}  // namespace raw

namespace quad {

struct Q6K {
  static constexpr int BLOCK = 256, BYTES = 210;

  static DEVICE float4 raw(const u8* b, int k) {
    const int half = k / 128, quarter = k / 32 % 4;
    CodeQuad f;
    f.scale = __fmul_rn(half_at(b + 208), (float)(i8)b[192 + k / 16]), f.offset = 0.0f;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int at = k % 32 + e;
      const int low = b[half * 64 + quarter % 2 * 32 + at] >> (quarter / 2 * 4) & 15;
      f.code[e] = (low | (b[128 + half * 32 + at] >> (quarter * 2) & 3) << 4) - 32;
    }
    return f.values();
  }
  static DEVICE float4 packed(const PackedQuad& p) {
    const u8* header = p.unit + p.columns * 96;
    CodeQuad f;
    f.scale = __fmul_rn(half_at(header + 2048 + p.r * 2), (float)(i8)header[p.r * 16 + p.k / 16]);
    f.offset = 0.0f;
#pragma unroll
    for (int e = 0; e < 4; ++e) f.code[e] = (p.nibble(e) | p.upper_bits(e)) - 32;
    return f.values();
  }
};

}  // namespace quad

namespace fragment {

struct Q6K {
  static constexpr int UNIT = 256, BYTES = 16384 + 8192 + 2048 + 256;
  const u8* unit;
  int tile, lane;
  uint4 scales[2];
  float d[2];

  DEVICE Q6K(const u8* unit, int tile, int lane) : unit(unit), tile(tile), lane(lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = tile * 16 + r * 8 + lane / 4;
      scales[r] = ((const uint4*)(unit + 24576))[row];
      d[r] = from_half(((const u16*)(unit + 26624))[row]);
    }
  }
  DEVICE void values(int k64, Values& v) const {
    const int at = (tile * 4 + k64) * 32 + lane;
    const uint4 q = load_streaming((const uint4*)unit + at);
    const uint2 u = ((const uint2*)(unit + 16384))[at];
    const u32 words[4] = {q.x, q.y, q.z, q.w}, high[2] = {u.x, u.y};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const u32 four[4] = {scales[r].x, scales[r].y, scales[r].z, scales[r].w};
      const u32 mine = four[k64] ^ 0x80808080u;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float s = d[r] * bits_to_float(mine >> (8 * j), 255, 128);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const u32 low = words[j] >> nibble_shift(r, e) & 15;
          v[r][j][e] =
              s * bits_to_float((high[j / 2] >> upper_bits_shift(r, e, j) & 3) << 4 | low, 63, 32);
        }
      }
    }
  }
};

}  // namespace fragment
