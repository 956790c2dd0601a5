// Which keys are summed together in attention: chunks of absolute positions, so that the sum a row
// gets depends neither on the rows beside it nor on the length of the sequence.
#pragma once
#include "ptx.cuh"

#define NEVER __int_as_float(0xff800000)  // -infinity

// Chunks of 2^shift positions; `growing` ones have 2^shift below 4096 and then 2, 4, 8 ... times as
// many in each octave: 2^(11 - shift) chunks an octave.
struct Chunks {
  int shift, growing;

  DEVICE int of(int position) const {
    if (!growing || position < 4096) return position >> shift;
    const int octave = 19 - __clz(position);  // 4096 is octave 0
    return ((2 + octave) << (11 - shift)) + ((position - (4096 << octave)) >> (shift + octave + 1));
  }
  DEVICE int start(int chunk) const {
    if (!growing) return chunk << shift;
    const int beyond = chunk - (2 << (11 - shift));
    if (beyond < 0) return chunk << shift;
    const int octave = beyond >> (11 - shift), inside = beyond & ((1 << (11 - shift)) - 1);
    return (4096 << octave) + (inside << (shift + octave + 1));
  }
};

// Positions that rows see: some row sees lo .. hi, every row sees all_from .. all_to.
struct Span {
  int lo, hi, all_from, all_to;
};

template <class T>
DEVICE T least(T a, T b) { return a < b ? a : b; }
template <class T>
DEVICE T most(T a, T b) { return a > b ? a : b; }

DEVICE Span span_of(const i64* first, const i64* last, int tokens) {
  const int lane = threadIdx.x % 32, t = lane < tokens ? lane : 0;
  const int from = (int)__ldcg(first + t), to = (int)__ldcg(last + t);
  Span s = {from, to, from, to};
#pragma unroll
  for (int step = 16; step; step /= 2) {
    s.lo = least(s.lo, __shfl_xor_sync(FULL, s.lo, step));
    s.hi = most(s.hi, __shfl_xor_sync(FULL, s.hi, step));
    s.all_from = most(s.all_from, __shfl_xor_sync(FULL, s.all_from, step));
    s.all_to = least(s.all_to, __shfl_xor_sync(FULL, s.all_to, step));
  }
  return s;
}

// A part of the work: keys of one chunk (tiles tile .. end - 1), one KV head, some rows.
struct __align__(8) Item {
  u16 tile, end;
  u16 chunk;      // from the first that some row sees
  u8 head, rows;  // KV head; which block of rows
};
constexpr int ITEMS = 264;  // most of a block

// What a block does, in shared memory. The tiles of all (head, rows) pairs, one pair after the
// other and each from its last tile on, are cut into equal shares; a block has the items that begin
// in its share. So the large chunks come first and a block meets few pairs.
template <int KEYS>  // of a tile
struct Work {
  Item items[ITEMS];
  int count, all_from, all_to, capacity;

  // The first item that begins at or behind tile `x` of all.
  static DEVICE int first_item(const Chunks& chunks, const Span& span, int per_pair, int x) {
    const int end = span.hi / KEYS + 1, tiles = end - span.lo / KEYS;
    const int pair = (u32)x / (u32)tiles, skip = x - pair * tiles, high = chunks.of(span.hi);
    const int chunk = chunks.of((end - 1 - skip) * KEYS);
    const int begins = end - least(end, chunks.start(chunk + 1) / KEYS);
    return pair * per_pair + high - chunk + (begins != skip);
  }
  // By one warp.
  DEVICE void set(const Chunks& chunks, const Span& span, int n_kv, int row_blocks, int ring) {
    const int low = chunks.of(span.lo), high = chunks.of(span.hi), per_pair = high - low + 1;
    const u32 pairs = n_kv * row_blocks, b = blockIdx.x;
    const u32 tiles = (span.hi / KEYS - span.lo / KEYS + 1) * pairs;
    int from = b, to = b + (b < per_pair * pairs);  // one each, if there are enough blocks
    if (per_pair * pairs > gridDim.x) {
      from = first_item(chunks, span, per_pair, tiles * b / gridDim.x);
      to = first_item(chunks, span, per_pair, tiles * (b + 1) / gridDim.x);
    }
    for (int i = from + threadIdx.x; i < to; i += 32) {
      const u32 pair = (u32)i / (u32)per_pair, head = pair / (u32)row_blocks;
      const int chunk = high - (i - (int)pair * per_pair);
      const int begin = most(chunks.start(chunk), span.lo);
      const int last = least(chunks.start(chunk + 1) - 1, span.hi);
      items[i - from] = {(u16)(begin / KEYS), (u16)(last / KEYS + 1), (u16)(chunk - low),
                         (u8)head, (u8)(pair - head * row_blocks)};
    }
    if (threadIdx.x == 0)
      count = to - from, all_from = span.all_from, all_to = span.all_to, capacity = ring;
  }
  DEVICE bool whole(int tile) const {  // does every row see all of it?
    return tile * KEYS >= all_from && tile * KEYS + KEYS - 1 <= all_to;
  }
  DEVICE bool seen(int position) const { return position >= all_from && position <= all_to; }
};
