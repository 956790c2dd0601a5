// Tiles of keys and values for attention on tensor cores: how they come to shared memory and how
// warps multiply with them. Keys and values are the 16-row operand, the rows that attend the
// 8-wide one: scores[key][row] = K Q^T, out[d][row] = V^T P^T.
//
// The order of d within a product, and of keys within 16, is free as long as both operands agree:
// - scores: of 32 values of d, lane t of a quad has 8 t .. 8 t + 7 if keys are codes;
// - out: of 16 keys, lane t has t, t + 8, t + 4, t + 12.
#pragma once
#include "attention_chunks.cuh"

// A kernel instance. NT: row tiles of 8. QW, PW: warps for scores and for sums. A tile of keys
// (values) comes in KS (VS) parts: all keys and D / KS values of d (all d of 64 / VS keys); KR and
// VR parts fit in shared memory. None of these but D changes any result. TURN: columns of each half
// of a head in which keys differ from values, which then are all that the plane of keys holds (see
// kv.py); 0: it holds all columns.
template <int D_, int Q8_, int ROW_TILES_, int SCORE_WARPS_, int VALUE_WARPS_, int K_PARTS_, int V_PARTS_, int K_STAGES_, int V_STAGES_, int ROTARY_PAIRS_>
struct AttentionConfig {
  static constexpr int D = D_, Q8 = Q8_, ROW_TILES = ROW_TILES_, SCORE_WARPS = SCORE_WARPS_, VALUE_WARPS = VALUE_WARPS_, ROTARY_PAIRS = ROTARY_PAIRS_;
  static constexpr int K_PARTS = K_PARTS_, V_PARTS = V_PARTS_, K_STAGES = K_STAGES_, V_STAGES = V_STAGES_;
  static constexpr int KEYS = D >= 256 ? 128 : 64;  // of a tile
  static constexpr int KEY_TILES = KEYS / 16, WARP_KEY_TILES = KEY_TILES / SCORE_WARPS;  // 16-key tiles; of one warp
  static constexpr int PART_DIMS = D / K_PARTS, PART_KEYS = KEYS / V_PARTS, WARP_DIMS = D / VALUE_WARPS, ROWS = 8 * ROW_TILES;
  static constexpr int BYTES = Q8 ? 1 : 2;
  // Rows of codes are padded by 32 bytes against bank conflicts, rows of halves are swizzled.
  static constexpr int K_ROW = Q8 ? PART_DIMS + 32 : 2 * PART_DIMS, V_ROW = Q8 ? D + 32 : 2 * D;
  static constexpr int K_STAGE = KEYS * K_ROW + (Q8 ? KEYS * PART_DIMS / 16 : 0);
  static constexpr int V_STAGE = PART_KEYS * V_ROW + (Q8 ? PART_KEYS * D / 16 : 0);
  static_assert(KEY_TILES % SCORE_WARPS == 0 && PART_DIMS % 64 == 0 && PART_KEYS % 16 == 0 && WARP_DIMS % 32 == 0, "");
  static_assert(ROTARY_PAIRS % 64 == 0, "");
  // Shared memory, in bytes. Buffers of weights and tops are double.
  static constexpr int K_AT = 0, V_AT = K_STAGES * K_STAGE, Q_AT = V_AT + V_STAGES * V_STAGE;
  static constexpr int P_AT = Q_AT + ROW_TILES * D * 16, P_SIZE = KEYS * ROWS * 2;
  static constexpr int TILE_MAX_AT = P_AT + 2 * P_SIZE, TILE_MAX_SIZE = SCORE_WARPS * ROWS * 4;
  static constexpr int RESCALE_AT = TILE_MAX_AT + 2 * TILE_MAX_SIZE, RESCALE_SIZE = ROWS * 4;
  static constexpr int RUNNING_MAX_AT = RESCALE_AT + 2 * RESCALE_SIZE, WEIGHT_SUM_AT = RUNNING_MAX_AT + SCORE_WARPS * ROWS * 4;
  static constexpr int VISIBLE_AT = WEIGHT_SUM_AT + VALUE_WARPS * ROWS * 4, SHARED = VISIBLE_AT + ROWS * 8;
};

struct KvPlane {  // of keys or of values: [units, n_kv, capacity, columns], scales [.., columns / 32]
  const char* rows;
  const char* scales;
};

