// Which keys are summed together in attention: chunks of absolute positions, so that the sum a row
// gets depends neither on the rows beside it nor on the length of the sequence.
#pragma once
#include "ptx.cuh"
#include "units.cuh"

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

// What a block does, in shared memory. Each (head, rows) pair has as many blocks as any other, so
// that blocks with the same keys read them at the same time. From the last chunk on, each goes to the
// block of its pair that has least to do so far.
template <int KEYS>  // of a tile
struct Work {
  static constexpr int COST = 4;  // of a tile, where that of a chunk by itself is 1
  Item items[ITEMS];
  Units units;
  int count, all_from, all_to, capacity, n_kv;

  // By one warp, whose lanes stand for blocks. Where there are more, 32 or fewer of them have every
  // second (third ..) chunk.
  DEVICE void set(const Chunks& chunks, const Span& span, const Units& where, int rows_of_unit,
                  int heads, int row_blocks) {
    const int lane = threadIdx.x % 32, low = chunks.of(span.lo), high = chunks.of(span.hi);
    const u32 each = gridDim.x / (u32)(heads * row_blocks), turns = (each + 31) / 32;
    const u32 blocks = each / turns, place = blockIdx.x / blocks, own = blockIdx.x - place * blocks;
    const u32 pair = place / turns, head = pair / (u32)row_blocks, rows = pair - head * row_blocks;
    Item item;
    auto open = [&](int chunk) {  // what it costs; nothing if there is none
      if (chunk < low || head >= heads) return 0;
      const int begin = most(chunks.start(chunk), span.lo) / KEYS;
      const int end = least(chunks.start(chunk + 1) - 1, span.hi) / KEYS + 1;
      item = {(u16)begin, (u16)end, (u16)(chunk - low), (u8)head, (u8)rows};
      return ((end - begin) * COST + 1) * 32;
    };
    int chunk = high - (place - pair * turns) - lane * turns, found = 0;
    u32 cost = open(chunk), load = lane < blocks ? cost + lane : ~0u;  // and which block it is
    if (cost && lane == own) items[0] = item, found = 1;
    found = __shfl_sync(FULL, found, own);
    chunk -= blocks * turns;
    while (__shfl_sync(FULL, cost = open(chunk), 0)) {
#pragma unroll 8
      for (int i = 0; i < 32; ++i) {
        const u32 more = __shfl_sync(FULL, cost, i), free = __reduce_min_sync(FULL, load);
        if (load == free) load += more;
        const bool mine = more && free % 32 == own;
        if (mine && lane == i) items[found] = item;
        found += mine;
      }
      chunk -= 32 * turns;
    }
    if (lane) return;
    count = found, all_from = span.all_from, all_to = span.all_to;
    units = where, capacity = rows_of_unit, n_kv = heads;
  }
  // Which [capacity] rows of a plane hold a position, for a head: those of its unit.
  DEVICE int strip(int position, int head) const { return units.of(position) * n_kv + head; }
  DEVICE bool whole(int tile) const {  // does every row see all of it?
    return tile * KEYS >= all_from && tile * KEYS + KEYS - 1 <= all_to;
  }
  DEVICE bool seen(int position) const { return position >= all_from && position <= all_to; }
};
