// Building blocks of decode attention on tensor cores (mma.sync m16n8k16): multiplying with tiles of
// K and V, which attention_copies.cuh copies to shared memory. Used by attention.cu and
// attention_window.cu.
//
// Keys and values are the 16-row operand A, the queries ("rows": one token and one of the KV head's
// query heads) the 8-wide operand B: scores[key][row] = K Q^T, out[d][row] = V^T P^T. With few rows
// per step that wastes less of an MMA than the usual orientation.
//
// The order of d within an MMA, and of keys within 16, is free as long as both operands agree. It is
// chosen so that Q8_0 codes need no shuffles:
// - scores: lane t of a quad holds d = 8 t .. 8 t + 7 of each 32;
// - out: lane t holds keys t, t + 8, t + 4, t + 12 of each 16.
#pragma once
#include "attention_copies.cuh"

// Compile-time configuration of a kernel instance.
//   ROW_TILES                 tiles of 8 rows
//   SCORE_WARPS, VALUE_WARPS  warps that compute K Q^T, and V^T P^T
//   K_PARTS, V_PARTS          pieces in which a tile is copied: D / K_PARTS dims of all its keys;
//                             all dims of KEYS / V_PARTS keys
//   K_STAGES, V_STAGES        pieces that fit in shared memory
//   ROTARY_PAIRS              K = V layers: the plane of keys stores only the first ROTARY_PAIRS columns
//                             of each half of a head, the others are those of V (cuda_kv.py); 0: all
//   KEYS                      of a tile
// Results depend on D, Q8 and ROTARY_PAIRS only; in attention.cu, KEYS follows from D.
template <int D_, int Q8_, int ROW_TILES_, int SCORE_WARPS_, int VALUE_WARPS_, int K_PARTS_,
          int V_PARTS_, int K_STAGES_, int V_STAGES_, int ROTARY_PAIRS_,
          int KEYS_ = D_ >= 256 ? 128 : 64>
struct AttentionConfig {
  static constexpr int D = D_, Q8 = Q8_, ROW_TILES = ROW_TILES_, SCORE_WARPS = SCORE_WARPS_,
                       VALUE_WARPS = VALUE_WARPS_, ROTARY_PAIRS = ROTARY_PAIRS_;
  static constexpr int K_PARTS = K_PARTS_, V_PARTS = V_PARTS_, K_STAGES = K_STAGES_,
                       V_STAGES = V_STAGES_;
  static constexpr int KEYS = KEYS_, KEY_TILES = KEYS / 16,
                       WARP_KEY_TILES = KEY_TILES / SCORE_WARPS;  // 16-key tiles; of one warp
  static constexpr int PART_DIMS = D / K_PARTS, PART_KEYS = KEYS / V_PARTS,
                       WARP_DIMS = D / VALUE_WARPS, ROWS = 8 * ROW_TILES;
  static constexpr int BYTES = Q8 ? 1 : 2;
  // Against bank conflicts, rows of Q8_0 codes are padded by 32 bytes and rows of halves are
  // swizzled.
  static constexpr int K_ROW = Q8 ? PART_DIMS + 32 : 2 * PART_DIMS, V_ROW = Q8 ? D + 32 : 2 * D;
  static constexpr int K_STAGE_BYTES = KEYS * K_ROW + (Q8 ? KEYS * PART_DIMS / 16 : 0);
  static constexpr int V_STAGE_BYTES = PART_KEYS * V_ROW + (Q8 ? PART_KEYS * D / 16 : 0);
  static_assert(KEY_TILES % SCORE_WARPS == 0 && PART_DIMS % 64 == 0 && PART_KEYS % 16 == 0 &&
                    WARP_DIMS % 32 == 0,
                "warps share tiles of 16 keys and blocks of 32 dims evenly");
  static_assert(K_STAGE_BYTES % 16 == 0 && V_STAGE_BYTES % 16 == 0,
                "copies of 16 bytes need aligned stages");
  static_assert(ROTARY_PAIRS % 64 == 0, "16-byte copies must not straddle the columns of K and V");
  // Offsets in shared memory, in bytes. Attention weights, row maxima and rescale factors are
  // double-buffered.
  static constexpr int K_AT = 0, V_AT = K_STAGES * K_STAGE_BYTES,
                       Q_AT = V_AT + V_STAGES * V_STAGE_BYTES;
  static constexpr int P_AT = Q_AT + ROW_TILES * D * 16, P_SIZE = KEYS * ROWS * 2;
  static constexpr int TILE_MAX_AT = P_AT + 2 * P_SIZE, TILE_MAX_SIZE = SCORE_WARPS * ROWS * 4;
  static constexpr int RESCALE_AT = TILE_MAX_AT + 2 * TILE_MAX_SIZE, RESCALE_SIZE = ROWS * 4;
  static constexpr int RUNNING_MAX_AT = RESCALE_AT + 2 * RESCALE_SIZE,
                       WEIGHT_SUM_AT = RUNNING_MAX_AT + SCORE_WARPS * ROWS * 4;
  static constexpr int VISIBLE_AT = WEIGHT_SUM_AT + VALUE_WARPS * ROWS * 4,
                       SHARED = VISIBLE_AT + ROWS * 8;
};

