// Where a layer keeps the rows of sequences: planes [units, n_kv, capacity, columns]. A unit is the ring
// of a slot or a page, see g4spec/runtime/cuda/cache/cuda_kv.py. Position p stands in row p % capacity
// of its unit.
//
// Tables of pages are written by copies before a step begins, so they may be read at any time.
#pragma once
#include "ptx.cuh"

constexpr int PAGE = 128;  // positions

struct Units {
  const int* table;  // [slots, width]: the page of each PAGE positions of a slot; null: rings
  int width, slot;

  // The unit of a position; the spare page for those before 0 and behind the table.
  DEVICE int unit_of(int position) const {
    if (!table) return slot;
    const u32 page = (u32)position / PAGE;
    return page < (u32)width ? table[(i64)slot * width + page] : 0;
  }
};