enum Swizzle { NO_SWIZZLE, SWIZZLE_KEYS, SWIZZLE_VALUES };

template <int SWIZZLE>
DEVICE int swizzled_chunk(int row, int piece) {  // of 16 bytes
  if (SWIZZLE == SWIZZLE_KEYS) return piece ^ row & 7;
  if (SWIZZLE == SWIZZLE_VALUES) return piece ^ (row & 3 | row >> 1 & 4);
  return piece;
}

#if ARCH >= 800
struct StridedRows {  // in bytes
  const char* plane;
  int first, pitch;
};

// COUNT rows of BYTES bytes, MOST at a time, to rows STRIDE apart; `source(at)`: where byte `at` of
// them comes from.
template <int COUNT, int BYTES, int MOST, int STRIDE, int SWIZZLE, int THREADS, class Source>
DEVICE void copy_rows_async(u32 to, Source source, int thread) {
  constexpr int SIZE = BYTES < MOST ? BYTES : MOST, PIECES = BYTES / SIZE;
  constexpr int STEP = THREADS / PIECES;  // rows at a time
  static_assert(THREADS % PIECES == 0 && (COUNT % STEP == 0 || STEP > COUNT), "");
  const int row = thread / PIECES, piece = thread % PIECES;
  if (STEP > COUNT && row >= COUNT) return;
  to += row * STRIDE;
  const StridedRows rows = source(piece * SIZE);
  const char* from = rows.plane + (row * rows.pitch + rows.first);
#pragma unroll 4
  for (int i = 0; i < COUNT; i += STEP)
    cp_async<SIZE>(to + swizzled_chunk<SWIZZLE>(i + row, piece) * SIZE + i * STRIDE,
                     from + i * rows.pitch);
}

// Which part of which tile comes next, over all items of this block.
template <class S, int PARTS>
struct TileCursor {
  int round = 0, part = 0, tile, end;
  int kv_block;  // see `AttentionWork`; -1: no tile is left
  int row;    // of the tile's first key, in its strip

  DEVICE TileCursor(const AttentionWork<S::KEYS>& work) { open(work); }
  DEVICE void open(const AttentionWork<S::KEYS>& work) {
    kv_block = -1;
    if (round == work.count) return;
    const WorkItem item = work.items[round];
    tile = item.tile, end = item.end;
    row = (u32)(tile * S::KEYS) % (u32)work.capacity;
    kv_block = work.kv_block(tile * S::KEYS, item.head);
  }
  DEVICE bool valid() const { return kv_block >= 0; }
  DEVICE void next(const AttentionWork<S::KEYS>& work) {
    if (++part < PARTS) return;
    part = 0;
    if (++tile < end) {
      row += S::KEYS;
      if (row >= work.capacity) {
        row -= work.capacity;
        kv_block = work.kv_block(tile * S::KEYS, work.items[round].head);  // of the next page
      }
      return;
    }
    ++round;
    open(work);
  }
};

// Where byte `at` of part `part` of keys comes from. UNIT: bytes of 32 columns in the planes.
template <class S, int UNIT>
DEVICE StridedRows key_source(const char* keys, const char* values, i64 row, int part, int at) {
  constexpr int ALL = S::D / 32 * UNIT, HALF = ALL / 2, PART = S::PART_DIMS / 32 * UNIT;
  constexpr int OWN = S::ROTARY_PAIRS / 32 * UNIT;
  if (!S::ROTARY_PAIRS) return {keys + row * ALL + part * PART, at, ALL};
  at += part * PART;
  const int half = at / HALF, inside = at % HALF;
  if (inside < OWN) return {keys + row * (2 * OWN), half * OWN + inside, 2 * OWN};
  return {values + row * ALL, at, ALL};
}

