// Q6_K in packed order (g4spec/runtime/cuda/packing.py): a value is d * scale * (q - 32).
#pragma once
#include "product.cuh"

struct Q6K {
  static constexpr int UNIT = 256, UNIT_BYTES = 26880, SCRATCH = 2304;
  static constexpr int UPPER = 16384, SCALES = 24576, D = SCALES + 2048;

  struct Factors {  // of a row's groups, one lane a row
    float scales[16], zero;

    // Rows g + 8 of a tile carry codes times 16, so their scales are divided by it. All factors
    // undo the 2^-24 of the codes.
    DEVICE Factors(const u8* header, float whole, float share) {
      const float d = whole * share, bias = -32896.0f * d;
      zero = -32.0f * whole;
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // d * (2^15 + 128 + scale) - d * (2^15 + 128): exact
        const u32 four = ((const u32*)header)[i] ^ 0x80808080u;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const u32 bits = permute(four, 0x47000000u, 0x7604 + j * 16);
          scales[i * 4 + j] = fmaf(d, __uint_as_float(bits), bias);
        }
      }
    }
  };

  template <int NT>
  struct Lane {
    static constexpr int ZEROS = 2048;  // in scratch
    using Operands = KOperands<NT, uint2>;
    float share;  // of d
    u32 codes, upper, header, d, rows, own, sums;  // offsets
    u8* put;                                       // in scratch
    const u8* scales;

    DEVICE Lane(u8* scratch, int warp, int lane) {
      const int g = lane / 4, t = lane % 4, unit = warp / 4 * UNIT_BYTES;
      const int at = warp % 4 * 256 + lane, row = warp % 4 * 32;
      share = now(SUBNORMAL * (lane & 8 ? 0.0625f : 1.0f));
      codes = now(unit + at * 16);
      upper = now(unit + UPPER + at * 8);
      header = now(unit + SCALES + (row + lane) * 16);
      d = now(unit + D + (row + lane) * 2);
      rows = now(lane * 16);
      own = now(unit + SCALES + (row + g) * 16 + t * 2);
      sums = now(t / 2 * ACT_BYTES * NT + SPLIT16 * NT + (t % 2 * 8 * NT + g) * 8);
      put = kept(scratch + row_slot(lane) * 4);
      scales = kept(scratch + g * 16);
    }

    DEVICE void store(const Factors& f) const {
#pragma unroll
      for (int i = 0; i < 16; ++i) ((float*)put)[i * 32] = f.scales[i];
      *(float*)(put + ZEROS) = f.zero;
    }

    DEVICE void multiply(Acc<NT>& acc, const u8* unit, const u8* act) const {
      const u8 *w = unit + codes, *u = unit + upper, *x = act + rows;
      const Factors factors(unit + header, from_half(*(const u16*)(unit + d)), share);
      Operands next(w, u, x, 0);
      store(factors);
      __syncwarp();
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const Operands own = next;
        if (j + 1 < 4) next = Operands(w, u, x, j + 1);
#pragma unroll
        for (int h = 0; h < 2; ++h) add(acc, own, j, h);
      }
      subtract_zeros(acc, unit + own, act + sums);
    }

    // 32 k, which are two groups.
    DEVICE void add(Acc<NT>& acc, const Operands& of, int j, int h) const {
      const float4 s0 = ((const float4*)scales)[(j * 4 + h * 2) * 8];
      const float4 s1 = ((const float4*)scales)[(j * 4 + h * 2 + 1) * 8];
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const uint4 w = of.w[tile];
        const uint2 u = of.upper[tile];
        u32 a[2][4];
        codes_of(a, h ? w.z : w.x, h ? w.w : w.y, h ? u.y : u.x);
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
#pragma unroll
          for (int step = 0; step < 2; ++step) {
            const float4 s = step ? s1 : s0;
            const auto& frag = of.b[h][step][nt];
            float c[4] = {0, 0, 0, 0};
            mma_f16(c, a[step], frag[0], frag[1], c);
            fold(acc[tile][nt], c, tile ? s.z : s.x, tile ? s.w : s.y);
          }
      }
    }

    // Two k16 steps; one word of upper bits serves both.
    static DEVICE void codes_of(u32 (&a)[2][4], u32 x, u32 y, u32 h) {
      subnormal_nibbles(a[0], x);
      subnormal_nibbles(a[1], y);
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        a[step][0] = and_or(h, 0x00300030u, a[step][0]);
        a[step][1] = and_or(h, 0x03000300u, a[step][1]);
        a[step][2] = and_or(h >> 2, 0x00300030u, a[step][2]);
        a[step][3] = and_or(h >> 2, 0x03000300u, a[step][3]);
        h = permute(h, 0, 0x2301);  // bytes of each half swapped: the second step's bits come here
      }
    }

    // Scales are whole numbers: a product of them with the sums of the activations, which are two
    // halves each. The unit's first and last 8 groups are the two sides of its K.
    DEVICE void subtract_zeros(Acc<NT>& acc, const u8* own, const u8* sums) const {
      const float4 zero = *(const float4*)(scales + ZEROS);
      uint2 s[NT][2];
      u32 a[2][2][2];
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const u8* from = sums + side * 2 * ACT_BYTES * NT;
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) s[nt][side] = ((const uint2*)from)[nt * 8];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          a[i / 2][side][i % 2] = halves(*(const u16*)(own + i * 128 + side * 8));
      }
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const auto& x = a[tile];
        const u32 of[4] = {x[0][0], x[0][1], x[1][0], x[1][1]};
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
          float c[4] = {0, 0, 0, 0};
          mma_f16(c, of, s[nt][0].x, s[nt][1].x, c);
          mma_f16(c, of, s[nt][0].y, s[nt][1].y, c);
          fold(acc[tile][nt], c, tile ? zero.z : zero.x, tile ? zero.w : zero.y);
        }
      }
    }

    // Two signed bytes as halves: exact.
    static DEVICE u32 halves(u32 two) {
      return sub_half2(permute(two, MAGIC, 0x5150) ^ 0x00800080u, 0x64806480u);  // 1024 + 128
    }
  };
};