#if ARCH >= 800
// Convert four bytes q + 128 to halves q.
DEVICE void centered_halves(u32 bytes, u32& low, u32& high) {
  low = sub_half2(permute(bytes, 0x64646464u, 0x4140), 0x64806480u);  // 1024 + 128
  high = sub_half2(permute(bytes, 0x64646464u, 0x4342), 0x64806480u);
}

// A fragments of two MMAs: 16 keys from `key` on, dims 32 block .. 32 block + 31.
template <class S>
DEVICE void load_key_fragments(u32 (&a)[2][4], const char* stage, int key, int block) {
  const int lane = threadIdx.x % 32;
  if constexpr (S::Q8) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = key + lane / 4 + 8 * i;
      const uint2 x = *(const uint2*)(stage + row * S::K_ROW + block * 32 + lane % 4 * 8);
      const u16* scales = (const u16*)(stage + S::KEYS * S::K_ROW) + row * (S::PART_DIMS / 32);
      const u32 scale = permute(scales[block], 0, 0x1010);
      centered_halves(x.x, a[0][i], a[0][i + 2]);
      centered_halves(x.y, a[1][i], a[1][i + 2]);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        a[j / 2][i + j % 2 * 2] = mul_half2(a[j / 2][i + j % 2 * 2], scale);
    }
  } else {
    const int row = key + lane % 16;
    const char* at = stage + row * S::K_ROW;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      ldmatrix_x4(a[i], at + swizzled_chunk<SWIZZLE_KEYS>(row, block * 4 + i * 2 + lane / 16) * 16);
  }
}

// Offset of 16-byte chunk `piece` of a query row in shared memory. Q8_0: [row tile][D / 32][lane],
// the order of load_query_fragments; f16: [row][chunk], swizzled.
template <class S>
DEVICE int query_offset(int row, int piece) {
  if (S::Q8) return (row / 8 * (S::D / 32) + piece / 4) * 512 + row % 8 * 64 + piece % 4 * 16;
  return row * S::D * 2 + swizzled_chunk<SWIZZLE_KEYS>(row, piece) * 16;
}
// B fragments of two MMAs: rows 8 n .. 8 n + 7, dims 32 block .. 32 block + 31.
template <class S>
DEVICE void load_query_fragments(u32 (&b)[4], const char* rows, int n, int block) {
  const int lane = threadIdx.x % 32;
  if constexpr (S::Q8) {
    const uint4 x = *(const uint4*)(rows + (n * (S::D / 32) + block) * 512 + lane * 16);
    b[0] = x.x, b[1] = x.y, b[2] = x.z, b[3] = x.w;
  } else {
    ldmatrix_x4(b, rows + query_offset<S>(n * 8 + lane % 8, block * 4 + lane / 8));
  }
}

// scores += K Q^T over one piece of d, for the first ROW_TILES row tiles. Fragments of the next 32
// dims are loaded one iteration ahead.
template <class S, int ROW_TILES = S::ROW_TILES>
DEVICE void accumulate_scores(float (&scores)[S::WARP_KEY_TILES][S::ROW_TILES][4],
                              const char* stage, const char* rows, int part, int warp) {
  constexpr int GROUP =
      ROW_TILES < 4 ? ROW_TILES : 4 / S::WARP_KEY_TILES;  // row tiles whose MMAs are interleaved
  constexpr int BLOCKS = S::PART_DIMS / 32;
  const int key = warp * S::WARP_KEY_TILES * 16;
  u32 a[2][S::WARP_KEY_TILES][2][4];
#pragma unroll
  for (int w = 0; w < S::WARP_KEY_TILES; ++w)
    load_key_fragments<S>(a[0][w], stage, key + w * 16, 0);
#pragma unroll S::ROW_TILES > 2 ? 2 : 8
  for (int block = 0; block < BLOCKS; ++block) {
    if (block + 1 < BLOCKS)
#pragma unroll
      for (int w = 0; w < S::WARP_KEY_TILES; ++w)
        load_key_fragments<S>(a[(block + 1) % 2][w], stage, key + w * 16, block + 1);
#pragma unroll
    for (int group = 0; group < ROW_TILES; group += GROUP) {
      u32 b[GROUP][4];
#pragma unroll
      for (int n = 0; n < GROUP; ++n)
        load_query_fragments<S>(b[n], rows, group + n, part * BLOCKS + block);
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int n = 0; n < GROUP; ++n)
#pragma unroll
          for (int w = 0; w < S::WARP_KEY_TILES; ++w)
            mma_f16(scores[w][group + n], a[block % 2][w][i], b[n][2 * i], b[n][2 * i + 1],
                    scores[w][group + n]);
    }
  }
}

