// Decode attention, phase 2: combine the partial results of a row's chunks (attention.cu) in their
// order, and store the result as packed activations for the output projection. A warp combines 64
// values of a row, in large steps 128 or 256; each lane holds two of each 64. Where few rows have many
// chunks, 8 warps combine 64 values.
#include "attention_chunks.cuh"
#include "packed_rows.cuh"

// Store values 2 lane, 2 lane + 1 of a block of 64 as halves, and the block's sums, in packed
// layout (packed_rows.cuh): block `block` of `blocks`, row `row` of the group that begins at
// `rows`.
DEVICE void store_packed_block(u8* rows, const RowGroup& own, int row, int blocks, int block,
                               float x, float y) {
  const int lane = threadIdx.x % 32, k16 = lane / 8, t = lane % 8 / 2, odd = lane % 2;
  const u32 halves = pack_half2(x, y);
  u8* to = own.swizzled ? rows : rows + block * own.tiles * ACT_BYTES;
  const u32 at = own.swizzled     ? swizzled_word_offset(blocks, block, row, 2 * k16 + odd, t)
                 : own.tiles == 1 ? (k16 / 2 * 32 + row * 4 + t) * 16 + k16 % 2 * 8 + odd * 4
                                  : (k16 * 32 + row % 8 * 4 + t) * 16 + row / 8 * 8 + odd * 4;
  *(u32*)(to + at) = halves;
  float sum = from_half((u16)halves) + from_half((u16)(halves >> 16));
#pragma unroll
  for (int step = 1; step < 8; step *= 2) sum += __shfl_xor_sync(FULL_MASK, sum, step);
  const float next16 = __shfl_xor_sync(FULL_MASK, sum, 8), sum32 = sum + next16;
  const float next32 = __shfl_xor_sync(FULL_MASK, sum32, 16);
  const SumOffsets place = own.swizzled ? SumOffsets(blocks, block, row, lane / 16)
                                        : SumOffsets(own.tiles, row, lane / 16);
  if (lane % 16 == 0) place.store32(to, sum, next16);
  if (lane == 0) place.store64(to, sum32, next32);
}

constexpr int MAX_CHUNK_SEGMENTS = MAX_ROW_CHUNKS / 32;  // a lane handles one chunk of each

// Combines chunks from .. to of a row, for 64 of its values; partial results of consecutive chunks
// are `stride` rows apart. Chunks with equal c % 8 are summed separately, by one warp for all
// (WARPS = 1) or by one warp each (WARPS = 8), so both instances add in the same order.
template <int D, int WARPS>
struct RowChunks {
  static constexpr int SUMS_PER_WARP = COMBINE_WARPS / WARPS;  // values of k
  const float* tops;
  const float* sums;
  i64 stride;
  int from, to, k;

  // Chunk of partial result j of a batch of eight: base + j, or base + 8 j + k.
  DEVICE int chunk(int base, int j) const { return WARPS == 1 ? base + j : base + 8 * j + k; }
  DEVICE void read(float2 (&part)[8], int base) const {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int c = chunk(base, j);
      part[j] = {0, 0};
      if (c >= from && c <= to)
        part[j] = __ldcg((const float2*)(sums + (c - from) * stride * D) + threadIdx.x % 32);
    }
  }
  DEVICE void add(float2 (&sum)[SUMS_PER_WARP], const float2 (&part)[8], const float* weights,
                  int base) const {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int c = chunk(base, j);
      const float weight = c >= from && c <= to ? weights[c - (from & ~31)] : 0.0f;
      float2& s = sum[WARPS == 1 ? j : 0];
      s = {fmaf(weight, part[j].x, s.x), fmaf(weight, part[j].y, s.y)};
    }
  }
  // Store the weights of chunks from & ~31 on; return the sum of weights of all. Lane l handles
  // chunks l, l + 32, ...
  DEVICE float chunk_weights(float* weights) const {
    const int lane = threadIdx.x % 32, base = from & ~31;
    float2 mine[MAX_CHUNK_SEGMENTS];
    float top = NEG_INF, sum = 0;
#pragma unroll
    for (int i = 0; i < MAX_CHUNK_SEGMENTS; ++i) {
      const int c = base + i * 32 + lane;
      mine[i] = {NEG_INF, 0};
      if (c >= from && c <= to) mine[i] = __ldcg((const float2*)tops + (c - from) * stride);
      top = fmaxf(top, mine[i].x);
    }
#pragma unroll
    for (int step = 16; step; step /= 2) top = fmaxf(top, __shfl_xor_sync(FULL_MASK, top, step));
#pragma unroll
    for (int i = 0; i < MAX_CHUNK_SEGMENTS; ++i) {
      if (base + i * 32 > to) break;
      const float weight = exp2_approx(__fsub_rn(mine[i].x, top));
      weights[i * 32 + lane] = weight;
      sum = fmaf(weight, mine[i].y, sum);
    }
#pragma unroll
    for (int step = 16; step; step /= 2)
      sum = __fadd_rn(sum, __shfl_xor_sync(FULL_MASK, sum, step));
    __syncwarp();
    return sum;
  }
  // The sum of all chunks, divided by `total`, that of their weights. `part`: the first batch.
  DEVICE float2 quotient(float2 (&part)[8], const float* weights, float total,
                         float2* shares) const {
    constexpr int STEP = WARPS == 1 ? 8 : 64;
    float2 sum[SUMS_PER_WARP] = {};
    int base = from & ~7;
    while (true) {
      add(sum, part, weights, base);
      base += STEP;
      if (base > to) break;
      read(part, base);
    }
    if constexpr (WARPS == 1) {
#pragma unroll
      for (int j = 1; j < 8; ++j)
        sum[0] = {__fadd_rn(sum[0].x, sum[j].x), __fadd_rn(sum[0].y, sum[j].y)};
    } else {
      const int lane = threadIdx.x % 32;
      shares[k * 32 + lane] = sum[0];
      __syncthreads();
      sum[0] = shares[lane];
      for (int j = 1; j < 8; ++j) {
        const float2 x = shares[j * 32 + lane];
        sum[0] = {__fadd_rn(sum[0].x, x.x), __fadd_rn(sum[0].y, x.y)};
      }
    }
    return {__fdiv_rn(sum[0].x, total), __fdiv_rn(sum[0].y, total)};
  }
  // Call `store` with each of BLOCKS adjacent blocks of 64 values, the first at `sums`.
  template <int BLOCKS, class Store>
  DEVICE void combine(float* weights, float2* shares, Store store) {
    if (WARPS == 1 && from == to) {  // the only chunk has weight 1; the sum of zeros is not negative
      const float total = __ldcg(tops + 1);
      float2 x[BLOCKS];
#pragma unroll
      for (int i = 0; i < BLOCKS; ++i)
        x[i] = __ldcg((const float2*)sums + i * 32 + threadIdx.x % 32);
#pragma unroll
      for (int i = 0; i < BLOCKS; ++i)
        store(i, float2{__fdiv_rn(__fadd_rn(x[i].x, 0.0f), total),
                        __fdiv_rn(__fadd_rn(x[i].y, 0.0f), total)});
      return;
    }
    float2 part[8];
    read(part, from & ~7);  // these loads overlap with those of chunk_weights()
    const float total = chunk_weights(weights);
#pragma unroll 1
    for (int i = 0; i < BLOCKS; ++i) {
      if (i) sums += 64, read(part, from & ~7);
      store(i, quotient(part, weights, total, shares));
    }
  }
};

