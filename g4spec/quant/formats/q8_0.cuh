// Q8_0: a value is d * (q - 128) in packed order, where q is unsigned. Views: formats.cuh.
#pragma once
#include "fragments.cuh"
#include "gemm_tile.cuh"
#include "quads.cuh"
#include "raw_values.cuh"

template <int K>
struct Q80 {
  static constexpr int UNIT = K, UNIT_BYTES = K * 136, SCRATCH = 0;
  static constexpr int SUMS = SUMS32, SUMS_BYTES = 64;  // of 8 rows of a block

  template <int NT>
  using Lane = StatelessLane<Q80, NT>;

  template <int NT>
  static DEVICE void add(Acc<NT>& acc, const u8* unit, const u8* act, int warp, int lane) {
    const int g = lane / 4, t = lane % 4;
    const uint4* codes = (const uint4*)unit + warp * 2 * K;
    const uint2* scales = (const uint2*)(unit + K * 128);
#pragma unroll 4
    for (int k32 = 0; k32 < K / 32; ++k32) {
      const auto rows = activations<NT>(act, k32 / 2);
      u32 b[2][NT][2];
      rows.fragments(b, k32 % 2, lane);
      const uint2 d = scales[(k32 * 4 + warp) * 8 + g];
      u32 a[2][2][4];  // [tile][step]
      float c[2][NT][4];
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const uint4 w = codes[tile * K + k32 * 32 + lane];
        unpack(a[tile][0], w.x, w.y);
        unpack(a[tile][1], w.z, w.w);
      }
#pragma unroll
      for (int tile = 0; tile < 2; ++tile)
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
          const float2 n = rows.sums32(k32 % 2, nt, t);
          const float start[4] = {n.x * 1.125f, n.y * 1.125f, n.x * 1.125f, n.y * 1.125f};
          mma_f16(c[tile][nt], a[tile][0], b[0][nt][0], b[0][nt][1], start);
        }
#pragma unroll
      for (int tile = 0; tile < 2; ++tile)
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
          mma_f16(c[tile][nt], a[tile][1], b[1][nt][0], b[1][nt][1], c[tile][nt]);
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const u32 pair = tile ? d.y : d.x;
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
          scale_add(acc[tile][nt], c[tile][nt], from_half((u16)pair), from_half((u16)(pair >> 16)));
      }
    }
  }

  template <int NT, int G>
  static DEVICE void add_row_groups(Acc<NT * G>& acc, const u8* unit,
                                    const GroupedActivations& act, int warp, int lane) {
    constexpr int BLOCKS = K / 64, GROUP_SUM_BYTES = BLOCKS * SUMS_BYTES * NT;  // of a group
    const int g = lane / 4, t = lane % 4;
    const u32 place = ldmatrix_offset<BLOCKS>(lane);
    const uint4* codes = (const uint4*)unit + warp * 2 * K;
    const uint2* scales = (const uint2*)(unit + K * 128);
#pragma unroll 2
    for (int k32 = 0; k32 < K / 32; ++k32) {
      const uint2 d = scales[(k32 * 4 + warp) * 8 + g];
      u32 a[2][2][4];  // [tile][step]
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const uint4 w = codes[tile * K + k32 * 32 + lane];
        unpack(a[tile][0], w.x, w.y);
        unpack(a[tile][1], w.z, w.w);
      }
#pragma unroll
      for (int i = 0; i < G; ++i) {
        scheduling_barrier();
        u32 b[2][NT][2];
        ldmatrix_b_fragments<NT>(b, act.halves + (i * NT * BLOCKS + k32 / 2) * TILE_BYTES, place,
                                 k32 % 2);
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
          const float2 n = grouped_sums32(act.sums + i * GROUP_SUM_BYTES, k32, nt, t);
          const float start[4] = {n.x * 1.125f, n.y * 1.125f, n.x * 1.125f, n.y * 1.125f};
#pragma unroll
          for (int tile = 0; tile < 2; ++tile) {
            const u32 pair = tile ? d.y : d.x;
            float c[4];
            mma_f16(c, a[tile][0], b[0][nt][0], b[0][nt][1], start);
            mma_f16(c, a[tile][1], b[1][nt][0], b[1][nt][1], c);
            scale_add(acc[tile][i * NT + nt], c, from_half((u16)pair),
                      from_half((u16)(pair >> 16)));
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
    const ActivationDescriptors<K / 64> b(act.halves);
    const int g = lane / 4, t = lane % 4;
    const uint4* codes = (const uint4*)unit + warp * 2 * K;
    const uint2* scales = (const uint2*)(unit + K * 128);
#pragma unroll 2
    for (int k32 = 0; k32 < K / 32; ++k32) {
      const uint2 d = scales[(k32 * 4 + warp) * 8 + g];
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const uint4 w = codes[tile * K + k32 * 32 + lane];
        u32 a[2][4];
        unpack(a[0], w.x, w.y);
        unpack(a[1], w.z, w.w);
        WgmmaAcc<G> c;
#pragma unroll
        for (int i = 0; i < 2 * G; ++i) {
          const float2 n = grouped_sums32(act.sums + i / 2 * GROUP_SUM_BYTES, k32, i % 2, t);
          c[4 * i] = c[4 * i + 2] = n.x * 1.125f;
          c[4 * i + 1] = c[4 * i + 3] = n.y * 1.125f;
        }
        issue_wgmmas<G>(c, a, b, k32 * 2, true);
        wait_wgmmas<G>(c, 0);
        const u32 pair = tile ? d.y : d.x;
        scale_add_tiles<G>(acc[tile], c, from_half((u16)pair), from_half((u16)(pair >> 16)));
      }
    }
  }
#endif

  // A fragment of 1024 + q. Accumulators start at -(1024 + 128) times the sum of the activations
  // (1.125 * n).
  static DEVICE void unpack(u32 (&a)[4], u32 first, u32 second) {
    a[0] = permute(first, HALF2_1024, 0x5150);
    a[1] = permute(first, HALF2_1024, 0x5352);
    a[2] = permute(second, HALF2_1024, 0x5150);
    a[3] = permute(second, HALF2_1024, 0x5352);
  }
};

