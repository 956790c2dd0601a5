// Q4_K: a value is d * scale * q - dmin * min. Q5_K is the same with a fifth bit, IQ3_S with other
// scales. Views: formats.cuh.
#pragma once
#include "fragments.cuh"
#include "gemm_tile.cuh"
#include "quads.cuh"
#include "raw_values.cuh"

// Scale (MINIMUM 0) or minimum (1) number i of a packed header (`six_bits` in bit_places.py).
template <int MINIMUM>
DEVICE u32 six_bits(const uint4& h, int i) {
  const int half = i % 2 * 16;
  if (i < 6) return (i < 2 ? h.y : i < 4 ? h.z : h.w) >> (half + 6 * MINIMUM) & 63;
  return ((MINIMUM ? h.z : h.y) >> (half + 12) & 15) | (h.w >> (half + 12 + 2 * MINIMUM) & 3) << 4;
}

// The factors of one row's eight groups of 32 columns; one lane per row.
struct AffineFactors {
  float scales[8], dmin;
  u32 mins[4];  // pairs of codes
};

// Where a lane finds a row's scales and minima of 6 bits. `share`: a factor of scales. Fragments hold the
// codes of rows g + 8 times 16 or 32, so it divides their scales by it. It also contains 2^24, because codes are
// subnormal halves.
struct SixBits {
  static constexpr int BYTES = 16;  // of a row
  u32 at;

  DEVICE SixBits(int headers, int row) : at(materialize(headers + row * 16)) {}
  DEVICE AffineFactors factors(const u8* unit, float share) const {
    const uint4 h = *(const uint4*)(unit + at);
    AffineFactors f;
    const float d = from_half(h.x) * share;
    f.dmin = from_half(h.x >> 16) * SUBNORMAL_SCALE;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 two = pair<0>(h, i);  // in the lower and in the upper half
      f.scales[2 * i] = scaled(d, two, 63, 8388608.0f);
      f.scales[2 * i + 1] = scaled(d, two, 63 << 16, 128.0f);
      f.mins[i] = pair<1>(h, i) & 0x3f003fu;
    }
    return f;
  }
  // d * scale, rounded once: d * (bias + scale) - d * bias, where the scale's lowest bit is 1 in the
  // mantissa of `bias`.
  static DEVICE float scaled(float d, u32 bits, u32 mask, float bias) {
    return fmaf(d, __uint_as_float(and_or(bits, mask, __float_as_uint(bias))), -bias * d);
  }
  // `six_bits` of 2 i and 2 i + 1 in the lower six bits of both halves, whose upper bits are anything.
  template <int MINIMUM>
  static DEVICE u32 pair(const uint4& h, int i) {
    if (i < 3) return (i == 0 ? h.y : i == 1 ? h.z : h.w) >> (6 * MINIMUM);
    const u32 low = (MINIMUM ? h.z : h.y) >> 12 & 0xf000fu;
    return and_or(h.w >> (8 + 2 * MINIMUM), 0x300030u, low);
  }
};

template <int BITS, class Header = SixBits>
struct Affine {
  static constexpr int UPPER = 16384, HEADER = UPPER + (BITS - 4) * 4096;
  static constexpr int UNIT = 256, UNIT_BYTES = HEADER + 128 * Header::BYTES, SCRATCH = Q4_K_SCRATCH;
  static constexpr int SUMS = SPLIT32, SUMS_BYTES = 64;  // of 8 rows of a block

  template <int NT>
  struct Lane {
    static constexpr int MINS = 1024, DMINS = 1536;  // in scratch
    using Operands = KOperands<NT, u32, BITS == 5>;
    float share;  // factor of scales: 2^24, and less for rows g + 8
    Header header;
    u32 codes, upper, rows, sums, place, tiled_sums;  // offsets
    u8 *put, *put_mins;                    // in scratch
    const u8 *scales, *mins;

    DEVICE Lane(u8* scratch, int warp, int lane)
        : header(warp / 4 * UNIT_BYTES + HEADER, warp % 4 * 32 + lane) {
      const int g = lane / 4, t = lane % 4, unit = warp / 4 * UNIT_BYTES;
      const int at = warp % 4 * 256 + lane;
      share = materialize(SUBNORMAL_SCALE / (lane & 8 ? (float)upper_factor(BITS) : 1.0f));
      codes = materialize(unit + at * 16);
      upper = materialize(unit + UPPER + at * 4);
      rows = materialize(lane * 16);
      sums = materialize(t * ACT_BYTES * NT + SPLIT32 * NT + g * 8);
      place = materialize(ldmatrix_offset<4>(lane));
      tiled_sums = materialize(g * 16 + t * 4);
      put = materialize_shared(scratch + scratch_slot(lane) * 4);
      put_mins = materialize_shared(scratch + MINS + lane * 16);
      scales = materialize_shared(scratch + g * 16);
      mins = materialize_shared(scratch + MINS + (g * 4 + t) * 4);
    }

