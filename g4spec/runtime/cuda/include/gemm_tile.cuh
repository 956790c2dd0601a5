// MMA building blocks shared by all weight formats: quantized weights times a few rows of
// activations.
//
// Weights are the 16-row operand A, activations ("rows", "tokens") the 8-wide operand B of
// m16n8k16. A warp computes 32 weight rows (two tiles of 16) and processes one unit of K (F::UNIT
// columns) at a time. In comments g = lane / 4 and t = lane % 4, as in PTX: the row and the column
// pair of a lane's fragments.
//
// Interface of a format F, implemented in g4spec/quant/formats/, or for a family of types in this folder
// (blocks32.cuh, gemm_affine.cuh, gemm_codebook.cuh). F::Lane<NT> holds the lane's addresses, which are
// the same for every unit, and has
//   multiply               acc += weights [32 x F::UNIT] * activations [F::UNIT x 8 NT]
//   multiply_row_groups    the same for G groups of 16 activation rows (swizzled, packed_rows.cuh). A
//                          weight is dequantized once for all groups; each group adds in the order of
//                          `multiply`, so its bits are the same
//   multiply_wgmma         the same with wgmma (sm_90a): tile 0 of the four warps of a warp group is one
//                          64-row operand in registers, tile 1 another; the activations of all groups
//                          are the operand in shared memory. Bits are those of `multiply`
// Factors of a unit that need unpacking go through F::SCRATCH bytes of shared memory per warp, while the
// first operands are loaded. The warp synchronizes between two units.
//
// Integer codes enter the tensor cores as bit patterns of halves, without conversion. Codes of 4 and 5
// bits are subnormals, code * 2^-24, which tensor cores multiply exactly; the scales contain 2^24. Q4_K,
// Q5_K and IQ3_S subtract minima by MMAs of their own. Q8_0 uses 1024 + code. Its accumulators, and those of
// Q4_0 and Q5_0, start at minus this bias and the zero point, times the sum of the activations. Q6_K and
// some others multiply codes by their scales first: gemm_scaled.cuh. Other formats look up their values:
// gemm_codebook.cuh.
#pragma once
#include "five_bits.cuh"
#include "packed_rows.cuh"
#include "wgmma.cuh"

constexpr u32 HALF2_1024 = 0x64006400u;   // {1024, 1024} as f16x2
constexpr int SUBNORMAL_SCALE = 1 << 24;  // code / (the value of its bits as a subnormal half)

// Sizes of a unit in bytes. UNIT_STRIDE: from one unit of weights to the next. UNIT_OFFSET: start of
// the part that is read, not 0 for formats that read only a part. ROWS: 8 rows of activations.
template <class F>
struct PackedInput {
  static constexpr int UNIT_STRIDE = F::UNIT_BYTES, UNIT_OFFSET = 0,
                       ROWS = F::UNIT / 64 * ACT_BYTES;
};

template <int NT>
using Acc =
    float[2][NT][4];  // [weight tile][tile of 8 tokens][rows g, g + 8 x tokens 2 t, 2 t + 1]

// Load the B fragments b[step][nt] of the two k16 steps of half `h` (32 columns) of k64 block
// `k64`. `rows` points to the packed rows plus 16 * lane bytes.
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

// Activations of a unit for G row groups in shared memory, swizzled: values [tiles][blocks of 64
// columns], and the kind of sums that the format needs (F::SUMS) [G][blocks].
struct GroupedActivations {
  const u8 *halves, *sums;
};

// A lane's offset for `ldmatrix_b_fragments`, in tiles of BLOCKS k64 blocks.
template <int BLOCKS>
DEVICE u32 ldmatrix_offset(int lane) {
  return swizzled_word_offset(BLOCKS, 0, lane % 8 + lane / 16 * 8, lane / 8 % 2, 0);
}
// `load_b_fragments` for the swizzled layout. `at`: the k64 block in the group's first tile; `place`:
// the lane's offset.
template <int NT>
DEVICE void ldmatrix_b_fragments(u32 (&b)[2][NT][2], const u8* at, u32 place, int h) {
  static_assert(NT == 2, "a row group has two tiles of 8");
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    u32 v[4];
    ldmatrix_x4(v, at + (place ^ (h * 2 + s) * 32));
    b[s][0][0] = v[0], b[s][0][1] = v[1], b[s][1][0] = v[2], b[s][1][1] = v[3];
  }
}

// `Activations::sums32` for the swizzled layout: `sums` of a group, k32 block `k32` of the unit.
DEVICE float2 grouped_sums32(const u8* sums, int k32, int nt, int t) {
  return *(const float2*)(sums + k32 * 64 + (nt * 8 + 2 * t) * 4);
}

// Keeps the compiler from moving loads of later row groups up, which would spill registers. Not
// needed on sm_90a.
DEVICE void scheduling_barrier() {
#ifndef __CUDA_ARCH_FEAT_SM90_ALL
  __syncwarp();
#endif
}

// Activations of one k64 block in shared memory, in fragment order.
template <int NT>
struct Activations {
  const u8* at;

  DEVICE void fragments(u32 (&b)[2][NT][2], int h, int lane) const {
    load_b_fragments<NT>(b, at + lane * 16, 0, h);
  }
  // -1024 times the sum of 32 columns, for tokens 2 t and 2 t + 1 of tile nt.
  DEVICE float2 sums32(int h, int nt, int t) const {
    return *(const float2*)(at + SUMS32 * NT + (h * 8 * NT + nt * 8 + 2 * t) * 4);
  }
};

