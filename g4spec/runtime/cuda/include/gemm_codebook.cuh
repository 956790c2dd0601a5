// GEMM with table-coded weights (codebook.cuh) in packed order. Codes become halves, signed numbers
// without an offset (`codebook::fragment`), so MMA accumulators start at 0; the sum of a quant group
// is then multiplied by its factor.
#pragma once
#include "codebook.cuh"
#include "gemm_scaled.cuh"

template <class T, int K = 256>
struct Codebook {
  static constexpr int UNIT = K, GROUPS = K / T::GROUP, STEPS = T::GROUP / 16;
  static constexpr int LOW = codebook::low_bytes<T>(K), HEADER = codebook::code_bytes<T>(K);
  static constexpr int UNIT_BYTES = HEADER + T::HEADER * K / 2;
  static constexpr int SCRATCH = GROUPS * 128 + (T::MINIMUM ? 128 : 0);
  static constexpr int WORDS = T::BITS == 4 ? 4 : 2;
  static constexpr int SUMS = SPLIT16, SUMS_BYTES = T::MINIMUM ? 128 : 0;  // of 8 rows of a block

  // A lane's codes of 64 columns, for both weight tiles.
  struct Weights {
    u32 low[2][WORDS], high[2];

    DEVICE Weights(const u8* lows, const u8* highs, int k64) {
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const int at = tile * (K / 2) + k64 * 32;
        if constexpr (T::BITS == 4) {
          const uint4 v = ((const uint4*)lows)[at];
          low[tile][0] = v.x, low[tile][1] = v.y, low[tile][2] = v.z, low[tile][3] = v.w;
        } else {
          const uint2 v = ((const uint2*)lows)[at];
          low[tile][0] = v.x, low[tile][1] = v.y;
        }
        if constexpr (T::BITS == 3) high[tile] = ((const u32*)highs)[at];
      }
    }
    // A fragment of k16 step j.
    DEVICE void a_fragment(u32 (&a)[4], int tile, int j) const {
      if (j == 0) codebook::fragment<T, 0>(a, low[tile], high[tile]);
      if (j == 1) codebook::fragment<T, 1>(a, low[tile], high[tile]);
      if (j == 2) codebook::fragment<T, 2>(a, low[tile], high[tile]);
      if (j == 3) codebook::fragment<T, 3>(a, low[tile], high[tile]);
    }
  };

  template <int NT>
  struct Lane {
    u32 low, high, header, row, rows;  // offsets (row: an index)
    u8* put;                           // where this lane stores factors in scratch
    const u8* scales;
    u32 place, own, sums, tiled_sums;  // own, sums, tiled_sums: minima and activation sums

    DEVICE Lane(u8* scratch, int warp, int lane) {
      const int g = lane / 4, t = lane % 4, unit = warp / 4 * UNIT_BYTES, at = warp % 4 * K + lane;
      low = materialize(unit + at * (4 * WORDS));
      high = materialize(unit + LOW + at * 4);
      header = materialize(unit + HEADER);
      row = materialize(warp % 4 * 32 + lane);
      rows = materialize(lane * 16);
      place = materialize(ldmatrix_offset<K / 64>(lane));
      put = materialize_shared(scratch + scratch_slot(lane) * 4);
      scales = materialize_shared(scratch + g * 16);
      if constexpr (T::MINIMUM) {
        own = materialize(unit + HEADER + (warp % 4 * 32 + g) * 16 + t * 2);
        sums = materialize(t / 2 * ACT_BYTES * NT + SPLIT16 * NT + (t % 2 * 8 * NT + g) * 8);
        tiled_sums = materialize((t * 8 * NT + g) * 8);
      }
    }

    DEVICE void store(const u8* unit) const {
      float f[GROUPS];
      T::factors(f, unit + header, row);
#pragma unroll
      for (int i = 0; i < GROUPS; ++i) ((float*)put)[i * 32] = f[i];
      if constexpr (T::MINIMUM)  // minima enter the MMA as subnormal halves
        ((float*)put)[GROUPS * 32] =
            codebook::half_of(unit + header + 2050 + row * 4) * -(float)SUBNORMAL_SCALE;
      __syncwarp();
    }

    DEVICE void multiply(Acc<NT>& acc, const u8* unit, const u8* act) const {
      multiply_by(acc, unit, act, [](u32 (&a)[4], const Weights& of, int tile, int j) {
        of.a_fragment(a, tile, j);
      });
    }
    // multiply() with a function that computes fragments.
    template <class Fragment>
    DEVICE void multiply_by(Acc<NT>& acc, const u8* unit, const u8* act,
                            const Fragment& fragment) const {
      const u8 *w = unit + low, *u = unit + high, *x = act + rows;
      Weights next(w, u, 0);
      store(unit);
#pragma unroll
      for (int k64 = 0; k64 < K / 64; ++k64) {
        const Weights of = next;
        if (k64 + 1 < K / 64) next = Weights(w, u, k64 + 1);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          u32 b[2][NT][2];
          load_b_fragments<NT>(b, x, k64, h);
#pragma unroll
          for (int tile = 0; tile < 2; ++tile) {
            u32 a[2][4];
            fragment(a[0], of, tile, 2 * h), fragment(a[1], of, tile, 2 * h + 1);
            add(acc[tile], a, b, tile, k64 * 2 + h);
          }
        }
#if ARCH < 900 || ARCH >= 1200
        __syncwarp();  // keeps loads from being hoisted, which would spill registers
#endif
      }
      if constexpr (T::MINIMUM) subtract_minima<ACT_BYTES>(acc[0], acc[1], unit + own, act + sums);
    }

    template <int G>
    DEVICE void multiply_row_groups(Acc<NT * G>& acc, const u8* unit,
                                    const GroupedActivations& act) const {
      constexpr int BLOCKS = K / 64, GROUP_SUM_BYTES = BLOCKS * SUMS_BYTES * NT;  // of a group
      const u8 *w = unit + low, *u = unit + high;
      Weights next(w, u, 0);
      store(unit);
#pragma unroll
      for (int k64 = 0; k64 < K / 64; ++k64) {
        const Weights of = next;
        if (k64 + 1 < K / 64) next = Weights(w, u, k64 + 1);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          u32 a[2][2][4];  // [tile][step]
#pragma unroll
          for (int i = 0; i < 4; ++i) of.a_fragment(a[i / 2][i % 2], i / 2, 2 * h + i % 2);
#pragma unroll
          for (int g = 0; g < G; ++g) {
            scheduling_barrier();
            u32 b[2][NT][2];
            ldmatrix_b_fragments<NT>(b, act.halves + (g * NT * BLOCKS + k64) * TILE_BYTES, place,
                                     h);
#pragma unroll
            for (int tile = 0; tile < 2; ++tile)
              add((float (&)[NT][4])acc[tile][g * NT], a[tile], b, tile, k64 * 2 + h);
          }
        }
      }
      if constexpr (T::MINIMUM)
