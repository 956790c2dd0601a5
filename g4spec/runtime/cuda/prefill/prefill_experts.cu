// Prefill MoE routing: choose experts for each row, sort the (row, expert) visits by expert, and
// gather rows in that order for grouped GEMMs.
#include "math.cuh"

constexpr u32 NONE = 0;

// Integer key that orders (score, id) pairs by score; among equal scores the lower id has the
// larger key.
DEVICE u64 sort_key(float x, int id) {
  return (u64)float_to_ordered(x) << 32 | (0xffffffffu - id);
}

// Scores [T, E] -> ids and weights [T, K], best first; one warp per row. Weights: softmax over the
// K best, times `gains` [E].
template <int E, int K>
__global__ void __launch_bounds__(32 * ROUTE_WARPS)
route(const float* scores, const float* gains, i32* ids, float* weights, int tokens) {
  constexpr int V = (E + 31) / 32;
  const int t = blockIdx.x * ROUTE_WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (t >= tokens) return;
  u64 mine[V];
#pragma unroll
  for (int i = 0; i < V; ++i)
    mine[i] =
        i * 32 + lane < E ? sort_key(scores[(i64)t * E + i * 32 + lane], i * 32 + lane) : NONE;
  float best = 0, sum = 0, weight[K];
  int chosen[K];
#pragma unroll
  for (int k = 0; k < K; ++k) {
    u64 top = mine[0];
#pragma unroll
    for (int i = 1; i < V; ++i) top = mine[i] > top ? mine[i] : top;
#pragma unroll
    for (int step = 16; step; step /= 2) {
      const u64 other = __shfl_xor_sync(FULL_MASK, top, step);
      top = other > top ? other : top;
    }
#pragma unroll
    for (int i = 0; i < V; ++i) mine[i] = mine[i] == top ? NONE : mine[i];
    chosen[k] = (int)(0xffffffffu - (u32)top);
    const float score = scores[(i64)t * E + chosen[k]];
    if (k == 0) best = score;
    weight[k] = expf(score - best);
    sum += weight[k];
  }
  if (lane) return;
#pragma unroll
  for (int k = 0; k < K; ++k) {
    ids[(i64)t * K + k] = chosen[k];
    weights[(i64)t * K + k] = weight[k] / sum * gains[chosen[k]];
  }
}

// Counting sort of n visits by expert, then token; one block per expert. places[i]: sorted position
// of visit i; visits: the inverse; ends[e]: end of expert e's range.
__global__ void __launch_bounds__(ORDER_THREADS)
order(const i32* ids, i32* places, i32* visits, i32* ends, int n) {
  __shared__ int below, counts[ORDER_THREADS / 32];
  const int expert = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (threadIdx.x == 0) below = 0;
  __syncthreads();
  int less = 0;
  for (int i = threadIdx.x; i < n; i += ORDER_THREADS) less += ids[i] < expert;
#pragma unroll
  for (int step = 16; step; step /= 2) less += __shfl_xor_sync(FULL_MASK, less, step);
  if (lane == 0) atomicAdd(&below, less);
  __syncthreads();
  int at = below;
  for (int i = threadIdx.x; i - (int)threadIdx.x < n; i += ORDER_THREADS) {
    const bool mine = i < n && ids[i] == expert;
    const u32 votes = __ballot_sync(FULL_MASK, mine);
    if (lane == 0) counts[warp] = __popc(votes);
    __syncthreads();
    int before = 0, all = 0;
#pragma unroll
    for (int w = 0; w < ORDER_THREADS / 32; ++w)
      before += w < warp ? counts[w] : 0, all += counts[w];
    if (mine) {
      const int place = at + before + __popc(votes & ((1u << lane) - 1));
      places[i] = place;
      visits[place] = i;
    }
    at += all;
    __syncthreads();
  }
  if (threadIdx.x == 0) ends[expert] = at;
}

// Copy row visits[i] / k of x (16-bit floats [T, H]) to row i of `to`.
template <int H>
__global__ void __launch_bounds__(GATHER_THREADS)
gather(const u16* x, const i32* visits, u16* to, int k) {
  const u32* from = (const u32*)(x + (i64)(visits[blockIdx.x] / k) * H);
  u32* row = (u32*)(to + (i64)blockIdx.x * H);
  if constexpr (H % 8 == 0) {
    for (int i = threadIdx.x; i < H / 8; i += GATHER_THREADS)
      ((uint4*)row)[i] = ((const uint4*)from)[i];
  } else {
    for (int i = threadIdx.x; i < H / 2; i += GATHER_THREADS) row[i] = from[i];
  }
}
