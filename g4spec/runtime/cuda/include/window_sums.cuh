// The sums of attention_window.cu: weighted sums of a tile's values, partial results of chunks in
// global memory, and the packed output rows.
#pragma once
#include "packed_rows.cuh"
#include "window_tiles.cuh"

#if ARCH >= 800
// Weighted sums of values: WARP_DIMS columns of all rows.
template <class W>
using ValueSums = float[W::WARP_DIMS / 16][W::ROW_TILES][4];

// Four columns of row 8 n + 2 t + c in lane 4 g + t: columns 4 g .. 4 g + 3 of each 32.
template <class W>
DEVICE float4 quad_of(const ValueSums<W>& x, int block, int n, int c) {
  return {x[2 * block][n][c], x[2 * block][n][c + 2], x[2 * block + 1][n][c],
          x[2 * block + 1][n][c + 2]};
}

// Add the values of a tile, weighted, and store the sums of the weights to shared memory.
template <class W, int ROW_TILES>
DEVICE void add_values(ValueSums<W>& out, char* shared, const BlockWork& p, int tile, int warp) {
  const int lane = threadIdx.x % 32;
  float sums[W::ROW_TILES] = {};
  accumulate_values<W, ROW_TILES>(out, sums, tile_at<W>(shared, p, false, tile),
                                  (const uint2*)(shared + W::P_AT + tile * W::P_SIZE), 0, warp);
  float* weights = (float*)(shared + W::SUMS_AT) + (tile * W::TILE_WARPS + warp) * W::ROWS;
#pragma unroll
  for (int n = 0; n < ROW_TILES; ++n) {
    float x = __fadd_rn(sums[n], __shfl_xor_sync(FULL_MASK, sums[n], 1));
    x = __fadd_rn(x, __shfl_xor_sync(FULL_MASK, x, 2));
    if (lane % 4 == 0) weights[n * 8 + lane / 4] = x;
  }
}

// Store the weighted sums of a tile's values to shared memory, over its keys.
template <class W, int ROW_TILES>
DEVICE void sum_values(char* shared, const BlockWork& p, int tile, int warp) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  ValueSums<W> out = {};
  add_values<W, ROW_TILES>(out, shared, p, tile, warp);
  float* to = tile_sums<W>(shared, tile) + warp * 32 + g * 4;
#pragma unroll
  for (int n = 0; n < ROW_TILES; ++n)
#pragma unroll
    for (int c = 0; c < 2; ++c)
      *(float4*)(to + (n * 8 + t * 2 + c) * SUM_PITCH) = quad_of<W>(out, 0, n, c);
}

// Four output values of a row before normalization, summed over tiles (with two slots as
// `store_chunk` stored them); and the row's sum of weights.
template <class W>
DEVICE float4 row_values(char* shared, const BlockWork& p, int row, int quad) {
  float4 v = {0, 0, 0, 0};
#pragma unroll
  for (int tile = 0; tile < (W::TWO_SLOTS ? 1 : W::TILES); ++tile)
    if (W::TWO_SLOTS || p.tile_visible(tile))
      v = add4(v, *(const float4*)(tile_sums<W>(shared, tile) + row * SUM_PITCH + quad * 4));
  return v;
}
template <class W>  // called by a whole warp
DEVICE float row_weight_sum(const char* shared, const Chunk& p, int row) {
  const int lane = threadIdx.x % 32;
  const float* sums = (const float*)(shared + W::SUMS_AT) + row;
  return warp_reduce(p.tile_visible(lane / W::TILE_WARPS) ? sums[lane * W::ROWS] : 0.0f, Sum());
}

// The same from the partial results of all chunks that a row sees, added in order of the chunks.
template <class W>
DEVICE float4 combine_chunks_of_row(const char* shared, const Args& a, const BlockWork& p, int row,
                                    int quad, float& total) {
  const int2 sees = ((const int2*)(shared + W::VISIBLE_AT))[row];
  const int low = p.span.lo / W::CHUNK, from = sees.x / W::CHUNK, to = sees.y / W::CHUNK;
  const int stride = p.stride(), place = p.place(from - low) + row;
  float2 tops[W::MAX_CHUNKS];
  float4 parts[W::MAX_CHUNKS], v = {0, 0, 0, 0};
  float top = NEG_INF;
#pragma unroll
  for (int c = 0; c < W::MAX_CHUNKS; ++c) {
    tops[c] = {NEG_INF, 0}, parts[c] = {0, 0, 0, 0};
    if (from + c > to) continue;
    tops[c] = __ldcg((const float2*)a.tops + place + c * stride);
    parts[c] = __ldcg((const float4*)a.sums + (i64)(place + c * stride) * (D / 4) + quad);
  }
#pragma unroll
  for (int c = 0; c < W::MAX_CHUNKS; ++c) top = fmaxf(top, tops[c].x);
  total = 0;
#pragma unroll
  for (int c = 0; c < W::MAX_CHUNKS; ++c) {
    const float weight = exp2_approx(__fsub_rn(tops[c].x, top));
    total = fmaf(weight, tops[c].y, total);
    v = {fmaf(weight, parts[c].x, v.x), fmaf(weight, parts[c].y, v.y),
         fmaf(weight, parts[c].z, v.z), fmaf(weight, parts[c].w, v.w)};
  }
  return v;
}

