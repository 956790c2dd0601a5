// Weights times a few rows on tensor cores: what the formats share.
//
// Weights are the 16-row operand A, the rows of activations ("tokens") the 8-wide operand B. A warp
// owns 32 rows of weights, two tiles of 16, and multiplies one unit of K at a time:
// `F::Lane<NT>` adds weights [32 x F::UNIT] times rows [F::UNIT x 8 NT] to its sums; it keeps where a
// lane reads and writes, which no unit changes. What is needed of a unit's header is unpacked into
// F::SCRATCH bytes of shared memory a warp, while the first operands come. Between two units the
// warp meets. `multiply_row_groups` does the same for G groups of 8 NT rows: what it makes of weights
// serves all of them, and each sum is added up in the order of `multiply`. Rows of several groups lie
// row by row (packed_rows.cuh). `multiply_wgmma` does it by products of a warp group: tile 0 of each of its
// four warps is one operand of 64 rows, tile 1 another, with each lane's registers as they are; all
// rows of activations are the other operand, in shared memory. Bits are those of `multiply`.
// Integer codes go into the tensor cores as bit patterns of halves, without a conversion. With
// nothing added (Q4_K, Q5_K, Q6_K) these are subnormal numbers, code * 2^-24, which tensor cores
// multiply exactly; the scales make up for the factor. Others are 1024 + code; the accumulator starts
// at -1024 times the sum of the activations, which removes the bias again.
#pragma once
#include "packed_rows.cuh"
#include "wgmma.cuh"

constexpr int PACK_ROWS = 128;           // rows of weights packed together
constexpr u32 HALF2_1024 = 0x64006400u;   // 1024.0 twice in half precision
constexpr int SUBNORMAL_SCALE = 1 << 24;   // a code over what its bits are as a half

// Bytes of a unit of a format in memory, of them those that are not read, at the start, and bytes of
// 8 rows of activations.
template <class F>
struct PackedInput {
  static constexpr int UNIT_STRIDE = F::UNIT_BYTES, UNIT_OFFSET = 0, ROWS = F::UNIT / 64 * ACT_BYTES;
};

template <int NT>
using Acc = float[2][NT][4];  // [tile][8 tokens][rows g, g, g + 8, g + 8 x tokens 2t, 2t + 1]

// B fragments of the two k16 steps of half `h` (32 k) of k64 `k64`: b[step][nt][2]. `rows`: with
// the lane's 16 bytes added.
template <int NT>
DEVICE void load_b_fragments(u32 (&b)[2][NT][2], const u8* rows, int k64, int h) {
  const uint4* p = (const uint4*)(rows + k64 * ACT_BYTES * NT);
  if constexpr (NT == 1) {
    const uint4 v = p[h * 32];
    b[0][0][0] = v.x, b[0][0][1] = v.y, b[1][0][0] = v.z, b[1][0][1] = v.w;
  } else {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const uint4 v = p[(h * 2 + s) * 32];
      b[s][0][0] = v.x, b[s][0][1] = v.y, b[s][1][0] = v.z, b[s][1][1] = v.w;
    }
  }
}
// What a lane multiplies of 64 k: 4-bit codes of both tiles, upper bits of them, and activations.
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

// Activations of a unit of several groups, in shared memory: halves [tiles][blocks of 64 k], and the
// sums that a format needs, [G][blocks].
struct GroupedActivations {
  const u8 *halves, *sums;
};

// B fragments of 32 k, as above, of halves that lie row by row. `at`: of 64 k of a group's first tile;
// `place`: of the lane among BLOCKS.
template <int BLOCKS>
DEVICE u32 ldmatrix_offset(int lane) {
  return swizzled_word_offset(BLOCKS, 0, lane % 8 + lane / 16 * 8, lane / 8 % 2, 0);
}
template <int NT>
DEVICE void ldmatrix_b_fragments(u32 (&b)[2][NT][2], const u8* at, u32 place, int h) {
  static_assert(NT == 2, "");
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    u32 v[4];
    ldmatrix_x4(v, at + (place ^ (h * 2 + s) * 32));
    b[s][0][0] = v[0], b[s][0][1] = v[1], b[s][1][0] = v[2], b[s][1][1] = v[3];
  }
}

// As `Activations::sums32` of a group with its sums at `sums`, of 32 k of the unit.
DEVICE float2 grouped_sums32(const u8* sums, int k32, int nt, int t) {
  return *(const float2*)(sums + k32 * 64 + (nt * 8 + 2 * t) * 4);
}

// The same of weights alone, for products of several groups of rows.
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

// Between groups of rows: what comes later is not asked for yet, or registers are spilled for it.
DEVICE void scheduling_barrier() {
#ifndef __CUDA_ARCH_FEAT_SM90_ALL
  __syncwarp();
#endif
}

// Activations of one k64 in shared memory.
template <int NT>
struct Activations {
  const u8* at;

  DEVICE void fragments(u32 (&b)[2][NT][2], int h, int lane) const {
    load_b_fragments<NT>(b, at + lane * 16, 0, h);
  }
  // -1024 times the sums of 32 activations, for tokens 2t and 2t + 1 of tile nt.
  DEVICE float2 sums32(int h, int nt, int t) const {
    return *(const float2*)(at + SUMS32 * NT + (h * 8 * NT + nt * 8 + 2 * t) * 4);
  }
};

