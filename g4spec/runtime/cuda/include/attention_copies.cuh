// Copying tiles of K and V to shared memory (cp.async), for decode attention on tensor cores
// (attention_tiles.cuh, whose AttentionConfig is S here).
#pragma once
#include "attention_chunks.cuh"

struct KvPlane {  // K or V: [units, n_kv, capacity, columns], scales [.., columns / 32]
  const char* rows;
  const char* scales;
};

enum Swizzle { NO_SWIZZLE, SWIZZLE_KEYS, SWIZZLE_VALUES };

template <int SWIZZLE>
DEVICE int swizzled_chunk(int row, int piece) {  // position of 16-byte chunk `piece` of a row
  if (SWIZZLE == SWIZZLE_KEYS) return piece ^ row & 7;
  if (SWIZZLE == SWIZZLE_VALUES) return piece ^ (row & 3 | row >> 1 & 4);
  return piece;
}

#if ARCH >= 800
struct StridedRows {  // base pointer, offset and pitch in bytes
  const char* plane;
  int first, pitch;
};

// Copy COUNT rows of BYTES bytes to shared memory, to rows STRIDE bytes apart, in copies of at most
// MOST bytes. `source(at)` gives the rows that byte `at` comes from.
template <int COUNT, int BYTES, int MOST, int STRIDE, int SWIZZLE, int THREADS, class Source>
DEVICE void copy_rows_async(u32 to, Source source, int thread) {
  constexpr int SIZE = BYTES < MOST ? BYTES : MOST, PIECES = BYTES / SIZE;
  constexpr int STEP = THREADS / PIECES;  // rows per iteration
  static_assert(THREADS % PIECES == 0 && (COUNT % STEP == 0 || STEP > COUNT),
                "every thread copies the same chunk of each of its rows");
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

// Iterates over the pieces of all tiles of this block's work list.
template <class S, int PARTS>
struct TileCursor {
  int round = 0, part = 0, tile, end;
  int kv_block;  // `AttentionWork::kv_block`; -1: past the end
  int row;       // row of the tile's first key in its kv_block

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
        kv_block = work.kv_block(tile * S::KEYS, work.items[round].head);  // the next page
      }
      return;
    }
    ++round;
    open(work);
  }
};

// Rows that byte `at` of piece `part` of a key tile comes from. UNIT: bytes per 32 columns in the
// planes.
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

// A tile is contiguous in memory: tiles are aligned and the capacity of a unit is a multiple of
// 128.
template <class S>
DEVICE void load_key_tile(u32 stage, const KvPlane& k, const KvPlane& v,
                          const TileCursor<S, S::K_PARTS>& at, int capacity, int thread) {
  constexpr int BYTES = S::BYTES * 32, SCALES = 2,
                MOST = S::ROTARY_PAIRS ? 4 : 16;  // of 32 columns
  const i64 row = (i64)at.kv_block * capacity + at.row;
  copy_rows_async<S::KEYS, S::PART_DIMS / 32 * BYTES, 16, S::K_ROW,
                  S::Q8 ? NO_SWIZZLE : SWIZZLE_KEYS, 32 * S::SCORE_WARPS>(
      stage, [&](int i) { return key_source<S, BYTES>(k.rows, v.rows, row, at.part, i); }, thread);
  if constexpr (S::Q8)
    copy_rows_async<S::KEYS, S::PART_DIMS / 32 * SCALES, MOST, S::PART_DIMS / 16, NO_SWIZZLE,
                    32 * S::SCORE_WARPS>(
        stage + S::KEYS * S::K_ROW,
        [&](int i) { return key_source<S, SCALES>(k.scales, v.scales, row, at.part, i); }, thread);
}

template <class S>
DEVICE void load_value_tile(u32 stage, const KvPlane& v, const TileCursor<S, S::V_PARTS>& at,
                            int capacity, int thread) {
  constexpr int BYTES = S::D * S::BYTES, SCALES = S::D / 16;
  const i64 row = (i64)at.kv_block * capacity + at.row + at.part * S::PART_KEYS;
  copy_rows_async<S::PART_KEYS, BYTES, 16, S::V_ROW, S::Q8 ? NO_SWIZZLE : SWIZZLE_VALUES,
                  32 * S::VALUE_WARPS>(
      stage, [&](int i) { return StridedRows{v.rows + row * BYTES, i, BYTES}; }, thread);
  if constexpr (S::Q8)
    copy_rows_async<S::PART_KEYS, SCALES, 16, SCALES, NO_SWIZZLE, 32 * S::VALUE_WARPS>(
        stage + S::PART_KEYS * S::V_ROW,
        [&](int i) { return StridedRows{v.scales + row * SCALES, i, SCALES}; }, thread);
}

// Masked values have weight zero, but 0 * inf and 0 * NaN are NaN: replace non-finite halves
// (values, or scales of Q8_0) that some row must not see by zero. nonfinite_half_signs: bit 15 of
// each half that is inf or NaN.
DEVICE u32 nonfinite_half_signs(u32 x) { return (x & 0x7fff7fffu) + 0x04000400u & 0x80008000u; }
DEVICE u32 zero_nonfinite_halves(u32 x) {
  const u32 broken = nonfinite_half_signs(x) >> 15;
  return x & ~(broken * 0xffffu);
}
// `position`: position of the first key of this piece.
template <class S>
DEVICE void zero_nonfinite_values(char* stage, const AttentionWork<S::KEYS>& work, int position,
                                  int thread) {
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
#endif