// A thread handles four columns (`quad`) of every STEP-th row.
template <class W>
struct Columns {
  static constexpr int STEP = W::THREADS / (D / 4);
  int row = threadIdx.x / (D / 4), quad = threadIdx.x % (D / 4);
};

// Store the current chunk's partial results, which `sum_values` left in shared memory.
template <class W>
DEVICE void store_partial(char* shared, const Args& a, const BlockWork& p) {
  const Columns<W> c;
#pragma unroll 1
  for (int row = c.row; row < 2 * p.n_tokens; row += c.STEP) {
    const i64 place = p.place(p.slot) + row;
    const float weight = row_weight_sum<W>(shared, p, row);
    __stcg((float4*)a.sums + place * (D / 4) + c.quad,
           row_values<W>(shared, p, row, c.quad));
    if (c.quad == 0)
      __stcg((float2*)a.tops + place, float2{((const float*)(shared + W::TOP_AT))[row], weight});
  }
}

// With two slots: store the chunk's sums, which all warps have in registers, to the partial results, or to
// slot 0 for `row_values` if it is the only chunk (all copies have arrived).
template <class W>
DEVICE void store_chunk(char* shared, const Args& a, const BlockWork& p, const ValueSums<W>& sums) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const i64 place = p.place(p.slot);
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const int row = lane % 4 * 2 + c;
    if (row >= 2 * p.n_tokens) continue;
#pragma unroll
    for (int block = 0; block < W::WARP_DIMS / 32; ++block) {
      const int column = warp * W::WARP_DIMS + block * 32 + lane / 4 * 4;
      const float4 v = quad_of<W>(sums, block, 0, c);
      if (p.chunks > 1)
        __stcg((float4*)(a.sums + (place + row) * D + column), v);
      else
        *(float4*)(tile_sums<W>(shared, 0) + row * SUM_PITCH + column) = v;
    }
  }
  if (p.chunks == 1) {
    __syncthreads();
    return;
  }
  for (int row = warp; row < 2 * p.n_tokens; row += W::WARPS) {
    const float weight = row_weight_sum<W>(shared, p, row);
    if (lane == 0)
      __stcg((float2*)a.tops + place + row,
             float2{((const float*)(shared + W::TOP_AT))[row], weight});
  }
}

// True in the block that arrives last among those with the same tokens and head.
DEVICE bool is_last_block(const Args& a, const BlockWork& p) {
  __shared__ bool last;
  __syncthreads();
  const int blocks = min_of(p.chunks, p.slot_stride);
  if (blocks == 1) return true;
  if (threadIdx.x == 0) {
    last = atomic_add_acq_rel(a.arrived + p.block(), 1) == blocks - 1;
    if (last) a.arrived[p.block()] = 0;
  }
  __syncthreads();
  return last;
}

template <class W>
DEVICE void write(char* shared, const Args& a, const BlockWork& p) {
  const Columns<W> c;
  const int column = (p.head * 2 + c.row % 2) * (D / 4) + c.quad, blocks = a.n_kv * 2 * D / 64;
  const RowGroup last(a.count - 1, a.count);  // the last sequence also writes the zero padding rows
  const int end = a.row + a.tokens < a.count ? a.tokens : last.index * 16 + 8 * last.tiles - a.row;
#pragma unroll 1
  for (int row = c.row; row < p.rows(); row += c.STEP)
    for (int token = p.first_token + row / 2; token < end; token += p.groups() * p.rows() / 2) {
      float4 v = {0, 0, 0, 0};
      if (token < a.tokens) {
        float total;
        if (p.chunks > 1)
          v = combine_chunks_of_row<W>(shared, a, p, row, c.quad, total);
        else
          v = row_values<W>(shared, p, row, c.quad), total = row_weight_sum<W>(shared, p, row);
        v = mul4(v, rcp_approx(total));
      }
      const RowGroup own(a.row + token, a.count);
      QuadOffsets(own.tiles, own.row, column, own.swizzled ? blocks : 0)
          .store(own.start_of(a.rows, blocks), v, true, own.swizzled);
    }
}
#endif