// `count` rows of sequences of `tokens` rows each; also zeroes the padding rows of the last tile.
// WARPS: warps for each block of 64 values; BLOCKS: blocks of a warp. `out`: gets the values in float32,
// or null. `room`: as in attention.cu.
template <int D, int WARPS, int BLOCKS>
__global__ __launch_bounds__(32 * COMBINE_WARPS, ARCH < 1000 ? 4 : 3) void combine_chunks(
    const float* sums, const float* tops, const i64* first, const i64* last, float* out, u8* rows,
    int count, int tokens, int n_kv, int group, int room, int shift, int growing) {
  static_assert(D % (64 * BLOCKS) == 0 && (WARPS == 1 || BLOCKS == 1), "blocks are of one head");
  griddep_launch_dependents();
  __shared__ float weights[COMBINE_WARPS][MAX_ROW_CHUNKS];
  __shared__ float2 shares[COMBINE_WARPS * 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int width = n_kv * group * D / 64;  // blocks of 64 of a row
  const int index = blockIdx.x * (COMBINE_WARPS / WARPS) + warp / WARPS;
  const int row = (u32)index / (u32)(width / BLOCKS), block = index * BLOCKS - row * width;
  const int sequence = (u32)min_of(row, count - 1) / (u32)tokens, start = sequence * tokens;
  const int token = min_of(row, count - 1) - start;
  const int first_seen = (int)__ldcg(first + start + token);
  const int last_seen = (int)__ldcg(last + start + token);
  const Chunks chunks = {shift, growing};
  const int lowest = tokens == 1 ? first_seen : span_of(first + start, last + start, tokens).lo;
  const int low = chunks.chunk_of(lowest);
  const int from = chunks.chunk_of(first_seen), to = chunks.chunk_of(last_seen);
  griddep_wait();
  if (row >= count) return;
  const int head = block * 64 / D, pairs = tokens * group;
  const i64 stride = (i64)n_kv * pairs;
  const i64 place = ((i64)sequence * room + from - low) * stride + (i64)(head / group) * pairs +
                    token * group + head % group;
  RowChunks<D, WARPS> parts = {
      tops + place * 2, sums + place * D + block * 64 % D, stride, from, to, warp};
  const RowGroup own(row, count);
  u8* mine = own.start_of(rows, width);
  parts.template combine<BLOCKS>(weights[warp], shares, [&](int i, float2 x) {
    if (warp % WARPS) return;
    if (out) *(float2*)(out + ((i64)row * width + block + i) * 64 + lane * 2) = x;
    store_packed_block(mine, own, own.row, width, block + i, x.x, x.y);
  });
  if (warp % WARPS) return;
  for (int padding = own.row + own.count; padding < 8 * own.tiles; padding += own.count)
#pragma unroll 1
    for (int i = 0; i < BLOCKS; ++i) store_packed_block(mine, own, padding, width, block + i, 0, 0);
}