template <int NT>
DEVICE Activations<NT> activations(const u8* act, int k64) {
  return {act + k64 * ACT_BYTES * NT};
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Halves of all groups as an operand.
template <int BLOCKS>
struct ActivationDescriptors {
  u64 first;

  DEVICE explicit ActivationDescriptors(const u8* at) : first(smem_descriptor(at, 0, BLOCKS * TILE_BYTES)) {}
  // Columns of k16 step `k16`, of groups from `group` on.
  DEVICE u64 step(int k16, int group) const {
    return first + ((group * 2 * BLOCKS + k16 / 4) * TILE_BYTES + k16 % 4 * 32) / 16;
  }
};

// A tile of each warp times G groups of rows, from `group` on: c[8 g + 4 nt + i] is what
// acc[group + g][tile][nt][i] is made from.
template <int G>
using WgmmaAcc = float[8 * G];

// Products of 16 k with operands a[i], one behind the other, from k16 step `step` on: one group of
// products. `add`: to what c is, or to zero.
template <int G, int BLOCKS, int N>
DEVICE void issue_wgmmas(WgmmaAcc<G>& c, u32 (&a)[N][4], const ActivationDescriptors<BLOCKS>& b, int step,
                           int group = 0, bool add = false) {
#pragma unroll
  for (int i = 0; i < N; ++i) warpgroup_fence_operand(a[i]);
  if (add) warpgroup_fence_operand(c);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < N; ++i) wgmma_rs(c, a[i], b.step(step + i, group), add || i);
  wgmma_commit();
}

// What products made, once all but the `newest` that were started are there.
template <int G>
DEVICE void wait_wgmmas(WgmmaAcc<G>& c, int newest) {
  if (newest == 0) wgmma_wait<0>();
  if (newest == 1) wgmma_wait<1>();
  if (newest == 2) wgmma_wait<2>();
  if (newest == 3) wgmma_wait<3>();
  warpgroup_fence_operand(c);
}

// acc += scale * c, for a tile.
template <int N, int G>
DEVICE void scale_add_tiles(Acc<2> (&acc)[G], int tile, const WgmmaAcc<N>& c, float low, float high,
                     int group = 0) {
#pragma unroll
  for (int i = 0; i < 2 * N; ++i) {
    float(&to)[4] = acc[group + i / 2][tile][i % 2];
    to[0] += low * c[4 * i];
    to[1] += low * c[4 * i + 1];
    to[2] += high * c[4 * i + 2];
    to[3] += high * c[4 * i + 3];
  }
}
#endif

// A fragments from 4-bit codes: rows g as 1024 + q, rows g + 8 as 1024 + 16 q.
DEVICE void biased_nibbles(u32 (&a)[4], u32 w) {
  a[0] = and_or(w, 0x000f000fu, HALF2_1024);
  a[1] = and_or(w, 0x00f000f0u, HALF2_1024);
  w >>= 8;
  a[2] = and_or(w, 0x000f000fu, HALF2_1024);
  a[3] = and_or(w, 0x00f000f0u, HALF2_1024);
}

// The same with nothing added: rows g as q, rows g + 8 as 16 q, both over SUBNORMAL.
DEVICE void subnormal_nibbles(u32 (&a)[4], u32 w) {
  a[0] = w & 0x000f000fu;
  a[1] = w & 0x00f000f0u;
  w >>= 8;
  a[2] = w & 0x000f000fu;
  a[3] = w & 0x00f000f0u;
}

// The fifth bits of the codes of k16 step j, added to what one of these made.
DEVICE void add_fifth_bits(u32 (&a)[4], u32 bits, int j) {
  a[0] = and_or(bits >> j, 0x00100010u, a[0]);
  a[1] = and_or(bits >> j, 0x01000100u, a[1]);
  a[2] = and_or(bits << (4 - j), 0x00100010u, a[2]);
  a[3] = and_or(bits >> (4 + j), 0x01000100u, a[3]);
}

// acc += scale * c; scale: rows g and g + 8.
DEVICE void scale_add(float (&acc)[4], const float (&c)[4], float low, float high) {
  acc[0] += low * c[0];
  acc[1] += low * c[1];
  acc[2] += high * c[2];
  acc[3] += high * c[3];
}

// x * sigmoid(y). With y = x that is silu; gelu with what is twice the argument of its tanh.
DEVICE float times_sigmoid(float x, float y) {
  return x * rcp_approx(1.0f + exp2_approx(y * -1.4426950408889634f));
}
DEVICE float gelu_sigmoid_arg(float x) { return 1.5957691216057308f * (x + 0.044715f * (x * x * x)); }

// Where a lane finds the values of its four rows: g, g + 8 of both tiles, side by side.
DEVICE int scratch_slot(int row) { return (row % 8) * 4 + row / 8; }

// Of formats whose header is read as it is: `F::add` does the work.
template <class F, int NT>
struct StatelessLane {
  u32 unit_at;
  int warp, lane;

  DEVICE StatelessLane(u8*, int warp, int lane)
      : unit_at(materialize(warp / 4 * F::UNIT_BYTES)), warp(warp % 4), lane(lane) {}
  DEVICE void multiply(Acc<NT>& acc, const u8* unit, const u8* act) const {
    F::template add<NT>(acc, unit + unit_at, act, warp, lane);
  }
  template <int G>
  DEVICE void multiply_row_groups(Acc<NT> (&acc)[G], const u8* unit, const GroupedActivations& act) const {
    F::template add_row_groups<NT, G>(acc, unit + unit_at, act, warp, lane);
  }
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  template <int G, int>
  DEVICE void multiply_wgmma(Acc<NT> (&acc)[G], const u8* unit, const GroupedActivations& act) const {
    F::template add_wgmma<G>(acc, unit + unit_at, act, warp, lane);
  }
#endif
};