#pragma unroll
        for (int g = 0; g < G; ++g)
          subtract_minima<SUMS_BYTES>((float (&)[NT][4])acc[0][g * NT],
                                      (float (&)[NT][4])acc[1][g * NT], unit + own,
                                      act.sums + tiled_sums + g * GROUP_SUM_BYTES);
    }
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    // No wgmma variant: same as multiply_row_groups.
    template <int G>
    DEVICE void multiply_wgmma(Acc<NT * G>& acc, const u8* unit,
                               const GroupedActivations& act) const {
      multiply_row_groups<G>(acc, unit, act);
    }
#endif

    // MMA over 32 columns of one weight tile: one quant group of 32, or two of 16.
    DEVICE void add(float (&acc)[NT][4], const u32 (&a)[2][4], const u32 (&b)[2][NT][2], int tile,
                    int k32) const {
#pragma unroll
      for (int first = 0; first < 2; first += STEPS) {
        const float4 s = ((const float4*)scales)[(k32 * (2 / STEPS) + first) * 8];
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
          float c[4] = {0, 0, 0, 0};
#pragma unroll
          for (int step = first; step < first + STEPS; ++step)
            mma_f16(c, a[step], b[step][nt][0], b[step][nt][1], c);
          scale_add(acc[nt], c, tile ? s.z : s.x, tile ? s.w : s.y);
        }
      }
    }

    // Subtract minimum * (sum of activations), as an MMA of integer minima with the sums (as
    // `subtract_mins` in gemm_affine.cuh).
    template <int PITCH>
    DEVICE void subtract_minima(float (&acc0)[NT][4], float (&acc1)[NT][4], const u8* own,
                                const u8* sums) const {
      const float4 least = ((const float4*)scales)[GROUPS * 8];
      u32 a[2][4];
#pragma unroll
      for (int i = 0; i < 8; ++i) {  // side, then row
        const u32 two = *(const u16*)(own + i % 4 * 128 + i / 4 * 8);
        a[i % 4 / 2][i / 4 * 2 + i % 2] = (two >> 4 & 15) | (two >> 12) << 16;
      }
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
        const uint2 s0 = ((const uint2*)sums)[nt * 8];
        const uint2 s1 = ((const uint2*)(sums + 2 * PITCH * NT))[nt * 8];
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
          float c[4] = {0, 0, 0, 0};
          mma_f16(c, a[tile], s0.x, s1.x, c);
          mma_f16(c, a[tile], s0.y, s1.y, c);
          scale_add(tile ? acc1[nt] : acc0[nt], c, tile ? least.z : least.x,
                    tile ? least.w : least.y);
        }
      }
    }
  };
};

// The same for 4-bit codes, with a table of pairs in shared memory (`codebook::PairLookup`), which
// consumers fill before the first unit.
template <class T, int K = 256>
struct PairCodebook : Codebook<T, K> {
  static constexpr int TABLE_BYTES = codebook::PAIR_TABLE_BYTES;

  static DEVICE void fill_table(u8* table) { codebook::fill_pair_table<T>(table); }