    DEVICE void store(const AffineFactors& f) const {
#pragma unroll
      for (int i = 0; i < 8; ++i) ((float*)put)[i * 32] = f.scales[i];
      *(uint4*)put_mins = {f.mins[0], f.mins[1], f.mins[2], f.mins[3]};
      *(float*)(put + DMINS) = f.dmin;
    }

    DEVICE void multiply(Acc<NT>& acc, const u8* unit, const u8* act) const {
      const u8 *w = unit + codes, *u = unit + upper, *x = act + rows;
      const AffineFactors factors = header.factors(unit, share);
      Operands next(w, u, x, 0);
      store(factors);
      __syncwarp();
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const Operands own = next;
        if (j + 1 < 4) next = Operands(w, u, x, j + 1);
        add(acc, own, j);
#if ARCH < 900 || ARCH >= 1200
        __syncwarp();  // keeps loads from being hoisted, which would spill registers
#endif
      }
      subtract_mins<NT, 64, 4>(acc, act + sums);
    }

    template <int G>
    DEVICE void multiply_row_groups(Acc<NT * G>& acc, const u8* unit,
                                    const GroupedActivations& act) const {
      const u8 *w = unit + codes, *u = unit + upper;
      const AffineFactors factors = header.factors(unit, share);
      KWeights<u32, BITS == 5> next(w, u, 0);
      store(factors);
      __syncwarp();
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const auto own = next;
        if (j + 1 < 4) next = KWeights<u32, BITS == 5>(w, u, j + 1);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          u32 a[2][2][4];  // [step][tile]
#pragma unroll
          for (int i = 0; i < 4; ++i)
            subnormal_codes<BITS>(a[i / 2][i % 2], own.w[i % 2], own.upper[i % 2], h * 2 + i / 2);
          const float4 s = ((const float4*)scales)[(j * 2 + h) * 8];
#pragma unroll
          for (int g = 0; g < G; ++g) {
            scheduling_barrier();
            add_half<G>(acc, g, a, act.halves + (g * 4 * NT + j) * TILE_BYTES, h, s);
          }
        }
      }
      subtract_mins<NT * G, 256, 128>(acc, act.sums + tiled_sums);
    }

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    // Two chains of two wgmmas, one for each weight tile. One is scaled and added to acc while the
    // other is computed.
    template <int G>
    DEVICE void multiply_wgmma(Acc<NT * G>& acc, const u8* unit,
                               const GroupedActivations& act) const {
      const u8 *w = unit + codes, *u = unit + upper;
      const ActivationDescriptors<4> b(act.halves);
      const AffineFactors factors = header.factors(unit, share);
      KWeights<u32, BITS == 5> next(w, u, 0);
      store(factors);
      __syncwarp();
      WgmmaAcc<G> c[2];
      float4 s, before;
      const auto finish = [&](int tile, int newest, float4 of) {
        wait_wgmmas<G>(c[tile], newest);
        scale_add_tiles<G>(acc[tile], c[tile], tile ? of.z : of.x, tile ? of.w : of.y);
      };
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const auto own = next;
        if (j + 1 < 4) next = KWeights<u32, BITS == 5>(w, u, j + 1);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          before = s;
          s = ((const float4*)scales)[(j * 2 + h) * 8];
#pragma unroll
          for (int tile = 0; tile < 2; ++tile) {
            u32 a[2][4];  // [step]
            subnormal_codes<BITS>(a[0], own.w[tile], own.upper[tile], h * 2);
            subnormal_codes<BITS>(a[1], own.w[tile], own.upper[tile], h * 2 + 1);
            issue_wgmmas<G>(c[tile], a, b, j * 4 + h * 2);
            if (tile)
              finish(0, 1, s);
            else if (j + h)
              finish(1, 1, before);
          }
        }
      }
      const float4 dmin = *(const float4*)(scales + DMINS);
      const float4 minus = {-dmin.x, -dmin.y, -dmin.z, -dmin.w};
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {  // minima, one wgmma for each weight tile
        u32 a[4];
        min_fragment(a, tile);
        issue_wgmma<G>(c[tile], a, smem_descriptor_plain(act.sums, 128, 256));
        if (tile == 0)
          finish(1, 1, s);
        else
          finish(0, 1, minus);
      }
      finish(1, 0, minus);
    }
