// GEMM for types whose values are d * scale * q - dmin * min, with codes q of 4 or 5 bits and a scale and
// a minimum per 32 values: Q4_K, Q5_K and, with another header, IQ3_S. Codes are subnormal halves
// (gemm_tile.cuh); minima are subtracted at the end of a unit, as an MMA of their own.
#pragma once
#include "gemm_tile.cuh"

// A lane's operands of 64 columns: 4-bit codes of both weight tiles, their upper bits, and activations.
template <int NT, class Upper, bool HAS_UPPER = true>
struct KOperands {
  uint4 w[2];
  Upper upper[2];
  u32 b[2][2][NT][2];

  DEVICE KOperands(const u8* codes, const u8* uppers, const u8* rows, int k64) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      w[tile] = ((const uint4*)codes)[tile * 128 + k64 * 32];
      if constexpr (HAS_UPPER) upper[tile] = ((const Upper*)uppers)[tile * 128 + k64 * 32];
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) load_b_fragments<NT>(b[h], rows, k64, h);
  }
};

// KOperands without activations, for several row groups.
template <class Upper, bool HAS_UPPER = true>
struct KWeights {
  uint4 w[2];
  Upper upper[2];

  DEVICE KWeights(const u8* codes, const u8* uppers, int k64) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      w[tile] = ((const uint4*)codes)[tile * 128 + k64 * 32];
      if constexpr (HAS_UPPER) upper[tile] = ((const Upper*)uppers)[tile * 128 + k64 * 32];
    }
  }
};

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
// codes of rows g + 8 times 16 or 32, so it divides their scales by it. It also contains 2^24, because
// codes are subnormal halves.
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
  static constexpr int UNIT = 256, UNIT_BYTES = HEADER + 128 * Header::BYTES,
                       SCRATCH = Q4_K_SCRATCH;
  static constexpr int SUMS = SPLIT32, SUMS_BYTES = 64;  // of 8 rows of a block

  template <int NT>
  struct Lane {
    static constexpr int MINS = 1024, DMINS = 1536;  // in scratch
    using Operands = KOperands<NT, u32, BITS == 5>;
    float share;  // factor of scales: 2^24, and less for rows g + 8
    Header header;
    u32 codes, upper, rows, sums, place, tiled_sums;  // offsets
    u8 *put, *put_mins;  // in scratch
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