// Set the scores of keys outside each row's visible range to -inf.
template <class S>
DEVICE void mask_scores(float (&scores)[S::WARP_KEY_TILES][S::ROW_TILES][4], const char* shared,
                        int tile, int warp) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < S::ROW_TILES; ++n)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int2 sees = ((const int2*)(shared + S::VISIBLE_AT))[n * 8 + lane % 4 * 2 + c];
#pragma unroll
      for (int w = 0; w < S::WARP_KEY_TILES; ++w)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int key =
              tile * S::KEYS + (warp * S::WARP_KEY_TILES + w) * 16 + half * 8 + lane / 4;
          if (key < sees.x || key > sees.y) scores[w][n][half * 2 + c] = NEG_INF;
        }
    }
}

// Maximum score of each row over a warp's keys of this tile. Lane 4 g + t holds rows 2 t, 2 t + 1
// of each 8 and keys g, g + 8 of each 16.
template <class S, int ROW_TILES = S::ROW_TILES>
DEVICE void tile_row_max(const float (&scores)[S::WARP_KEY_TILES][S::ROW_TILES][4], float* tops,
                         int warp) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < ROW_TILES; ++n) {
    float found[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float x = fmaxf(scores[0][n][c], scores[0][n][c + 2]);
      if (S::WARP_KEY_TILES == 2)
        x = fmaxf(
            x, fmaxf(scores[S::WARP_KEY_TILES - 1][n][c], scores[S::WARP_KEY_TILES - 1][n][c + 2]));
#pragma unroll
      for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(FULL_MASK, x, step));
      found[c] = x;
    }
    if (lane < 4) *(float2*)(tops + warp * S::ROWS + n * 8 + lane * 2) = {found[0], found[1]};
  }
}

constexpr float WEIGHT_EXPONENT =
    6.0f;  // weights are stored times 2^6, to keep small ones out of the subnormal range

// Store attention weights 2^(score - origin) of 16 keys and rows 2 t, 2 t + 1 of 8 to p
// [index][lane], 8 bytes per lane: the B fragment of accumulate_values.
DEVICE void store_attention_weights(u32* p, int index, const float (&scores)[4], float2 origin) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const float from = c ? origin.y : origin.x;
    const float a = exp2_approx(__fadd_rn(__fsub_rn(scores[c], from), WEIGHT_EXPONENT));
    const float b = exp2_approx(__fadd_rn(__fsub_rn(scores[c + 2], from), WEIGHT_EXPONENT));
    const int place = index * 32 + (t * 2 + c) * 4 + g % 4;
    p[place * 2 + g / 4] = pack_half2(a, b);
  }
}

// A fragments (V^T) of two MMAs: 32 dims from `d` on, 16 keys from `key` on. Q8_0: dims 4 g .. 4 g
// + 3 are rows g and g + 8 of the first MMA, then of the second; f16: dim 8 i + g is row g (i even)
// or g + 8 of MMA i / 2.
template <class S>
DEVICE void load_value_fragments(u32 (&a)[2][4], const char* stage, int key, int d) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  if constexpr (S::Q8) {
    const char* at = stage + (key + t) * S::V_ROW + d + 4 * g;
    const u32 w0 = *(const u32*)at, w1 = *(const u32*)(at + 8 * S::V_ROW);
    const u32 w2 = *(const u32*)(at + 4 * S::V_ROW), w3 = *(const u32*)(at + 12 * S::V_ROW);
    centered_halves(permute(w0, w1, 0x5140), a[0][0], a[0][1]);
    centered_halves(permute(w0, w1, 0x7362), a[1][0], a[1][1]);
    centered_halves(permute(w2, w3, 0x5140), a[0][2], a[0][3]);
    centered_halves(permute(w2, w3, 0x7362), a[1][2], a[1][3]);
  } else {
    // This lane's address is row lane % 8 of ldmatrix matrix lane / 8: keys 0, 8, 1, 9 .. for
    // matrices 0 and 1, those + 4 for matrices 2 and 3.
    const int row = key + lane % 8 / 2 + lane % 2 * 8 + lane / 16 * 4, piece = d / 8 + lane / 8 % 2;
    ldmatrix_x4_trans(a[0],
                      stage + row * S::V_ROW + swizzled_chunk<SWIZZLE_VALUES>(row, piece) * 16);
    ldmatrix_x4_trans(a[1],
                      stage + row * S::V_ROW + swizzled_chunk<SWIZZLE_VALUES>(row, piece + 2) * 16);
  }
}