#endif

    // MMA over 32 columns, one quant group.
    template <int G>
    DEVICE void add_half(Acc<NT * G>& acc, int g, const u32 (&a)[2][2][4], const u8* x, int h,
                         float4 s) const {
      float zero[4] = {0, 0, 0, 0};
      u32 b[2][NT][2];
      float c[2][NT][4];
      ldmatrix_b_fragments<NT>(b, x, place, h);
#pragma unroll
      for (int step = 0; step < 2; ++step)
#pragma unroll
        for (int i = 0; i < 2 * NT; ++i) {
          auto& sum = c[i % 2][i / 2];
          const auto& frag = b[step][i / 2];
          mma_f16(sum, a[step][i % 2], frag[0], frag[1], step ? sum : zero);
        }
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
        scale_add(acc[0][g * NT + nt], c[0][nt], s.x, s.y);
        scale_add(acc[1][g * NT + nt], c[1][nt], s.z, s.w);
      }
    }

    // MMA over 64 columns, two quant groups.
    DEVICE void add(Acc<NT>& acc, const Operands& of, int j) const {
      const auto& w = of.w;
      float c[2][2][NT][4];  // [half][tile]: independent chains of two MMAs
      float zero[4] = {0, 0, 0, 0};
#pragma unroll
      for (int step = 0; step < 2; ++step) {
#if ARCH >= 1200
        if (BITS == 5 && step) __syncwarp();  // operands of both steps at once would spill
#endif
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int h = i / 2, tile = i % 2;
          u32 a[4];
          subnormal_codes<BITS>(a, w[tile], of.upper[tile], h * 2 + step);
#pragma unroll
          for (int nt = 0; nt < NT; ++nt) {
            const auto& frag = of.b[h][step][nt];
            mma_f16(c[h][tile][nt], a, frag[0], frag[1], step ? c[h][tile][nt] : zero);
          }
        }
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float4 s = ((const float4*)scales)[(j * 2 + h) * 8];
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
          scale_add(acc[0][nt], c[h][0][nt], s.x, s.y);
          scale_add(acc[1][nt], c[h][1][nt], s.z, s.w);
        }
      }
    }

    // A fragment of the minima of a weight tile: the two halves of K are equal, since a sum of
    // activations is stored as two halves (high part and remainder).
    DEVICE void min_fragment(u32 (&a)[4], int tile) const {
      a[0] = a[2] = ((const u32*)mins)[tile * 64];
      a[1] = a[3] = ((const u32*)mins)[tile * 64 + 32];
    }
    // Subtract dmin * min * (sum of activations) for N tiles of 8 tokens, as one MMA each of the integer
    // minima with the sums. TILE: bytes from one tile's sums to the next; LOW: from a sum's high part
    // to its remainder.
    template <int N, int TILE, int LOW>
    DEVICE void subtract_mins(Acc<N>& acc, const u8* sums) const {
      const float4 dmin = *(const float4*)(scales + DMINS);
      u32 a[2][4];
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) min_fragment(a[tile], tile);
#pragma unroll
      for (int nt = 0; nt < N; ++nt) {
        uint2 s;
        if constexpr (LOW == 4)
          s = *(const uint2*)(sums + nt * TILE);
        else
          s = {*(const u32*)(sums + nt * TILE), *(const u32*)(sums + nt * TILE + LOW)};
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
          float c[4] = {0, 0, 0, 0};
          mma_f16(c, a[tile], s.x, s.y, c);
          scale_add(acc[tile][nt], c, tile ? -dmin.z : -dmin.x, tile ? -dmin.w : -dmin.y);
        }
      }
    }
  };
};

using Q4K = Affine<4>;

namespace raw {

template <int BITS>
struct Affine {  // Q4_K Q5_K
  static constexpr int VALUES = 256, CODES = BITS == 5 ? 48 : 16, BYTES = CODES + 128;

