// GEMM with Q4_K weights in packed order (g4spec/runtime/cuda/weights/packing.py): value = d *
// scale * q - dmin * min. Q5_K is the same with a fifth bit. Interface of a format: gemm_tile.cuh.
#pragma once
#include "gemm_tile.cuh"

template <int BITS>
struct Affine {
  static constexpr int UPPER = 16384, HEADER = UPPER + (BITS - 4) * 4096;
  static constexpr int UNIT = 256, UNIT_BYTES = HEADER + 2048, SCRATCH = Q4_K_SCRATCH;
  static constexpr int SUMS = SPLIT32, SUMS_BYTES = 64;  // of 8 rows of a block

  // The factors of one row's eight groups of 32; one lane per row.
  struct Factors {
    float scales[8], dmin;
    u32 mins[4];  // pairs of codes

    // Fragments hold the codes of rows g + 8 times 16, so `share` divides their scales by 16. It
    // also contains 2^24, because codes are subnormal halves.
    DEVICE Factors(uint4 h, float share) {
      const float d = from_half(h.x) * share;
      const float bias = -8388608.0f * d;
      const u32 scale = h.y, scale_end = h.w & 0xffff, min = h.z, min_end = h.w >> 16;
      dmin = from_half(h.x >> 16) * SUBNORMAL_SCALE;
#pragma unroll
      for (int i = 0; i < 8; ++i) {  // d * (2^23 + scale) - d * 2^23, which is exact
        const u32 bits = and_or(extract_bits(scale, scale_end, 6 * i), 63, 0x4b000000u);
        scales[i] = fmaf(d, __uint_as_float(bits), bias);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const u32 two = extract_bits(min, min_end, 12 * i);
        mins[i] = and_or(two << 10, 0x3f0000u, two & 0x3fu);
      }
    }
  };

  template <int NT>
  struct Lane {
    static constexpr int MINS = 1024, DMINS = 1536;  // in scratch
    using Operands = KOperands<NT, u32, BITS == 5>;
    float share;  // factor of d: 2^24, and 1/16 for rows g + 8
    u32 codes, upper, header, rows, sums, place, tiled_sums;  // offsets
    u8 *put, *put_mins;                    // in scratch
    const u8 *scales, *mins;

    DEVICE Lane(u8* scratch, int warp, int lane) {
      const int g = lane / 4, t = lane % 4, unit = warp / 4 * UNIT_BYTES;
      const int at = warp % 4 * 256 + lane;
      share = materialize(SUBNORMAL_SCALE * (lane & 8 ? 0.0625f : 1.0f));
      codes = materialize(unit + at * 16);
      upper = materialize(unit + UPPER + at * 4);
      header = materialize(unit + HEADER + (warp % 4 * 32 + lane) * 16);
      rows = materialize(lane * 16);
      sums = materialize(t * ACT_BYTES * NT + SPLIT32 * NT + g * 8);
      place = materialize(ldmatrix_offset<4>(lane));
      tiled_sums = materialize((t * 8 * NT + g) * 8);
      put = materialize_shared(scratch + scratch_slot(lane) * 4);
      put_mins = materialize_shared(scratch + MINS + lane * 16);
      scales = materialize_shared(scratch + g * 16);
      mins = materialize_shared(scratch + MINS + (g * 4 + t) * 4);
    }

    DEVICE void store(const Factors& f) const {
#pragma unroll
      for (int i = 0; i < 8; ++i) ((float*)put)[i * 32] = f.scales[i];
      *(uint4*)put_mins = {f.mins[0], f.mins[1], f.mins[2], f.mins[3]};
      *(float*)(put + DMINS) = f.dmin;
    }

    DEVICE void multiply(Acc<NT>& acc, const u8* unit, const u8* act) const {
      const u8 *w = unit + codes, *u = unit + upper, *x = act + rows;
      const Factors factors(*(const uint4*)(unit + header), share);
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
      subtract_mins(acc, act + sums);
    }

