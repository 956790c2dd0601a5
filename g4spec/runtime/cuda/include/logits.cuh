// Logits [T, V], and 64-bit keys that order (value, column) pairs.
//
// A larger key is a larger value or, among equal values, a lower column. No two keys of a row are
// equal, so a maximum does not depend on the order of comparisons. NaN is above all numbers.
#pragma once
#include "math.cuh"

// A block reads a span of LOGIT_SPAN columns, a thread QUADS times 16 bytes.
constexpr int QUADS = LOGIT_SPAN / (4 * LOGIT_THREADS);

struct Logits {
  const float* z;        // [rows, columns], raw
  const i64* positions;  // of the rows, at `row_index`; the chosen token is `ahead` positions later
  const u32* suppressed;  // one bit per column, or null
  int columns, ahead;
  float cap;                // logit = cap tanh(z / cap); 0: z
  int each = 1, pitch = 1;  // rows per sequence here, and in `positions` and `bad`
  float inv_3_cap_squared = 1.0f / (3.0f * cap * cap);

  DEVICE int sequence(int row) const { return row / each; }
  // Index of a row in `positions` and `bad`, which have `pitch` entries per sequence.
  DEVICE int row_index(int row) const { return row / each * pitch + row % each; }
  DEVICE u64 position(int row) const { return (u64)(positions[row_index(row)] + ahead); }

  DEVICE float value(float x) const {
    if (x == NEG_INF) return x;
    return cap > 0.0f ? cap * tanhf(x / cap) : x;
  }
  // Lower bound of the raw logits whose capped value may round to that of `most`.
  DEVICE float tie_lower_bound(float most) const {
    if (cap == 0.0f) return most;
    const float t = tanhf(most / cap), slope = 1.0f - t * t;
    if (!(slope > 1e-6f)) return -3.4e38f;
    return most - fabsf(most) * 5e-7f - cap * 1e-6f / slope;
  }
  // Upper bound of the capped value of a raw logit, without tanh: tanh(y) <= y, and for y < 0
  // tanh(y) <= min(y - y^3 / 3, 0).
  DEVICE float upper_bound(float x) const {
    return cap > 0.0f && x < 0.0f ? fminf(x - x * x * x * inv_3_cap_squared, 0.0f) : x;
  }
  DEVICE float load(int row, int column) const {
    const bool out =
        column >= columns || (suppressed && suppressed[column / 32] >> column % 32 & 1);
    return out ? NEG_INF : __ldcg(z + (i64)row * columns + column);
  }
  // Columns start + 4 LOGIT_THREADS j + e of a row; -inf where suppressed or out of range.
  DEVICE void load(float (&v)[QUADS][4], int row, int start) const {
    const float* p = z + (i64)row * columns;
    u32 out[QUADS];
#pragma unroll
    for (int j = 0; j < QUADS; ++j) {
      const int first = start + j * LOGIT_THREADS * 4;
      if (columns % 4 == 0 && first < columns) {
        const float4 x = __ldcg((const float4*)(p + first));
        v[j][0] = x.x, v[j][1] = x.y, v[j][2] = x.z, v[j][3] = x.w;
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) v[j][e] = first + e < columns ? __ldcg(p + first + e) : NEG_INF;
      }
      out[j] = suppressed && first < columns ? suppressed[first / 32] >> first % 32 : 0;
    }
#pragma unroll
    for (int j = 0; j < QUADS; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (out[j] >> e & 1) v[j][e] = NEG_INF;
  }
};

DEVICE u64 make_key(float value, int column) {  // never 0; 0 means "no key"
  const u32 bits = value != value ? 0x7fffffffu : __float_as_uint(value + 0.0f);  // -0 is 0
  return (u64)ordered_bits(bits) << 32 | (0xffffffffu - (u32)column);
}
DEVICE float value_of(u64 key) {
  const u32 bits = (u32)(key >> 32);
  return __uint_as_float(bits >> 31 ? bits & 0x7fffffffu : ~bits);
}
DEVICE bool finite(u64 key) {  // false for key 0
  const float v = value_of(key);
  return v - v == 0.0f;
}
DEVICE int column_of(u64 key) { return (int)(0xffffffffu - (u32)key); }

struct MaxKey {
  DEVICE u64 operator()(u64 a, u64 b) const { return a > b ? a : b; }
};
DEVICE u64 warp_max_key(u64 key) {
#pragma unroll
  for (int step = 16; step; step /= 2) key = MaxKey()(key, __shfl_xor_sync(FULL_MASK, key, step));
  return key;
}

#define LOGITS                                                                                 \
  const float *z, const i64 *positions, const u32 *suppressed, int columns, int ahead, float cap, \
      int each, int pitch
#define LOGITS_GIVEN {z, positions, suppressed, columns, ahead, cap, each, pitch}

// Largest bound that the `head` keys of at least k threads reach, by bisection over its bits; 0 if
// fewer than k threads have a key. Keys are unique, so exactly k threads reach a nonzero bound.
DEVICE u64 kth_bound(u64 head, int k) {
  u64 bound = 0;
  for (int bit = 63; bit >= 0; --bit) {
    const u64 more = bound | 1ull << bit;
    const int n = __syncthreads_count(head >= more);
    if (n >= k) bound = more;
    if (n == k) break;
  }
  return bound;
}

// Append all keys of the block (N per thread, 0: none) that may be among its k largest to `list`;
// return their number. The k-th largest of the threads' maxima is a lower bound. Only k threads
// hold keys above it, so the list has at most k N entries.
template <int N>
DEVICE int collect_candidates(const u64 (&keys)[N], int k, u64* list, int* count) {
  u64 head = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) head = MaxKey()(head, keys[i]);
  if (threadIdx.x == 0) *count = 0;
  const u64 bound = kth_bound(head, k), least = bound ? bound : 1;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (keys[i] >= least) list[atomicAdd(count, 1)] = keys[i];
  __syncthreads();
  return *count;
}

// Write the k largest of n keys to `out`, largest first. A key's rank is counted, so the order of
// `list` does not matter.
DEVICE void sort_top_k(const u64* list, int n, int k, u64* out) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    int above = 0;
#pragma unroll 8
    for (int j = 0; j < n; ++j) above += list[j] > list[i];
    if (above < k) out[above] = list[i];
  }
}