namespace raw {

struct Q80 {
  static constexpr int VALUES = 32, BYTES = 34;

  static DEVICE void values(float (&w)[8], const u8* row, int k) {
    const u8* block = row + k / 32 * BYTES;
    uint2 codes = load8<2>(block + 2 + k % 32);
    codes.x ^= 0x80808080u, codes.y ^= 0x80808080u;
    affine(w, codes, 128.0f, load_half(block), 0.0f);
  }
};

}  // namespace raw

namespace quad {

struct Q80 {
  static constexpr int BLOCK = 32, BYTES = 34;

  static DEVICE float4 raw(const u8* b, int k) {
    CodeQuad f;
    f.scale = half_at(b), f.offset = 0.0f;
#pragma unroll
    for (int e = 0; e < 4; ++e) f.code[e] = (i8)b[2 + k + e];
    return f.values();
  }
  static DEVICE float4 packed(const PackedQuad& p) {
    CodeQuad f;
    f.scale = p.plane(p.columns * 128, 0), f.offset = 0.0f;
#pragma unroll
    for (int e = 0; e < 4; ++e) f.code[e] = p.byte(e) - 128;
    return f.values();
  }
};

}  // namespace quad

namespace fragment {

template <int K>
struct Q80 {
  static constexpr int UNIT = K, BYTES = K * 128 + K / 32 * 256;
  const u8* unit;
  int tile, lane;

  DEVICE Q80(const u8* unit, int tile, int lane) : unit(unit), tile(tile), lane(lane) {}
  DEVICE void values(int k64, Values& v) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int k32 = k64 * 2 + h;
      const uint4 q = load_streaming((const uint4*)unit + (tile * (K / 32) + k32) * 32 + lane);
      const u32 words[2][2] = {{q.x, q.y}, {q.z, q.w}};
      const u32 d = plane_pair(unit + K * 128, k32, tile, lane);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float s = from_half(d >> (16 * r));
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            v[r][2 * h + j][e] =
                s * bits_to_float(words[j][e / 2] >> (8 * (2 * r + e % 2)), 255, 128);
      }
    }
  }
};

}  // namespace fragment
