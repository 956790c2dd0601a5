// Layouts of the K and V buffers that prefill attention reads, and `HeadRow`, one head's vector in
// the registers of a warp. A chunk's keys and values are copied into these buffers together with
// those of earlier rows of the cache.
//
// A layout maps (head, row, column d) to an element offset: `RowMajor` for cuBLAS, `SwizzledTiles`
// and `SharedKvTiles` for the wgmma kernels. `stores_key(d)` is false for columns of K that the
// layout omits.
#pragma once
#include "half_rows.cuh"

// [head][row][D].
template <int D>
struct RowMajor {
  static DEVICE i64 key(int head, i64 capacity, int row, int d) {
    return (head * capacity + row) * D + d;
  }
  static DEVICE i64 value(int head, i64 capacity, int row, int d) {
    return key(head, capacity, row, d);
  }
  static constexpr DEVICE bool stores_key(int) { return true; }
};

// Tiles of KV_TILE rows, each laid out as wgmma reads shared memory, so that one bulk copy brings a
// tile: BLOCKS blocks of 64 columns [KV_TILE rows][8 chunks of 16 bytes], chunk p of row r at position p
// ^ (r % 8).
template <int D, int BLOCKS>
struct SwizzledBlocks {
  static DEVICE i64 at(int head, i64 capacity, int row, int block, int d) {
    const i64 tile = head * (capacity / KV_TILE) + row / KV_TILE;
    return (tile * BLOCKS + block) * (KV_TILE * 64) + row % KV_TILE * 64 +
           ((d / 8 % 8) ^ (row % 8)) * 8 + d % 8;
  }
};
template <int D>
struct SwizzledTiles : SwizzledBlocks<D, D / 64> {
  static DEVICE i64 key(int head, i64 capacity, int row, int d) {
    return SwizzledTiles::at(head, capacity, row, d / 64, d);
  }
  static DEVICE i64 value(int head, i64 capacity, int row, int d) {
    return key(head, capacity, row, d);
  }
  static constexpr DEVICE bool stores_key(int) { return true; }
};

// For layers whose keys are their values before norm weight and rotation: V, and of K only the
// rotated columns, which are the first CACHE_ROTARY_PAIRS of both halves. The other columns of K equal V times a
// weight per channel, which is multiplied into the queries instead.
template <int D>
struct SharedKvTiles : SwizzledBlocks<D, (D + 2 * CACHE_ROTARY_PAIRS) / 64> {
  static DEVICE i64 value(int head, i64 capacity, int row, int d) {
    return SharedKvTiles::at(head, capacity, row, d / 64, d);
  }
  static DEVICE i64 key(int head, i64 capacity, int row, int d) {
    return SharedKvTiles::at(head, capacity, row, D / 64 + (d >= D / 2), d);
  }
  static constexpr DEVICE bool stores_key(int d) { return d % (D / 2) < CACHE_ROTARY_PAIRS; }
};

// One head's row in a warp: lane l holds V values of each half of the head, from column l * V on,
// so that both members of a rotated pair (i, i + D/2) are in one lane.
template <int D>
struct HeadRow {
  static constexpr int V = D / 64;
  static_assert(V * 64 == D, "a warp holds the whole head");
  float x[2][V];

  static DEVICE int lane() { return threadIdx.x % 32; }
  static DEVICE int at(int half) { return half * (D / 2) + lane() * V; }

  // Columns that a plane of the cache stores: all (ROTARY_PAIRS 0), or the first ROTARY_PAIRS of
  // both halves.
  template <int ROTARY_PAIRS>
  static DEVICE bool stored() {
    return !ROTARY_PAIRS || lane() * V < ROTARY_PAIRS;
  }
  template <int ROTARY_PAIRS>
  static DEVICE int column(int half) {
    return ROTARY_PAIRS ? half * ROTARY_PAIRS + lane() * V : at(half);
  }

  DEVICE void load(const u16* row) {
#pragma unroll
    for (int h = 0; h < 2; ++h) unpack_row(x[h], row + at(h));
  }
  DEVICE float inverse_rms(float eps) const {
    float s = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int e = 0; e < V; ++e) s += x[h][e] * x[h][e];
#pragma unroll
    for (int step = 16; step; step /= 2) s += __shfl_xor_sync(FULL_MASK, s, step);
    return rsqrtf(s * (1.0f / D) + eps);
  }
  DEVICE HeadRow times(float s, const float* weight) const {
    HeadRow y;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int e = 0; e < V; ++e)
        y.x[h][e] = x[h][e] * s * (weight ? weight[at(h) + e] : 1.0f);
    return y;
  }
  // Rotate the first `rotated` pairs. `cos_sin`: their cosines and sines.
  DEVICE void rotate(const float2* cos_sin, int rotated) {
#pragma unroll
    for (int e = 0; e < V; ++e) {
      const int i = lane() * V + e;
      if (i >= rotated) continue;
      const float2 t = cos_sin[i];
      const float a = x[0][e], b = x[1][e];
      x[0][e] = a * t.x - b * t.y;
      x[1][e] = b * t.x + a * t.y;
    }
  }
};
