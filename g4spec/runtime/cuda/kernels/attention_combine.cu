// Attention, second phase: a row's chunks added in their order (first phase: attention.cu).
#include "chunks.cuh"

// Where value k of 64 of a token stands among the halves that a product reads.
template <int TILES>
DEVICE int place_in_rows(int token, int k) {
  const int k16 = k / 16, lane = token % 8 * 4 + k % 16 / 4;
  return TILES == 1 ? (k16 / 2 * 32 + lane) * 8 + k16 % 2 * 4 + k % 4
                    : (k16 * 32 + lane) * 8 + token / 8 * 4 + k % 4;
}

// A lane's values 2 lane, 2 lane + 1 of 64, rounded, and the sums that go with them.
template <int TILES>
DEVICE void store_rows(char* block, int token, float x, float y) {
  const int lane = threadIdx.x % 32;
  const u32 halves = pack_halves(x, y);
  *(u32*)(block + place_in_rows<TILES>(token, lane * 2) * 2) = halves;
  float sum = from_half((u16)halves) + from_half((u16)(halves >> 16));
#pragma unroll
  for (int step = 1; step < 8; step *= 2) sum += __shfl_xor_sync(FULL, sum, step);
  sum *= -1024.0f;
  const float both = sum + __shfl_xor_sync(FULL, sum, 8);
  if (lane % 8 == 0) ((float*)(block + 1024 * TILES))[lane / 8 * 8 * TILES + token] = sum;
  if (lane % 16 == 0) ((float*)(block + 1152 * TILES))[lane / 16 * 8 * TILES + token] = both;
}

// The row's largest score and its sum of weights. Lane l adds chunks l, l + 32, ... in order.
DEVICE float2 total(const float2* tops, i64 stride, int from, int to) {
  const int lane = threadIdx.x % 32;
  float top = NEVER, sum = 0;
  for (int c = (from & ~31) + lane; c <= to; c += 32)
    if (c >= from) top = fmaxf(top, __ldcg(tops + (c - from) * stride).x);
#pragma unroll
  for (int step = 16; step; step /= 2) top = fmaxf(top, __shfl_xor_sync(FULL, top, step));
  for (int c = (from & ~31) + lane; c <= to; c += 32)
    if (c >= from) {
      const float2 x = __ldcg(tops + (c - from) * stride);
      sum = fmaf(exp2_fast(__fsub_rn(x.x, top)), x.y, sum);
    }
#pragma unroll
  for (int step = 16; step; step /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(FULL, sum, step));
  return {top, sum};
}

// A warp has 64 values of a token, or a share of their chunks: SHARE warps take chunks c with
// c % SHARE = 0, 1, ..., and their sums are added in this order. TILES: token tiles of 8 of `rows`.
template <int D, int TILES, int SHARE>
__global__ __launch_bounds__(256) void combine_chunks(
    const float* sums, const float2* tops, const i64* first, const i64* last, float* out,
    char* rows, int tokens, int n_kv, int group, int unit, int growing) {
  grid_launch();
  grid_wait();
  __shared__ float2 shares[SHARE > 1 ? 8 : 1][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int width = n_kv * group * D / 64;  // blocks of 64 of a token
  const int index = blockIdx.x * (8 / SHARE) + warp / SHARE;
  const int token = index / width, block = index % width;
  if (token >= 8 * TILES) return;
  float x = 0, y = 0;
  if (token < tokens) {
    const Chunks chunks = {unit, growing};
    const int low = chunks.of(span_of(first, last, tokens).lo);
    const int from = chunks.of((int)__ldcg(first + token)), to = chunks.of((int)__ldcg(last + token));
    const int head = block * 64 / D, row = token * group + head % group;
    const i64 stride = (i64)n_kv * tokens * group;
    const i64 place = (from - low) * stride + (i64)head / group * tokens * group + row;
    const float2 all = total(tops + place, stride, from, to);
    const float2* sum = (const float2*)(sums + place * D + block * 64 % D) + lane;
    const int skip = (warp % SHARE - from % SHARE + SHARE) % SHARE;
#pragma unroll 4
    for (int c = skip; c <= to - from; c += SHARE) {
      const float weight = exp2_fast(__fsub_rn(__ldcg(tops + place + c * stride).x, all.x));
      const float2 part = __ldcg(sum + c * stride * (D / 2));
      x = fmaf(weight, part.x, x);
      y = fmaf(weight, part.y, y);
    }
    if (SHARE > 1) {
      shares[warp][lane] = {x, y};
      __syncthreads();
      if (warp % SHARE) return;
      for (int i = 1; i < SHARE; ++i) {
        x = __fadd_rn(x, shares[warp + i][lane].x);
        y = __fadd_rn(y, shares[warp + i][lane].y);
      }
    }
    x = __fdiv_rn(x, all.y), y = __fdiv_rn(y, all.y);
    *(float2*)(out + ((i64)token * width + block) * 64 + lane * 2) = {x, y};
  }
  if (warp % SHARE == 0) store_rows<TILES>(rows + (i64)block * 1216 * TILES, token, x, y);
}