  static DEVICE void values(float (&w)[8], const u8* row, int k) {
    const u8* block = row + k / 256 * BYTES;
    const int group = k % 256 / 32;
    const uint4 head = *(const uint4*)block;
    uint2 codes =
        shifted(load8<8>(block + CODES + group / 2 * 32 + k % 32), group % 2 * 4, 0x0f0f0f0fu);
    if constexpr (BITS == 5) {
      const uint2 high = shifted(load8<8>(block + 16 + k % 32), group, 0x01010101u);
      codes.x |= high.x << 4, codes.y |= high.y << 4;
    }
    // Groups 0 .. 3: 6-bit scale and minimum in the low bits of a byte, whose upper bits belong to
    // groups 4 .. 7.
    const int at = group % 4 * 8;
    const u32 scale = head.y >> at, least = head.z >> at, lower = head.w >> at;
    const u32 s = group < 4 ? scale & 63 : (lower & 15) | (scale >> 6 & 3) << 4;
    const u32 m = group < 4 ? least & 63 : (lower >> 4 & 15) | (least >> 6 & 3) << 4;
    affine(w, codes, 0.0f, from_half(head.x) * s, -(from_half(head.x >> 16) * m));
  }
};
using Q4K = Affine<4>;

}  // namespace raw

namespace quad {

template <int BITS>
struct Affine {
  static constexpr int BLOCK = 256, CODES = BITS == 5 ? 48 : 16, BYTES = CODES + 128;

  static DEVICE void factors(CodeQuad& f, float d, float dmin, int scale, int minimum) {
    f.scale = __fmul_rn(d, (float)scale), f.offset = -__fmul_rn(dmin, (float)minimum);
  }
  static DEVICE float4 raw(const u8* b, int k) {
    const u8* s = b + 4;
    const int g = k / 32;
    CodeQuad f;
    if (g < 4)
      factors(f, half_at(b), half_at(b + 2), s[g] & 63, s[g + 4] & 63);
    else
      factors(f, half_at(b), half_at(b + 2), (s[g + 4] & 15) | s[g - 4] >> 6 << 4,
              s[g + 4] >> 4 | s[g] >> 6 << 4);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int at = k % 32 + e;
      f.code[e] = b[CODES + k / 64 * 32 + at] >> (g % 2 * 4) & 15;
      if (BITS == 5) f.code[e] |= (b[16 + at] >> g & 1) << 4;
    }
    return f.values();
  }
  static DEVICE float4 packed(const PackedQuad& p) {
    const uint4 h = *(const uint4*)(p.unit + p.columns * (BITS == 5 ? 80 : 64) + p.r * 16);
    CodeQuad f;
    factors(f, from_half((u16)h.x), from_half((u16)(h.x >> 16)), six_bits<0>(h, p.k / 32),
            six_bits<1>(h, p.k / 32));
#pragma unroll
    for (int e = 0; e < 4; ++e) f.code[e] = BITS == 5 ? p.five_bits(e) : p.nibble(e);
    return f.values();
  }
};
using Q4K = Affine<4>;

}  // namespace quad

namespace fragment {

template <int BITS>
struct Affine {
  static constexpr int UNIT = 256, PLANE = BITS == 5 ? 4096 : 0, BYTES = 16384 + PLANE + 2048;
  const u8* unit;
  int tile, lane;
  uint4 header[2];

  DEVICE Affine(const u8* unit, int tile, int lane) : unit(unit), tile(tile), lane(lane) {
    const uint4* h = (const uint4*)(unit + 16384 + PLANE) + tile * 16 + lane / 4;
    header[0] = h[0], header[1] = h[8];
  }
  DEVICE void values(int k64, Values& v) const {
    const uint4 q = load_streaming((const uint4*)unit + (tile * 4 + k64) * 32 + lane);
    const u32 last = BITS == 5 ? ((const u32*)(unit + 16384))[(tile * 4 + k64) * 32 + lane] : 0;
    const u32 words[5] = {q.x, q.y, q.z, q.w, last};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint4 h = header[r];
      const float d = from_half(h.x), least = from_half(h.x >> 16);
#pragma unroll
      for (int k32 = 0; k32 < 2; ++k32) {
        const float s = d * bits_to_float(six_bits<0>(h, k64 * 2 + k32), 63, 0);
        const float m = -least * bits_to_float(six_bits<1>(h, k64 * 2 + k32), 63, 0);
#pragma unroll
        for (int j = 2 * k32; j < 2 * k32 + 2; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            v[r][j][e] = fmaf(s, bits_to_float(code_bits<BITS>(words, r, e, j), 31, 0), m);
          }
      }
    }
  }
};
using Q4K = Affine<4>;

}  // namespace fragment