    template <int G>
    DEVICE void multiply_row_groups(Acc<NT> (&acc)[G], const u8* unit,
                                    const GroupedActivations& act) const {
      constexpr int GROUP_SUM_BYTES = 4 * SUMS_BYTES * NT;  // of a group
      const u8 *w = unit + codes, *u = unit + upper;
      const Factors factors(*(const uint4*)(unit + header), share);
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
          for (int i = 0; i < 4; ++i) {
            const int step = i / 2, tile = i % 2;
            const uint4 v = own.w[tile];
            subnormal_nibbles(a[step][tile], step ? (h ? v.w : v.y) : (h ? v.z : v.x));
            if constexpr (BITS == 5) add_fifth_bits(a[step][tile], own.upper[tile], h * 2 + step);
          }
          const float4 s = ((const float4*)scales)[(j * 2 + h) * 8];
#pragma unroll
          for (int g = 0; g < G; ++g) {
            scheduling_barrier();
            add_half(acc[g], a, act.halves + (g * 4 * NT + j) * TILE_BYTES, h, s);
          }
        }
      }
#pragma unroll
      for (int g = 0; g < G; ++g)
        subtract_mins(acc[g], act.sums + tiled_sums + g * GROUP_SUM_BYTES);
    }

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    // 2 P chains of two wgmmas each (two weight tiles times P parts of G / P token groups). One
    // chain is scaled and added to acc while the others run.
    template <int G, int P>
    DEVICE void multiply_wgmma(Acc<NT> (&acc)[G], const u8* unit,
                               const GroupedActivations& act) const {
      constexpr int N = G / P, CHAINS = 2 * P;
      const u8 *w = unit + codes, *u = unit + upper;
      const ActivationDescriptors<4> b(act.halves);
      const Factors factors(*(const uint4*)(unit + header), share);
      KWeights<u32, BITS == 5> next(w, u, 0);
      store(factors);
      __syncwarp();
      WgmmaAcc<N> c[CHAINS];
      float4 s, before;
      const auto finish = [&](int chain, int newest, float4 of) {
        wait_wgmmas<N>(c[chain], newest);
        const int tile = chain / P;
        scale_add_tiles<N>(acc, tile, c[chain], tile ? of.z : of.x, tile ? of.w : of.y,
                           chain % P * N);
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
            const uint4 v = own.w[tile];
            u32 a[2][4];  // [step]
            subnormal_nibbles(a[0], h ? v.z : v.x);
            subnormal_nibbles(a[1], h ? v.w : v.y);
            if constexpr (BITS == 5) {
              add_fifth_bits(a[0], own.upper[tile], h * 2);
              add_fifth_bits(a[1], own.upper[tile], h * 2 + 1);
            }
#pragma unroll
            for (int part = 0; part < P; ++part) {
              const int chain = tile * P + part, oldest = (chain + 1) % CHAINS;
              issue_wgmmas<N>(c[chain], a, b, j * 4 + h * 2, part * N);
              if (oldest == 0) finish(oldest, CHAINS - 1, s);
              else if (j + h) finish(oldest, CHAINS - 1, before);
            }
          }
        }
      }
#pragma unroll
      for (int chain = 1; chain < CHAINS; ++chain) finish(chain, CHAINS - 1 - chain, s);
#pragma unroll
      for (int g = 0; g < G; ++g)
        subtract_mins(acc[g], act.sums + tiled_sums + g * 4 * (SUMS_BYTES * NT));
    }
#endif

    // MMA over 32 columns, one quant group.
    DEVICE void add_half(Acc<NT>& acc, const u32 (&a)[2][2][4], const u8* x, int h, float4 s) const {
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
        scale_add(acc[0][nt], c[0][nt], s.x, s.y);
        scale_add(acc[1][nt], c[1][nt], s.z, s.w);
      }
    }

    // MMA over 64 columns, two quant groups.
    DEVICE void add(Acc<NT>& acc, const Operands& of, int j) const {
      const auto& w = of.w;
      float c[2][2][NT][4];  // [half][tile]: independent chains of two MMAs
      float zero[4] = {0, 0, 0, 0};
#pragma unroll
      for (int step = 0; step < 2; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int h = i / 2, tile = i % 2;
          u32 a[4];
          subnormal_nibbles(a, step ? (h ? w[tile].w : w[tile].y) : (h ? w[tile].z : w[tile].x));
          if constexpr (BITS == 5) add_fifth_bits(a, of.upper[tile], h * 2 + step);
#pragma unroll
          for (int nt = 0; nt < NT; ++nt) {
            const auto& frag = of.b[h][step][nt];
            mma_f16(c[h][tile][nt], a, frag[0], frag[1], step ? c[h][tile][nt] : zero);
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

    // Subtract dmin * min * (sum of activations) as one MMA of the integer minima with the sums. A
    // sum is stored as two halves (high part and remainder); they are the two halves of the MMA's
    // K.
    DEVICE void subtract_mins(Acc<NT>& acc, const u8* sums) const {
      const float4 dmin = *(const float4*)(scales + DMINS);
      uint2 s[NT];
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) s[nt] = ((const uint2*)sums)[nt * 8];
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const u32 m0 = ((const u32*)mins)[tile * 64];
        const u32 m1 = ((const u32*)mins)[tile * 64 + 32];
        const u32 a[4] = {m0, m1, m0, m1};
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
          float c[4] = {0, 0, 0, 0};
          mma_f16(c, a, s[nt].x, s[nt].y, c);
          scale_add(acc[tile][nt], c, tile ? -dmin.z : -dmin.x, tile ? -dmin.w : -dmin.y);
        }
      }
    }
  };
};

using Q4K = Affine<4>;