template <int NT>
DEVICE Activations<NT> activations(const u8* act, int k64) {
  return {act + k64 * ACT_BYTES * NT};
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// wgmma descriptors of the activations of all row groups.
template <int BLOCKS>
struct ActivationDescriptors {
  u64 first;

  DEVICE explicit ActivationDescriptors(const u8* at)
      : first(smem_descriptor(at, 0, BLOCKS * TILE_BYTES)) {}
  DEVICE u64 step(int k16) const { return first + (k16 / 4 * TILE_BYTES + k16 % 4 * 32) / 16; }
};

// wgmma accumulator of one weight tile times G row groups: c[4 nt + i] contributes to
// acc[tile][nt][i].
template <int G>
using WgmmaAcc = float[8 * G];

// Issue one wgmma group: N k16 steps from `step` on, with A fragments a[i]. `add`: accumulate onto
// c, otherwise start from zero.
template <int G, int BLOCKS, int N>
DEVICE void issue_wgmmas(WgmmaAcc<G>& c, u32 (&a)[N][4], const ActivationDescriptors<BLOCKS>& b,
                         int step, bool add = false) {
#pragma unroll
  for (int i = 0; i < N; ++i) warpgroup_fence_operand(a[i]);
  if (add) warpgroup_fence_operand(c);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < N; ++i) wgmma_rs(c, a[i], b.step(step + i), add || i);
  wgmma_commit();
}
// Issue one wgmma that computes c, as a group.
template <int G>
DEVICE void issue_wgmma(WgmmaAcc<G>& c, u32 (&a)[4], u64 b) {
  warpgroup_fence_operand(a);
  wgmma_fence();
  wgmma_rs(c, a, b, 0);
  wgmma_commit();
}

// Wait until all wgmma groups but the newest have ended; then fragments they read may be changed.
template <int N>
DEVICE void wait_fragments(u32 (&a)[N][4]) {
  wgmma_wait<1>();
#pragma unroll
  for (int i = 0; i < N; ++i) warpgroup_fence_operand(a[i]);
}

// Wait until at most `newest` wgmma groups are pending; then c may be read.
template <int G>
DEVICE void wait_wgmmas(WgmmaAcc<G>& c, int newest) {
  if (newest == 0) wgmma_wait<0>();
  if (newest == 1) wgmma_wait<1>();
  if (newest == 2) wgmma_wait<2>();
  warpgroup_fence_operand(c);
}

// acc += scale * c for one weight tile; `low` and `high` scale rows g and g + 8.
template <int G>
DEVICE void scale_add_tiles(float (&acc)[2 * G][4], const WgmmaAcc<G>& c, float low, float high) {
#pragma unroll
  for (int i = 0; i < 2 * G; ++i) {
    acc[i][0] += low * c[4 * i];
    acc[i][1] += low * c[4 * i + 1];
    acc[i][2] += high * c[4 * i + 2];
    acc[i][3] += high * c[4 * i + 3];
  }
}
#endif

// Codes of rows g + 8 are multiplied by this in the fragments below.
constexpr int upper_factor(int bits) { return 1 << bits; }

// A fragment of 4-bit codes q as subnormals: rows g as q, rows g + 8 as 16 q, both divided by
// SUBNORMAL_SCALE.
DEVICE void subnormal_nibbles(u32 (&a)[4], u32 w) {
  a[0] = w & 0x000f000fu;
  a[1] = w & 0x00f000f0u;
  w >>= 8;
  a[2] = w & 0x000f000fu;
  a[3] = w & 0x00f000f0u;
}

// A fragment of codes of BITS bits (4 or 5) for k16 step j of a k64 block.
template <int BITS>
DEVICE void subnormal_codes(u32 (&a)[4], const uint4& w, u32 last, int j) {
  if constexpr (BITS == 5)
    subnormal_fives(a, w, last, j);
  else
    subnormal_nibbles(a, j == 0 ? w.x : j == 1 ? w.y : j == 2 ? w.z : w.w);
}

// acc += scale * c; `low` and `high` scale rows g and g + 8.
DEVICE void scale_add(float (&acc)[4], const float (&c)[4], float low, float high) {
  acc[0] += low * c[0];
  acc[1] += low * c[1];
  acc[2] += high * c[2];
  acc[3] += high * c[3];
}

// Index of a weight row's factor in scratch. A lane's four rows (g and g + 8 of both tiles) are
// adjacent.
DEVICE int scratch_slot(int row) { return (row % 8) * 4 + row / 8; }

// F::Lane for formats that need no scratch: calls F::add, F::add_row_groups and F::add_wgmma.
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
  DEVICE void multiply_row_groups(Acc<NT * G>& acc, const u8* unit,
                                  const GroupedActivations& act) const {
    F::template add_row_groups<NT, G>(acc, unit + unit_at, act, warp, lane);
  }
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  template <int G>
  DEVICE void multiply_wgmma(Acc<NT * G>& acc, const u8* unit,
                             const GroupedActivations& act) const {
    F::template add_wgmma<G>(acc, unit + unit_at, act, warp, lane);
  }
#endif
};
