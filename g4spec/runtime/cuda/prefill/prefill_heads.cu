// Prefill: queries, keys and values of a chunk are normed, rotated, appended to the cache
// (g4spec/runtime/cuda/cache/cuda_kv.py), and written to the buffers that prefill attention reads,
// together with cached rows of earlier chunks. Keys and values are rounded as the cache stores
// them, so attention sees the same numbers whether a row is in the current chunk or an earlier one.
// One warp per row and head.
#include "cache_types.cuh"

template <class Layout, int D>
DEVICE void store_key(u16* keys, int head, i64 capacity, int row, const HeadRow<D>& x) {
#pragma unroll
  for (int h = 0; h < 2; ++h)
    if (Layout::stores_key(x.at(h)))
      pack_row(keys + Layout::key(head, capacity, row, x.at(h)), x.x[h]);
}
template <class Layout, int D>
DEVICE void store_value(u16* values, int head, i64 capacity, int row, const HeadRow<D>& x) {
#pragma unroll
  for (int h = 0; h < 2; ++h)
    pack_row(values + Layout::value(head, capacity, row, x.at(h)), x.x[h]);
}

// Row index of a position in a cache plane: in the page `pages[position / PAGE]`, or in the ring of
// a slot.
struct CacheRows {
  const i32* pages;
  int slot, n_kv, capacity;

  DEVICE i64 at(int kv, int position) const {
    if (pages) return ((i64)pages[position / PAGE] * n_kv + kv) * PAGE + position % PAGE;
    return ((i64)slot * n_kv + kv) * capacity + position % capacity;
  }
};

// Complete a key of which the cache stores only the rotated columns: the others are those of the
// value, times the weight of the keys' norm.
template <int ROTARY_PAIRS, int D>
DEVICE void complete_key(HeadRow<D>& key, const HeadRow<D>& value, const float* k_norm) {
  if (!ROTARY_PAIRS || key.template stored<ROTARY_PAIRS>()) return;
  key = value.times(1.0f, k_norm);
}

// qkv [T, columns]: query heads, key heads, value heads (`own_values`; otherwise values are the keys
// before their norm). Grid: (T, y); the warps of a row's blocks share its heads.
//
// queries: [KV head][row * group + query head of the group], `query_rows` rows per KV head. `fold`:
// weights that queries are multiplied by in columns of K that the layout does not store, or null. keys,
// values: `rows` rows per head, this chunk from row `first` on, rounded as the cache stores them.
// cos_sin [T, rotated]: {cos, sin}. The cache takes rows before `count` that still fit into a ring; of keys the
// columns of ROTARY_PAIRS.
template <int D, class Q, class KV, template <int> class CacheKind, int ROTARY_PAIRS>
__global__ void __launch_bounds__(32 * PREFILL_HEAD_WARPS)
heads(const u16* qkv, int columns, int n_head, int n_kv, int own_values, const float* q_norm,
      const float* k_norm, const float* fold, const float2* cos_sin, int rotated, u16* queries,
      int query_rows, u16* keys, u16* values, int rows, int first, void* cache_keys,
      void* cache_values, u16* key_scales, u16* value_scales, const i32* pages, int slot,
      int capacity, int start, int count, float eps) {
  const int t = blockIdx.x, group = n_head / n_kv;
  const int total = n_head + (columns / D - n_head) / (own_values ? 2 : 1);
  cos_sin += (i64)t * rotated;
  for (int head = blockIdx.y * PREFILL_HEAD_WARPS + threadIdx.x / 32; head < total;
       head += gridDim.y * PREFILL_HEAD_WARPS) {
    HeadRow<D> x;
    x.load(qkv + (i64)t * columns + head * D);
    if (head < n_head) {
      auto q = x.times(x.inverse_rms(eps), q_norm);
      q.rotate(cos_sin, rotated);
      if (fold) {
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int e = 0; e < q.V; ++e)
            if (!KV::stores_key(q.at(h))) q.x[h][e] *= fold[q.at(h) + e];
      }
      store_key<Q>(queries, head / group, query_rows, t * group + head % group, q);
      continue;
    }
    const int kv = head - n_head;
    const bool stays = t < count && (pages || t >= count - capacity);
    const i64 row = stays ? CacheRows{pages, slot, n_kv, capacity}.at(kv, start + t) : -1;
    auto k = x.times(x.inverse_rms(eps), k_norm);
    k.rotate(cos_sin, rotated);
    if (own_values) x.load(qkv + (i64)t * columns + (head + n_kv) * D);
    auto v = x.times(x.inverse_rms(eps), nullptr);
    CacheKind<D>::template write<0>((u8*)cache_values, value_scales, row, v);
    CacheKind<D>::template write<ROTARY_PAIRS>((u8*)cache_keys, key_scales, row, k);
    complete_key<ROTARY_PAIRS>(k, v, k_norm);
    store_key<KV>(keys, kv, rows, first + t, k);
    store_value<KV>(values, kv, rows, first + t, v);
  }
}

// Copy rows of the cache from position `first` on to rows 0 ... of `keys` and `values`. Rows before
// position `visible`, which no token of the chunk sees, become zeros. Grid: (rows, y); the warps of a
// row's blocks share the KV heads. `k_norm`: weight of the keys' norm.
template <int D, class KV, template <int> class CacheKind, int ROTARY_PAIRS>
__global__ void __launch_bounds__(32 * PREFILL_HEAD_WARPS)
earlier(const void* cache_keys, const void* cache_values, const u16* key_scales,
        const u16* value_scales, const i32* pages, int slot, int capacity, int first, int visible,
        u16* keys, u16* values, int rows, int n_kv, const float* k_norm) {
  const int row = blockIdx.x;
  for (int kv = blockIdx.y * PREFILL_HEAD_WARPS + threadIdx.x / 32; kv < n_kv;
       kv += gridDim.y * PREFILL_HEAD_WARPS) {
    HeadRow<D> k{}, v{};
    if (first + row >= visible) {
      const i64 at = CacheRows{pages, slot, n_kv, capacity}.at(kv, first + row);
      CacheKind<D>::template read<0>(v, (const u8*)cache_values, value_scales, at);
      CacheKind<D>::template read<ROTARY_PAIRS>(k, (const u8*)cache_keys, key_scales, at);
      complete_key<ROTARY_PAIRS>(k, v, k_norm);
    }
    store_key<KV>(keys, kv, rows, row, k);
    store_value<KV>(values, kv, rows, row, v);
  }
}