  template <int NT>
  struct Lane : Codebook<T, K>::template Lane<NT> {
    using Weights = typename Codebook<T, K>::Weights;
    codebook::PairLookup<T> pairs;

    DEVICE Lane(u8* scratch, int warp, int lane, const u8* table)
        : Codebook<T, K>::template Lane<NT>(scratch, warp, lane), pairs(table, lane) {}
    DEVICE void multiply(Acc<NT>& acc, const u8* unit, const u8* act) const {
      this->multiply_by(acc, unit, act, [&](u32 (&a)[4], const Weights& of, int tile, int j) {
        pairs.fragment(a, of.low[tile][j], j);
      });
    }
  };
};

// The same for types with 3-bit codes, integer scales and one factor per 256 columns
// (codebook::Scaled, gemm_scaled.cuh).
template <class T>
struct ScaledCodebook {
  static constexpr int UNIT = 256, GROUPS = 256 / T::GROUP;
  static constexpr int LOW = codebook::low_bytes<T>(256), HEADER = codebook::code_bytes<T>(256);
  static constexpr int UNIT_BYTES = HEADER + T::HEADER * 128;
  static constexpr int D = GROUPS * 64, SCRATCH = D + 128;
  static constexpr int PAIRS = GROUPS / 8;              // of scales per 64 columns
  static constexpr int SUMS = SPLIT16, SUMS_BYTES = 0;  // no sums of activations

  template <int NT>
  struct Lane : ScaledLane<Lane<NT>, NT> {
    struct Factors {
      u32 scales[GROUPS / 2];
      float d;
    };
    struct Weights {
      u32 low[2], high;
    };
    struct Scales {  // of rows g and g + 8; zero: `codebook::minus_zero`
      u32 of[2][PAIRS], zero[2][PAIRS];
    };
    u32 low, high, header, row;  // offsets; row: an index
    u8 *put, *put_d;             // where this lane stores factors in scratch
    const u8 *own_scales, *own_d;

    DEVICE Lane(u8* scratch, int warp, int lane) : ScaledLane<Lane<NT>, NT>(lane) {
      const int unit = warp / 4 * UNIT_BYTES, at = warp % 4 * 256 + lane;
      low = materialize(unit + at * 8);
      high = materialize(unit + LOW + at * 4);
      header = materialize(unit + HEADER);
      row = materialize(warp % 4 * 32 + lane);
      put = materialize_shared(scratch + scratch_slot(lane) * (4 * PAIRS));
      put_d = materialize_shared(scratch + D + scratch_slot(lane) * 4);
      own_scales = materialize_shared(scratch + lane / 4 * (16 * PAIRS));
      own_d = materialize_shared(scratch + D + lane / 4 * 16);
    }

    DEVICE Factors factors(const u8* unit) const {
      Factors f;
      T::scale_pairs(f.scales, unit + header, row);
      f.d = T::common_factor(unit + header, row);
      return f;
    }
    DEVICE void store(const Factors& f) const {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if constexpr (PAIRS == 2)
          ((uint2*)put)[j * 32] = {f.scales[2 * j], f.scales[2 * j + 1]};
        else
          ((u32*)put)[j * 32] = f.scales[j];
      *(float*)put_d = f.d;
    }
    DEVICE const float* d() const { return (const float*)own_d; }

    DEVICE Weights weights(const u8* unit, int tile, int j) const {
      const int at = tile * 128 + j * 32;
      const uint2 v = ((const uint2*)(unit + low))[at];
      return {{v.x, v.y}, ((const u32*)(unit + high))[at]};
    }
    DEVICE Scales scales(int tile, int j) const {
      Scales s;
      if constexpr (PAIRS == 2) {
        const uint4 v = ((const uint4*)own_scales)[j * 16 + tile];
        s.of[0][0] = v.x, s.of[0][1] = v.y, s.of[1][0] = v.z, s.of[1][1] = v.w;
      } else {
        const uint2 v = ((const uint2*)own_scales)[j * 16 + tile];
        s.of[0][0] = v.x, s.of[1][0] = v.y;
      }
#pragma unroll
      for (int i = 0; i < 2 * PAIRS; ++i)
        s.zero[i % 2][i / 2] = codebook::minus_zero<T>(s.of[i % 2][i / 2], i % 2, i / 2);
      return s;
    }
    DEVICE void fragment(u32 (&a)[4], const Weights& w, const Scales& s, int k) const {
      if (k == 0) codebook::fragment<T, 0, true>(a, w.low, w.high);
      if (k == 1) codebook::fragment<T, 1, true>(a, w.low, w.high);
      if (k == 2) codebook::fragment<T, 2, true>(a, w.low, w.high);
      if (k == 3) codebook::fragment<T, 3, true>(a, w.low, w.high);
      const int pair = PAIRS == 2 ? k / 2 : 0, half = PAIRS == 2 ? k % 2 : k / 2;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        a[i] = fma_half2_by(a[i], s.of[i % 2][pair], s.zero[i % 2][pair], half);
    }
  };
};
