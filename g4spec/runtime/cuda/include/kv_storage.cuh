// Mapping of sequence positions to rows of the KV cache. A layer stores each of K and V as a plane
// [units, n_kv, capacity, columns] (g4spec/runtime/cuda/cache/cuda_kv.py). A unit is a page of the
// pool (layers without a window) or the ring of a slot (layers with one). Position p is in row
// p % capacity of its unit.
//
// The host writes page tables by copies before a step begins, so kernels may read them before
// griddep_wait().
#pragma once
#include "ptx.cuh"

struct Units {
  const int* table;  // [slots, width]: page number of each PAGE positions of a slot; null: rings
  int width, slot;

  // Unit that stores a position; page 0, which is spare, for positions outside the table.
  DEVICE int unit_of(int position) const {
    if (!table) return slot;
    const u32 page = (u32)position / PAGE;
    return page < (u32)width ? table[(i64)slot * width + page] : 0;
  }
};
