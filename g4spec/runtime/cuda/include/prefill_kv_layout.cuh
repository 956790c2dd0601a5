// Where prefill keeps the keys and values that a chunk of rows attends to, and how a row of a head
// is held: lane l of a warp has V values from 4 l / 8 l ... of each half of the head, so that both
// members of a rotated pair (i, i + D/2) stand in one lane.
#pragma once
#include "half_rows.cuh"

// Rows of D values: [head][row][D].
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

// Tiles of 64 rows in the order in which tensor cores of sm_90 read shared memory: blocks of 64
// columns [64 rows][8 pieces of 16 bytes], piece p of row r in place p ^ (r % 8).
template <int D, int BLOCKS>
struct SwizzledBlocks {
  static DEVICE i64 at(int head, i64 capacity, int row, int block, int d) {
    const i64 tile = head * (capacity / 64) + row / 64;
    return (tile * BLOCKS + block) * 4096 + row % 64 * 64 + ((d / 8 % 8) ^ (row % 8)) * 8 + d % 8;
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

// Values, and of the keys only what the rotation made different from them (up to a weight for each
// channel, which the queries take over): the first 64 columns of both halves.
template <int D>
struct SharedKvTiles : SwizzledBlocks<D, D / 64 + 2> {
  static DEVICE i64 value(int head, i64 capacity, int row, int d) {
    return SharedKvTiles::at(head, capacity, row, d / 64, d);
  }
  static DEVICE i64 key(int head, i64 capacity, int row, int d) {
    return SharedKvTiles::at(head, capacity, row, D / 64 + (d >= D / 2), d);
  }
  static constexpr DEVICE bool stores_key(int d) { return d % (D / 2) < 64; }
};

template <int D>
struct HeadRow {
  static constexpr int V = D >= 64 ? D / 64 : 1;
  float x[2][V];

  static DEVICE int lane() { return threadIdx.x % 32; }
  static DEVICE bool active() { return D >= 64 || lane() * V < D / 2; }
  static DEVICE int at(int half) { return half * (D / 2) + lane() * V; }

  // What a plane of the cache holds of a row: all columns, or with TURN the first TURN of both
  // halves.
  template <int ROTARY_PAIRS>
  static DEVICE bool stored() { return active() && (!ROTARY_PAIRS || lane() * V < ROTARY_PAIRS); }
  template <int ROTARY_PAIRS>
  static DEVICE int column(int half) { return ROTARY_PAIRS ? half * ROTARY_PAIRS + lane() * V : at(half); }

  DEVICE void load(const u16* row) {
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (active()) {
        unpack_row(x[h], row + at(h));
      } else {
#pragma unroll
        for (int e = 0; e < V; ++e) x[h][e] = 0;
      }
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
        y.x[h][e] = x[h][e] * s * (weight && active() ? weight[at(h) + e] : 1.0f);
    return y;
  }
  // `turns`: cosine and sine of the first `rotated` pairs.
  DEVICE void rotate(const float2* turns, int rotated) {
#pragma unroll
    for (int e = 0; e < V; ++e) {
      const int i = lane() * V + e;
      if (i >= rotated) continue;
      const float2 t = turns[i];
      const float a = x[0][e], b = x[1][e];
      x[0][e] = a * t.x - b * t.y;
      x[1][e] = b * t.x + a * t.y;
    }
  }
};
