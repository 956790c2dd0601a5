// From the QKV projection to the inputs of attention: RMS norm per head, rotary embedding, queries
// to half precision, keys and values to the cache. One warp per head and token; a block handles
// HEADS_PER_BLOCK heads of one token and shares their cosines and sines.
#include "cache_types.cuh"
#include "kv_storage.cuh"

// A layer's cache, and the norm weight of its keys.
struct Layer {
  const float* k_norm;
  Plane keys, values;
  const int* table;
  i64 width, capacity;  // see `Units`; int64 as the host packs them
};

// Process one head of row blockIdx.y per warp. y [SLICES][rows][n_read heads][D]; the layer's heads
// begin at `first`.
template <int D, int PAIRS, int SLICES, int Q8, int ROTARY_PAIRS>
DEVICE void finish(const float* y, const float* q_norm, const Layer& layer, const float* freqs,
                   const i64* positions, const i64* slots, u16* q, int rows, int n_q, int n_kv,
                   int n_read, int first, int flags, float eps) {
  using H = HeadVector<D, PAIRS>;
  constexpr int PAIRS_PER_THREAD = (D / 2 + 32 * HEADS_PER_BLOCK - 1) / (32 * HEADS_PER_BLOCK);
  __shared__ float2 cos_sin[D / 2];
  const int row = blockIdx.y, head = blockIdx.x * HEADS_PER_BLOCK + threadIdx.x / 32,
            n = n_q + 2 * n_kv;
  const bool is_v = head >= n_q + n_kv;
  const int source = is_v && flags & V_FROM_K ? head - n_kv : head;
  const float* norm = head < n_q ? q_norm : is_v ? nullptr : layer.k_norm;
  float freq[PAIRS_PER_THREAD];
#pragma unroll
  for (int i = 0; i < PAIRS_PER_THREAD; ++i) {
    const int at = i * 32 * HEADS_PER_BLOCK + threadIdx.x;
    freq[i] = at < D / 2 ? freqs[at] : 0.0f;
  }
  const bool is_q = head < n_q;
  H weight, k_weight, x;
  if (norm) weight.load(norm);
  if (ROTARY_PAIRS && is_q) k_weight.load(layer.k_norm);
  const i64 position = __ldcg(positions + row);
  const Units units = {layer.table, (int)layer.width, (int)__ldcg(slots + row)};
  const int unit = n_kv ? units.unit_of((int)position) : 0;
#pragma unroll
  for (int i = 0; i < PAIRS_PER_THREAD; ++i) {
    const int at = i * 32 * HEADS_PER_BLOCK + threadIdx.x;
    if (at < D / 2) cos_sin[at] = cos_sin_of((float)position * freq[i]);
  }
  griddep_wait();
  if (head < n) x.template load<SLICES>(y, row, rows, n_read, first + source);
  __syncthreads();
  if (head >= n) return;
  x.finish(is_v && flags & NORM_V, norm, weight, !is_v, cos_sin, eps);
  if (is_q) {
    if (ROTARY_PAIRS) x.template scale<ROTARY_PAIRS>(k_weight);
    x.template store<0>(q + ((i64)row * n_q + head) * D);
    return;
  }
  const i64 at = (i64)(unit * n_kv + (head - n_q) % n_kv) * layer.capacity +
                 (u32)position % (u32)layer.capacity;
  if (is_v) layer.values.template append<Q8, 0>(x, at);
  else
    layer.keys.template append<Q8, ROTARY_PAIRS>(x, at);
}

// y [SLICES][rows][n_q + n_kv + n_kv heads][D] (Q, K, V; no V with V_FROM_K). Q and K are normed if
// their weight is not null, V if `flags` has NORM_V. q: half [rows, n_q, D]. ROTARY_PAIRS: the
// plane of keys stores that many columns of each half of a head; in the others the queries are
// multiplied by the weight of the keys' norm. 0: all columns are stored. `positions` and `slots`
// were written before the preceding kernel started.
template <int D, int PAIRS, int SLICES, int Q8, int ROTARY_PAIRS>
__global__ __launch_bounds__(32 * HEADS_PER_BLOCK, 4) void finish_heads(
    const float* y, const float* q_norm, const float* k_norm, const float* freqs,
    const i64* positions, const i64* slots, u16* q, void* keys, void* values, u16* key_scales,
    u16* value_scales, const int* table, int rows, int n_q, int n_kv, int flags, int width,
    int capacity, float eps) {
  griddep_launch_dependents();
  const Layer layer = {k_norm, {keys, key_scales}, {values, value_scales}, table, width, capacity};
  const int n_read = n_q + (flags & V_FROM_K ? n_kv : 2 * n_kv);
  finish<D, PAIRS, SLICES, Q8, ROTARY_PAIRS>(y, q_norm, layer, freqs, positions, slots, q, rows,
                                             n_q, n_kv, n_read, 0, flags, eps);
}

// Append keys and values of several layers: y [rows][layers][n_kv + n_kv heads][D]. blockIdx.z is
// the layer.
template <int D, int Q8>
__global__ __launch_bounds__(32 * HEADS_PER_BLOCK, 4) void append_layers(
    const float* y, const Layer* layers, const float* freqs, const i64* positions,
    const i64* slots, int rows, int n_kv, int flags, float eps) {
  griddep_launch_dependents();
  const Layer layer = layers[blockIdx.z];
  finish<D, 0, 1, Q8, 0>(y, nullptr, layer, freqs, positions, slots, nullptr, rows, 0, n_kv,
                         gridDim.z * 2 * n_kv, blockIdx.z * 2 * n_kv, flags, eps);
}
