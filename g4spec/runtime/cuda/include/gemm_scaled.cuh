// GEMM of formats with one half-precision factor d per 256 columns and integer scales per group of
// 16 or 32 columns. Codes are multiplied by their scales in half precision, which is exact up to 2048,
// so sums in the tensor cores run over a whole unit of 256 columns; then they are scaled by d and added.
// That takes fewer instructions where groups are of 16 columns, the more the more rows there are.
//
// A lane derives from ScaledLane<Lane, NT> and has
//   factors(unit)            what a row's header gives; one lane per row
//   store(f)                 stores it in scratch, where all lanes find
//   d()                        factors of rows g, g + 8 of tile 0, then of tile 1 (float[4])
//   Weights, weights(unit, tile, j)  its codes of 64 columns of a weight tile
//   Scales, scales(tile, j)          and their scales
//   fragment(a, w, s, k)     A fragment of k16 step k of these columns: codes times scales
#pragma once
#include "gemm_tile.cuh"

template <class Lane, int NT>
struct ScaledLane {
  static constexpr int BLOCKS = 4;  // of 64 columns
  u32 rows, place;                  // offsets of activations

  DEVICE explicit ScaledLane(int lane)
      : rows(materialize(lane * 16)), place(materialize(ldmatrix_offset<BLOCKS>(lane))) {}
  DEVICE const Lane& own() const { return *(const Lane*)this; }

  // Weights and activations of 64 columns.
  struct Operands {
    typename Lane::Weights w[2];  // of both weight tiles
    u32 b[2][2][NT][2];

    DEVICE Operands(const Lane& own, const u8* unit, const u8* x, int j)
        : w{own.weights(unit, 0, j), own.weights(unit, 1, j)} {
      load_b_fragments<NT>(b[0], x, j, 0), load_b_fragments<NT>(b[1], x, j, 1);
    }
  };

  DEVICE void multiply(Acc<NT>& acc, const u8* unit, const u8* act) const {
    const u8* x = act + rows;
    const auto factors = own().factors(unit);
    Operands next(own(), unit, x, 0);
    own().store(factors);
    __syncwarp();
    Acc<NT> c = {};
#pragma unroll
    for (int j = 0; j < BLOCKS; ++j) {
      const Operands of = next;
      if (j + 1 < BLOCKS) next = Operands(own(), unit, x, j + 1);
      const typename Lane::Scales s[2] = {own().scales(0, j), own().scales(1, j)};
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
          u32 a[4];
          own().fragment(a, of.w[tile], s[tile], k);
#pragma unroll
          for (int nt = 0; nt < NT; ++nt) {
            const auto& b = of.b[k / 2][k % 2][nt];
            mma_f16(c[tile][nt], a, b[0], b[1], c[tile][nt]);
          }
        }
#if ARCH < 900 || ARCH >= 1200
      __syncwarp();  // keeps loads from being hoisted, which would spill registers
#endif
    }
    const float4 d = *(const float4*)own().d();
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      scale_add(acc[0][nt], c[0][nt], d.x, d.y);
      scale_add(acc[1][nt], c[1][nt], d.z, d.w);
    }
  }

  // One weight tile after the other: accumulators of both would spill registers.
  template <int G>
  DEVICE void multiply_row_groups(Acc<NT * G>& acc, const u8* unit,
                                  const GroupedActivations& act) const {
    own().store(own().factors(unit));
    __syncwarp();
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      float c[NT * G][4] = {};
#pragma unroll
      for (int j = 0; j < BLOCKS; ++j) {
        const auto w = own().weights(unit, tile, j);
        const auto s = own().scales(tile, j);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          u32 a[2][4];  // [step]
#pragma unroll
          for (int step = 0; step < 2; ++step) own().fragment(a[step], w, s, h * 2 + step);
#pragma unroll
          for (int g = 0; g < G; ++g) {
            __syncwarp();  // keeps loads of later row groups from being hoisted, which would spill
            u32 b[2][NT][2];
            ldmatrix_b_fragments<NT>(b, act.halves + (g * BLOCKS * NT + j) * TILE_BYTES, place, h);
#pragma unroll
            for (int i = 0; i < 2 * NT; ++i) {
              const int step = i / NT, nt = i % NT;
              auto& sum = c[g * NT + nt];
              mma_f16(sum, a[step], b[step][nt][0], b[step][nt][1], sum);
            }
          }
        }
      }
      const float2 d = ((const float2*)own().d())[tile];
#pragma unroll
      for (int nt = 0; nt < NT * G; ++nt) scale_add(acc[tile][nt], c[nt], d.x, d.y);
    }
  }

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  // One weight tile after the other, each a chain of 16 wgmmas. Up to 64 rows there are two
  // accumulators: one is added to acc while the other is computed.
  template <int G>
  DEVICE void multiply_wgmma(Acc<NT * G>& acc, const u8* unit,
                             const GroupedActivations& act) const {
    const ActivationDescriptors<BLOCKS> b(act.halves);
    own().store(own().factors(unit));
    __syncwarp();
    const auto add = [&](WgmmaAcc<G>& c, int tile, int newer) {
      wait_wgmmas<G>(c, newer);
      const float2 d = ((const float2*)own().d())[tile];
      scale_add_tiles<G>(acc[tile], c, d.x, d.y);
    };
    WgmmaAcc<G> c;
    if constexpr (G > 4) {
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        multiply_tile<G>(c, unit, b, tile, [](int) {});
        add(c, tile, 0);
      }
    } else {
      WgmmaAcc<G> other;
      multiply_tile<G>(c, unit, b, 0, [](int) {});
      multiply_tile<G>(other, unit, b, 1, [&](int pair) {
        if (pair == 1) add(c, 0, 2);
      });
      add(other, 1, 0);
    }
  }

  // c = codes times scales of a weight tile, times activations, in pairs of wgmmas. then(i) is called
  // when pair i has been issued.
  template <int G, class Then>
  DEVICE void multiply_tile(WgmmaAcc<G>& c, const u8* unit, const ActivationDescriptors<BLOCKS>& b,
                            int tile, const Then& then) const {
    u32 a[2][2][4];  // of two pairs in turn
#pragma unroll
    for (int j = 0; j < BLOCKS; ++j) {
      const auto w = own().weights(unit, tile, j);
      const auto s = own().scales(tile, j);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int pair = j * 2 + h;
        if (pair > 1) wait_fragments(a[h]);
#pragma unroll
        for (int i = 0; i < 2; ++i) own().fragment(a[h][i], w, s, h * 2 + i);
        issue_wgmmas<G>(c, a[h], b, pair * 2, pair > 0);
        then(pair);
      }
    }
  }
#endif
};
