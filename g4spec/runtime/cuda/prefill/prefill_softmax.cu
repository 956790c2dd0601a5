// Prefill attention around cuBLAS (GPUs without the sm_90a kernels): online softmax of score blocks
// [heads, rows, keys] between the GEMMs Q K^T and P V. Maximum and sum of a row are carried from
// one block of keys to the next.
#include "half_rows.cuh"
#include "math.cuh"
#include "reduce.cuh"

// Grid: (rows, KV heads), one block per row. Row r belongs to token r / group; token t sees the
// keys at positions t + offset - window + 1 .. t + offset. This block of keys has `keys` keys from
// position `first` on. scores and weights: [heads, rows, keys]. State: most, sum [heads, rows]; out
// [heads, rows, D], the accumulator, is rescaled where the maximum grows. `begin`: first block of
// keys, there is no state yet.
template <int D, int V>
__global__ void __launch_bounds__(32 * SOFTMAX_WARPS)
softmax(const float* scores, u16* weights, float* most, float* sum, float* out, int keys, int first,
        int offset, int window, int group, int begin) {
  __shared__ float slots[2][SOFTMAX_WARPS];
  const i64 row = (i64)blockIdx.y * gridDim.x + blockIdx.x;
  const int last = blockIdx.x / group + offset - first, least = last - window;  // (least, last]
  float4 v[V];
  float top = NEG_INF;
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const int i = (j * 32 * SOFTMAX_WARPS + threadIdx.x) * 4;
    v[j] = float4{NEG_INF, NEG_INF, NEG_INF, NEG_INF};
    if (i >= keys || i > last || i + 3 <= least) continue;
    v[j] = *(const float4*)(scores + row * keys + i);
    if (i <= least) v[j].x = NEG_INF;
    if (i + 1 <= least || i + 1 > last) v[j].y = NEG_INF;
    if (i + 2 <= least || i + 2 > last) v[j].z = NEG_INF;
    if (i + 3 > last) v[j].w = NEG_INF;
    top = fmaxf(top, fmaxf(fmaxf(v[j].x, v[j].y), fmaxf(v[j].z, v[j].w)));
  }
  top = block_reduce<SOFTMAX_WARPS>(top, slots[0], MaxNan());
  const float before = begin ? NEG_INF : most[row], now = fmaxf(before, top);
  const float base = now == NEG_INF ? 0.0f : now;
  float total = 0;
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const int i = (j * 32 * SOFTMAX_WARPS + threadIdx.x) * 4;
    const float4 p = {__expf(v[j].x - base), __expf(v[j].y - base), __expf(v[j].z - base),
                      __expf(v[j].w - base)};
    total += (p.x + p.y) + (p.z + p.w);
    if (i < keys)
      *(uint2*)(weights + row * keys + i) = {Half::pack(p.x, p.y), Half::pack(p.z, p.w)};
  }
  total = block_reduce<SOFTMAX_WARPS>(total, slots[1], Sum());
  const float shrink = before == NEG_INF ? 0.0f : __expf(before - base);
  if (threadIdx.x == 0) {
    most[row] = now;
    sum[row] = begin ? total : sum[row] * shrink + total;
  }
  if (begin || now == before) return;
  float4* o = (float4*)(out + row * D);
  for (int i = threadIdx.x; i < D / 4; i += 32 * SOFTMAX_WARPS) {
    const float4 x = o[i];
    o[i] = {x.x * shrink, x.y * shrink, x.z * shrink, x.w * shrink};
  }
}

// Divide out [heads, rows, D] by `sum` -> half [token][head][group][D]. Grid: (rows, heads).
template <int D>
__global__ void __launch_bounds__(D / 4)
normalize(const float* out, const float* sum, u16* to, int group) {
  const int t = blockIdx.x / group, g = blockIdx.x % group, heads = gridDim.y;
  const i64 row = (i64)blockIdx.y * gridDim.x + blockIdx.x;
  const float4 x = ((const float4*)(out + row * D))[threadIdx.x];
  const float s = 1.0f / sum[row];
  ((uint2*)(to + (((i64)t * heads + blockIdx.y) * group + g) * D))[threadIdx.x] = {
      Half::pack(x.x * s, x.y * s), Half::pack(x.z * s, x.w * s)};
}