// A tile is consecutive in memory: the capacity of a unit is a multiple of 128, tiles are aligned.
template <class S>
DEVICE void load_key_tile(u32 stage, const KvPlane& k, const KvPlane& v, const TileCursor<S, S::K_PARTS>& at,
                      int capacity, int thread) {
  constexpr int BYTES = S::BYTES * 32, SCALES = 2, MOST = S::ROTARY_PAIRS ? 4 : 16;  // of 32 columns
  const i64 row = (i64)at.kv_block * capacity + at.row;
  copy_rows_async<S::KEYS, S::PART_DIMS / 32 * BYTES, 16, S::K_ROW, S::Q8 ? NO_SWIZZLE : SWIZZLE_KEYS, 32 * S::SCORE_WARPS>(
      stage, [&](int i) { return key_source<S, BYTES>(k.rows, v.rows, row, at.part, i); }, thread);
  if constexpr (S::Q8)
    copy_rows_async<S::KEYS, S::PART_DIMS / 32 * SCALES, MOST, S::PART_DIMS / 16, NO_SWIZZLE, 32 * S::SCORE_WARPS>(
        stage + S::KEYS * S::K_ROW,
        [&](int i) { return key_source<S, SCALES>(k.scales, v.scales, row, at.part, i); }, thread);
}

template <class S>
DEVICE void load_value_tile(u32 stage, const KvPlane& v, const TileCursor<S, S::V_PARTS>& at, int capacity,
                        int thread) {
  constexpr int BYTES = S::D * S::BYTES, SCALES = S::D / 16;
  const i64 row = (i64)at.kv_block * capacity + at.row + at.part * S::PART_KEYS;
  copy_rows_async<S::PART_KEYS, BYTES, 16, S::V_ROW, S::Q8 ? NO_SWIZZLE : SWIZZLE_VALUES, 32 * S::VALUE_WARPS>(
      stage, [&](int i) { return StridedRows{v.rows + row * BYTES, i, BYTES}; }, thread);
  if constexpr (S::Q8)
    copy_rows_async<S::PART_KEYS, SCALES, 16, SCALES, NO_SWIZZLE, 32 * S::VALUE_WARPS>(
        stage + S::PART_KEYS * S::V_ROW,
        [&](int i) { return StridedRows{v.scales + row * SCALES, i, SCALES}; }, thread);
}

// Values that some row must not see count zero times; zero times infinity or NaN would be NaN.
DEVICE u32 nonfinite_half_signs(u32 x) { return (x & 0x7fff7fffu) + 0x04000400u & 0x80008000u; }
DEVICE u32 zero_nonfinite_halves(u32 x) {
  const u32 broken = nonfinite_half_signs(x) >> 15;
  return x & ~(broken * 0xffffu);
}
// `position`: of the first key of this part.
template <class S>
DEVICE void zero_nonfinite_values(char* stage, const AttentionWork<S::KEYS>& work, int position, int thread) {
  constexpr int ROW = S::Q8 ? S::D / 16 : 2 * S::D, SIZE = ROW < 16 ? ROW / 4 : 4;  // bytes, words
  u32* words = (u32*)(stage + (S::Q8 ? S::PART_KEYS * S::V_ROW : 0));
#pragma unroll 2
  for (int i = thread; i < S::PART_KEYS * ROW / (4 * SIZE); i += 32 * S::VALUE_WARPS) {
    if (work.visible_to_all(position + i / (ROW / (4 * SIZE)))) continue;
    u32 x[SIZE], broken = 0;
#pragma unroll
    for (int j = 0; j < SIZE; ++j) {
      x[j] = words[i * SIZE + j];
      broken |= nonfinite_half_signs(x[j]);
    }
    if (broken)
#pragma unroll
      for (int j = 0; j < SIZE; ++j) words[i * SIZE + j] = zero_nonfinite_halves(x[j]);
  }
}

// Four bytes q + 128 as halves q, in two registers.
DEVICE void centered_halves(u32 bytes, u32& low, u32& high) {
  low = sub_half2(permute(bytes, 0x64646464u, 0x4140), 0x64806480u);  // 1024 + 128
  high = sub_half2(permute(bytes, 0x64646464u, 0x4342), 0x64806480u);
}

// 16 keys from `key` on, 32 values of d: the operands of two products.
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

// Where 16 bytes of a row of an item stand. Codes: [NT][D / 32][lane]; halves: [row][piece].
template <class S>
DEVICE int query_offset(int row, int piece) {
  if (S::Q8) return (row / 8 * (S::D / 32) + piece / 4) * 512 + row % 8 * 64 + piece % 4 * 16;
  return row * S::D * 2 + swizzled_chunk<SWIZZLE_KEYS>(row, piece) * 16;
}
// Rows 8 n .., 32 values of d: the operands of two products.
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