// Q8_0 scales of a lane's keys, in pairs (t, t + 8) and (t + 4, t + 12), for each of BLOCKS blocks
// of 32 dims.
template <int BLOCKS>
DEVICE void load_value_scales(u32 (&pairs)[BLOCKS][2], const u16* scales, int per_key) {
  if constexpr (BLOCKS == 1) {
    pairs[0][0] = permute(scales[0], scales[8 * per_key], 0x5410);
    pairs[0][1] = permute(scales[4 * per_key], scales[12 * per_key], 0x5410);
  } else {
#pragma unroll
    for (int b = 0; b < BLOCKS; b += 2) {
      const u32 x0 = *(const u32*)(scales + b), x1 = *(const u32*)(scales + 8 * per_key + b);
      const u32 x2 = *(const u32*)(scales + 4 * per_key + b);
      const u32 x3 = *(const u32*)(scales + 12 * per_key + b);
      pairs[b][0] = permute(x0, x1, 0x5410), pairs[b][1] = permute(x2, x3, 0x5410);
      pairs[b + 1][0] = permute(x0, x1, 0x7632), pairs[b + 1][1] = permute(x2, x3, 0x7632);
    }
  }
}

DEVICE float half2_sum(u32 x) { return __fadd_rn(from_half((u16)x), from_half((u16)(x >> 16))); }

// out += V^T P^T over one piece of the keys, and sums += P^T 1: lane 4 g + t adds the weights of
// row g and of its four keys, in every VALUE_WARPS-th 16 keys. p: [key tile][row tile][lane], 8
// bytes. The Q8_0 scale of a key is multiplied into its weight, not into the codes.
template <class S, int ROW_TILES = S::ROW_TILES>
DEVICE void accumulate_values(float (&out)[S::WARP_DIMS / 16][S::ROW_TILES][4],
                              float (&sums)[S::ROW_TILES], const char* stage, const uint2* p,
                              int part, int warp) {
  const int lane = threadIdx.x % 32;
  constexpr int BLOCKS = S::WARP_DIMS / 32;
#pragma unroll S::ROW_TILES > 2 ? 1 : 4
  for (int k = 0; k < S::PART_KEYS / 16; ++k) {
    const int k16 = part * (S::PART_KEYS / 16) + k;
    const uint2* weights = p + k16 * S::ROW_TILES * 32 + lane;
    if (k16 % S::VALUE_WARPS == warp)
#pragma unroll
      for (int n = 0; n < ROW_TILES; ++n) {
        const uint2 weight = weights[n * 32];
        sums[n] = __fadd_rn(sums[n], __fadd_rn(half2_sum(weight.x), half2_sum(weight.y)));
      }
    u32 scale[BLOCKS][2];
    if constexpr (S::Q8)
      load_value_scales<BLOCKS>(scale,
                                (const u16*)(stage + S::PART_KEYS * S::V_ROW) +
                                    (k * 16 + lane % 4) * (S::D / 32) + warp * BLOCKS,
                                S::D / 32);
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
      u32 a[2][4];
      load_value_fragments<S>(a, stage, k * 16, warp * S::WARP_DIMS + b * 32);
#pragma unroll
      for (int n = 0; n < ROW_TILES; ++n) {
        const uint2 weight = weights[n * 32];
        const u32 b0 = S::Q8 ? mul_half2(weight.x, scale[b][0]) : weight.x;
        const u32 b1 = S::Q8 ? mul_half2(weight.y, scale[b][1]) : weight.y;
        mma_f16(out[2 * b][n], a[0], b0, b1, out[2 * b][n]);
        mma_f16(out[2 * b + 1][n], a[1], b0, b1, out[2 * b + 1][n]);
      }
    }
  }
}
#endif
