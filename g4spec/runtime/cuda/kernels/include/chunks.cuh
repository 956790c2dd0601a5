// Which keys are summed together in attention: chunks of absolute positions, so that the sum a row
// gets depends neither on the rows beside it nor on the length of the sequence.
#pragma once
#include "ptx.cuh"

#define NEVER __int_as_float(0xff800000)  // -infinity

// Chunks of `unit` positions; `growing` ones have `unit` below 4096 and then 2, 4, 8 ... times as
// many in each octave (unit is a power of two then): 2048 / unit chunks an octave.
struct Chunks {
  int unit, growing;

  DEVICE int of(int position) const {
    if (!growing || position < 4096) return position / unit;
    const int octave = 19 - __clz(position);  // 4096 is octave 0
    return (4096 + octave * 2048) / unit + (position - (4096 << octave)) / (unit << (octave + 1));
  }
  DEVICE int start(int chunk) const {
    if (!growing || chunk < 4096 / unit) return chunk * unit;
    const int beyond = chunk - 4096 / unit, each = 2048 / unit, octave = beyond / each;
    return (4096 << octave) + (beyond % each) * (unit << (octave + 1));
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

DEVICE float exp2_fast(float x) {  // exp2(-inf) is 0
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// A part of the work: keys of one chunk (tiles tile .. end - 1), one KV head, some rows.
struct __align__(16) Item {
  int place;      // (chunk, head) among all partial results, in rows
  short head, rows;  // KV head, -1: none; which block of rows
  int tile, end;
};
constexpr int ITEMS = 128;  // most of a block, and none behind the last

// What a block does, in shared memory. All items, the largest chunks first, are dealt to the blocks
// back and forth.
template <int KEYS>  // of a tile
struct Work {
  Item items[ITEMS + 1];
  int all_from, all_to;

  DEVICE void set(const Chunks& chunks, const Span& span, int n_kv, int row_blocks, int rows) {
    for (int round = threadIdx.x; round <= ITEMS; round += blockDim.x) {
      const int turn = round & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
      const int i = round * gridDim.x + turn, pair = i / row_blocks, low = chunks.of(span.lo);
      const int chunk = chunks.of(span.hi) - pair / n_kv, head = pair % n_kv;
      if (chunk < low || round == ITEMS) {
        items[round].head = -1;
      } else {
        const int begin = most(chunks.start(chunk), span.lo);
        const int last = least(chunks.start(chunk + 1) - 1, span.hi);
        items[round] = {((chunk - low) * n_kv + head) * rows, (short)head,
                        (short)(i % row_blocks), begin / KEYS, last / KEYS + 1};
      }
    }
    all_from = span.all_from, all_to = span.all_to;
  }
  DEVICE bool whole(int tile) const {  // does every row see all of it?
    return tile * KEYS >= all_from && tile * KEYS + KEYS - 1 <= all_to;
  }
};