// scores += K Q^T over one part of d, of the first NT tiles of rows. The keys of the next 32 values
// are read ahead.
template <class S, int ROW_TILES = S::ROW_TILES>
DEVICE void accumulate_scores(float (&scores)[S::WARP_KEY_TILES][S::ROW_TILES][4], const char* stage, const char* rows,
                          int part, int warp) {
  constexpr int GROUP = ROW_TILES < 4 ? ROW_TILES : 4 / S::WARP_KEY_TILES;  // row tiles whose products are interleaved
  constexpr int BLOCKS = S::PART_DIMS / 32;
  const int key = warp * S::WARP_KEY_TILES * 16;
  u32 a[2][S::WARP_KEY_TILES][2][4];
#pragma unroll
  for (int w = 0; w < S::WARP_KEY_TILES; ++w) load_key_fragments<S>(a[0][w], stage, key + w * 16, 0);
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
      for (int n = 0; n < GROUP; ++n) load_query_fragments<S>(b[n], rows, group + n, part * BLOCKS + block);
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

// Nothing of keys that a row must not see.
template <class S>
DEVICE void mask_scores(float (&scores)[S::WARP_KEY_TILES][S::ROW_TILES][4], const char* shared, int tile, int warp) {
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
          const int key = tile * S::KEYS + (warp * S::WARP_KEY_TILES + w) * 16 + half * 8 + lane / 4;
          if (key < sees.x || key > sees.y) scores[w][n][half * 2 + c] = NEG_INF;
        }
    }
}

// The largest score of each row among a warp's keys of this tile. Lane (g, t) has rows 2 t, 2 t + 1
// of each 8 and keys g, g + 8 of each 16.
template <class S, int ROW_TILES = S::ROW_TILES>
DEVICE void tile_row_max(const float (&scores)[S::WARP_KEY_TILES][S::ROW_TILES][4], float* tops, int warp) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < ROW_TILES; ++n) {
    float found[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float x = fmaxf(scores[0][n][c], scores[0][n][c + 2]);
      if (S::WARP_KEY_TILES == 2) x = fmaxf(x, fmaxf(scores[S::WARP_KEY_TILES - 1][n][c], scores[S::WARP_KEY_TILES - 1][n][c + 2]));
#pragma unroll
      for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(FULL_MASK, x, step));
      found[c] = x;
    }
    if (lane < 4) *(float2*)(tops + warp * S::ROWS + n * 8 + lane * 2) = {found[0], found[1]};
  }
}

constexpr float WEIGHT_EXPONENT = 6.0f;  // weights are stored times 2^6, away from the end of half precision

// Weights 2^(score - origin) of 16 keys and rows 2 t, 2 t + 1 of 8, to p [index][lane] 8 bytes.
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

// 32 values of d of 16 keys as the operands of two products. Codes: values 4 g .. 4 g + 3 of d are
// rows g and g + 8 of the first, then of the second; halves: 8 i + g is row g (i even) or g + 8.
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
    // Matrix lane / 8, its row lane % 8: keys 0, 8, 1, 9 .. of matrices 0 and 1, + 4 of 2 and 3.
    const int row = key + lane % 8 / 2 + lane % 2 * 8 + lane / 16 * 4, piece = d / 8 + lane / 8 % 2;
    ldmatrix_x4_trans(a[0], stage + row * S::V_ROW + swizzled_chunk<SWIZZLE_VALUES>(row, piece) * 16);
    ldmatrix_x4_trans(a[1],
                              stage + row * S::V_ROW + swizzled_chunk<SWIZZLE_VALUES>(row, piece + 2) * 16);
  }
}

// Scales of a lane's keys (t, t + 8) and (t + 4, t + 12) for each of BLOCKS blocks of d, in pairs.
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

// out += V^T P^T over one part of the keys, and sums += P^T 1: lane (g, t) adds the weights of row g
// and its four keys of every PW-th 16. p: [KT][NT][lane] 8 bytes. The scale of a key's codes enters
// through its weight.
template <class S, int ROW_TILES = S::ROW_TILES>
DEVICE void accumulate_values(float (&out)[S::WARP_DIMS / 16][S::ROW_TILES][4], float (&sums)[S::ROW_TILES],
                            const char* stage, const uint2* p, int part, int warp) {
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
      load_value_scales<BLOCKS>(scale, (const u16*)(stage + S::PART_KEYS * S::V_ROW) +
                          (k * 16 + lane % 4) * (S::D / 32) + warp * BLOCKS, S::D / 32);
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
