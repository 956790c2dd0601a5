// Sliding-window attention of a decode step in one kernel, from the QKV projection to the packed
// input of the output projection. Heads of 256, two query heads per KV head, Q8_0 cache.
//
// Thread mapping: a block has WINDOW_WARPS warps or fewer, one KV head, four or eight tokens of a
// sequence, and some of the chunks (CHUNK positions) that they see, the newest first. Steps:
//   1. copy keys and values of earlier steps to shared memory, those of the first chunk before the
//      preceding kernel has ended;
//   2. one warp per vector: norm and rotation (head_vector.cuh). Queries go to shared memory. So do the
//      step's keys and values; the block that owns the token also writes them to the cache;
//   3. scores, weights, weighted sums. If the tokens see several chunks, partial results go to global
//      memory, and the last block to arrive combines them in the order of the chunks.
// Row r of the 8-wide MMA operand is token r / 2 of the block, query head r % 2.
//
// With half or a quarter of WINDOW_WARPS, a block needs about that fraction of the registers and the shared
// memory, so that a multiprocessor runs two or four: where there are more blocks than multiprocessors, some
// compute while others wait. Its shared memory then has two slots, through which tiles pass in the order in
// which they are needed: of each chunk the keys of the tiles that the tokens see, then their values.
#include "head_vector.cuh"
#include "window_sums.cuh"

#if ARCH >= 800
using Vector = HeadVector<D, 0>;

// Apply norm and rotation to vector `kind` of token t (0, 1: queries; 2: key; 3: value) and store
// it.
template <class W>
DEVICE void finish(Vector& x, int kind, int t, char* shared, const Args& a, const BlockWork& p) {
  const float2* cos_sin = (const float2*)(shared + W::COS_SIN_AT) + t * (D / 2);
  const bool normed = a.normed >> kind & 1, weighted = normed && kind < 3;
  Vector weight;
  if (weighted) weight.load_shared((const float*)(shared + W::WEIGHTS_AT) + kind / 2 * D);
  x.finish(normed, weighted, weight, kind < 3, cos_sin, a.eps);
  if (kind < 2) {
#pragma unroll
    for (int j = 0; j < Vector::J; ++j) {
      const int c = Vector::at(j), row = (t - p.first_token) * 2 + kind;
      *(uint2*)(shared + W::Q_AT + query_offset<W>(row, c / 8) + c % 8 * 2) = {
          pack_half2(x.v[j][0], x.v[j][1]), pack_half2(x.v[j][2], x.v[j][3])};
    }
    return;
  }
  const bool is_key = kind == 2;
  const int row = p.settled + t - p.start, slot = p.ring + t;
  const i64 at = (i64)p.head * a.capacity + (slot < a.capacity ? slot : slot - a.capacity);
  const bool own = t >= p.first_token && t < p.first_token + p.n_tokens;
  char* cache = own ? (is_key ? a.keys : a.values) + at * D : nullptr;
  char* cache_scales = (is_key ? a.key_scales : a.value_scales) + at * (D / 16);
  char *codes = own_row<W>(shared, is_key, t), *scales = codes + D;
  if (has_slot<W>(p, is_key, row / W::KEYS))
    codes = row_codes<W>(shared, p, is_key, row), scales = row_scales_at<W>(shared, p, is_key, row);
  x.store<0>((u8*)codes, (u16*)scales, (u8*)cache, (u16*)cache_scales);
}

// Vectors of this step, one per warp: with the block's first chunk the queries of its tokens (first
// warps), and with every chunk the keys and values of this step that lie in it and are visible.
template <class W, int SLICES>
struct StepVectors {
  static constexpr int WEIGHTS = 2 * D / W::THREADS;
  static constexpr int MAX_VECTORS = 2 * (WINDOW_TOKENS * W::TOKEN_GROUPS + W::MAX_TOKENS);
  // Rounds, of a vector for each warp, that are loaded at once.
  static constexpr int ROUNDS = W::SHORT_CODE ? 1 : (MAX_VECTORS + W::WARPS - 1) / W::WARPS;
  float freq, weight[WEIGHTS];  // frequency of pair threadIdx.x % 128; norm weights (queries, then keys)

  DEVICE StepVectors(const float* q_norm, const float* k_norm, const float* freqs) {
    freq = __ldcg(freqs + threadIdx.x % (D / 2));
#pragma unroll
    for (int i = 0; i < WEIGHTS; ++i) {
      const u32 at = i * W::THREADS + threadIdx.x;
      const float* norm = at < D ? q_norm : k_norm;
      weight[i] = norm ? __ldcg(norm + at % D) : 1.0f;
    }
  }
  // Store the cosines and sines of the step's tokens, and the norm weights, to shared memory.
  DEVICE void prepare(char* shared, const Args& a, const BlockWork& p) const {
#pragma unroll
    for (int i = 0; i < WEIGHTS; ++i)
      ((float*)(shared + W::WEIGHTS_AT))[i * W::THREADS + threadIdx.x] = weight[i];
    float2* cos_sin = (float2*)(shared + W::COS_SIN_AT);
#pragma unroll 1
    for (int t = threadIdx.x / (D / 2); t < a.tokens; t += W::THREADS / (D / 2))
      cos_sin[t * (D / 2) + threadIdx.x % (D / 2)] = cos_sin_of((float)(p.settled + t) * freq);
  }
  // {token, kind} of this warp's vector; token -1: none.
  DEVICE int2 vector(int round, bool queries, const Args& a, const BlockWork& p) const {
    const int n = round * W::WARPS + threadIdx.x / 32, i = n - 2 * p.n_tokens;
    if (i < 0) return {queries ? p.first_token + n / 2 : -1, n % 2};
    const int t = i / 2;
    const bool stored = (u32)(p.settled + t - p.start) < W::CHUNK && p.settled + t <= p.span.hi;
    return {t < a.tokens && stored ? t : -1, 2 + i % 2};
  }
  DEVICE void finish_all(char* shared, bool queries, const Args& a, const BlockWork& p) {
    if (!queries && p.start + W::CHUNK <= p.settled) return;  // all of the chunk is settled
    int round = 0;
    do finish_from(round, shared, queries, a, p);
    while (W::SHORT_CODE && ++round * W::WARPS < 2 * (p.n_tokens + a.tokens));
  }
  // Load and finish the vectors of ROUNDS rounds from `first` on.
  DEVICE void finish_from(int first, char* shared, bool queries, const Args& a,
                          const BlockWork& p) {
    int from[ROUNDS];  // computed before griddep_wait(): integer work of all warps
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
      const int2 v = vector(first + i, queries, a, p);
      const int head = v.y < 2 ? 2 * p.head + v.y : v.y * a.n_kv + p.head;
      from[i] = materialize(v.x < 0 ? -1 : (v.x * 4 * a.n_kv + head) * D);
    }
    const int apart = SLICES > 1 ? materialize(a.count * 4 * a.n_kv * D) : 0;
    griddep_wait();
    Vector x[ROUNDS];
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i)
      if (from[i] >= 0) x[i].template load<SLICES>(a.y + from[i], apart);
    __syncthreads();  // orders `prepare` and the zeroed scales before `finish`
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
      const int2 v = vector(first + i, queries, a, p);
      if (v.x >= 0) finish<W>(x[i], v.y, v.x, shared, a, p);
    }
  }
};

// Masked values have weight zero, but 0 * inf and 0 * NaN are NaN: zero non-finite scales of rows
// of tiles first_tile .. end_tile - 1 that some row must not see.
template <class W>
DEVICE void zero_nonfinite_scales(char* shared, const BlockWork& p, int first_tile, int end_tile) {
  for (int row = first_tile * W::KEYS + threadIdx.x; row < end_tile * W::KEYS; row += W::THREADS) {
    if (p.visible_to_all(p.start + row)) continue;
    uint4* at = (uint4*)row_scales_at<W>(shared, p, false, row);
    const uint4 x = *at;
    if (nonfinite_half_signs(x.x) | nonfinite_half_signs(x.y) | nonfinite_half_signs(x.z) |
        nonfinite_half_signs(x.w))
      *at = {zero_nonfinite_halves(x.x), zero_nonfinite_halves(x.y), zero_nonfinite_halves(x.z),
             zero_nonfinite_halves(x.w)};
  }
}

// Scores of a warp's keys of a visible tile, and the largest of each row, to `tops`.
template <class W, int ROW_TILES>
DEVICE void score_tile(float (&scores)[1][W::ROW_TILES][4], float* tops, char* shared,
                       const Args& a, const BlockWork& p, int tile, int part) {
  accumulate_scores<W, ROW_TILES>(scores, tile_at<W>(shared, p, true, tile), shared + W::Q_AT, 0,
                                  part);
#pragma unroll
  for (int j = 0; j < 4 * ROW_TILES; ++j)
    scores[0][j / 4][j % 4] = __fmul_rn(scores[0][j / 4][j % 4], a.scale);
  if (!p.tile_visible_to_all<W>(tile))
    mask_scores<W>(scores, shared, p.start / W::KEYS + tile, part);
  tile_row_max<W, ROW_TILES>(scores, tops, tile * W::TILE_WARPS + part);
}

// The largest score of each row in the chunk, to `top`.
template <class W>
DEVICE void chunk_row_max(float* top, const float* tops, const Chunk& p) {
  if (threadIdx.x >= W::ROWS) return;
  float x = NEG_INF;
#pragma unroll
  for (int tile = 0; tile < W::TILES; ++tile)
#pragma unroll
    for (int i = 0; i < W::TILE_WARPS; ++i)
      if (p.tile_visible(tile))
        x = fmaxf(x, tops[(tile * W::TILE_WARPS + i) * W::ROWS + threadIdx.x]);
  top[threadIdx.x] = x;
}

// Weights of a warp's keys of a tile.
template <class W, int ROW_TILES>
DEVICE void store_tile_weights(char* shared, const float* top,
                               const float (&scores)[1][W::ROW_TILES][4], int tile, int part) {
#pragma unroll
  for (int n = 0; n < ROW_TILES; ++n) {
    float2 origin = ((const float2*)top)[n * 4 + threadIdx.x % 4];
    origin = {origin.x == NEG_INF ? 0.0f : origin.x, origin.y == NEG_INF ? 0.0f : origin.y};
    store_attention_weights((u32*)(shared + W::P_AT + tile * W::P_SIZE), part * W::ROW_TILES + n,
                            scores[0][n], origin);
  }
}

// Attention over the current chunk, all tiles of which are in shared memory: TILE_WARPS warps for each.
template <class W, int ROW_TILES>
DEVICE void attend(char* shared, const Args& a, const BlockWork& p) {
  const int warp = threadIdx.x / 32, part = warp % W::TILE_WARPS, tile = warp / W::TILE_WARPS;
  float* tops = (float*)(shared + W::TOPS_AT);
  float* top = (float*)(shared + W::TOP_AT);
  float scores[1][W::ROW_TILES][4] = {};
  const bool visible = p.tile_visible(tile);
  if (visible) score_tile<W, ROW_TILES>(scores, tops, shared, a, p, tile, part);
  __syncthreads();
  chunk_row_max<W>(top, tops, p);
  __syncthreads();
  if (visible) store_tile_weights<W, ROW_TILES>(shared, top, scores, tile, part);
  __syncthreads();
  if (visible) sum_values<W, ROW_TILES>(shared, p, tile, part);
  __syncthreads();
}

// The same with two slots: all warps use one tile after the other, while the next one is copied.
template <class W>
DEVICE void attend_in_turns(char* shared, const Args& a, const BlockWork& p, TileLoads<W>& loads) {
  constexpr int UNROLL = W::SHORT_CODE ? 1 : W::TILES;
  const int part = threadIdx.x / 32;
  float* tops = (float*)(shared + W::TOPS_AT);
  float* top = (float*)(shared + W::TOP_AT);
  // A queue, the newest tile's last: indices are constants although loops may not be unrolled.
  float scores[W::TILES][1][1][4] = {};
#pragma unroll UNROLL
  for (int tile = 0; tile < W::TILES; ++tile) {
#pragma unroll
    for (int i = 0; i < 4 * W::TILES; ++i)
      scores[i / 4][0][0][i % 4] = i / 4 + 1 < W::TILES ? scores[i / 4 + 1][0][0][i % 4] : 0.0f;
    if (!p.tile_visible(tile)) continue;
    loads.wait();
    add_own_rows<W>(shared, a, p, true, tile);
    score_tile<W, 1>(scores[W::TILES - 1], tops, shared, a, p, tile, part);
    loads.next(shared, a, p);
  }
  chunk_row_max<W>(top, tops, p);
  __syncthreads();
  // Taken from the end of the queue.
#pragma unroll UNROLL
  for (int tile = W::TILES - 1; tile >= 0; --tile) {
    if (p.tile_visible(tile))
      store_tile_weights<W, 1>(shared, top, scores[W::TILES - 1], tile, part);
#pragma unroll
    for (int i = 4 * W::TILES - 1; i >= 4; --i)
      scores[i / 4][0][0][i % 4] = scores[i / 4 - 1][0][0][i % 4];
  }
  // Values are summed over 128 keys at a time, as by blocks of WINDOW_WARPS, which have the same bits.
  ValueSums<W> total = {}, sums = {};
#pragma unroll UNROLL
  for (int tile = 0; tile < W::TILES; ++tile) {
    if (p.tile_visible(tile)) {
      loads.wait();
      add_own_rows<W>(shared, a, p, false, tile);
      if (!p.tile_visible_to_all<W>(tile)) {
        zero_nonfinite_scales<W>(shared, p, tile, tile + 1);
        __syncthreads();
      }
      add_values<W, 1>(sums, shared, p, tile, part);
      loads.next(shared, a, p);
    }
    if ((tile + 1) * W::KEYS % 128) continue;
#pragma unroll
    for (int i = 0; i < W::WARP_DIMS / 16 * 4; ++i) {
      float& x = sums[i / 4][0][i % 4];
      total[i / 4][0][i % 4] = __fadd_rn(total[i / 4][0][i % 4], x);
      x = 0;
    }
  }
  store_chunk<W>(shared, a, p, total);
}
#endif

// Sequences of `tokens` rows each. y [SLICES][rows][4 n_kv heads][256]: 2 n_kv query heads, n_kv
// key heads, n_kv value heads; SLICES split-K slices to be added. Rows see positions `first` ..
// `last` (both non-decreasing); `positions` are consecutive. These and `slots` were written before
// the preceding kernel started. Grid: [n_kv, sequences * ceil(tokens / 4), blocks per token group].
// The third dimension, TOKEN_GROUPS (2 for more than four tokens) and WARPS (fewer than WINDOW_WARPS
// for at most four tokens) do not change the result. `room`: rows of partial results per
// sequence.
template <int CHUNK, int SLICES, int TOKEN_GROUPS, int WARPS>
__global__ __launch_bounds__(32 * WARPS, WINDOW_WARPS / WARPS) void attend_window(
    const float* y, const float* q_norm, const float* k_norm, const float* freqs,
    const i64* positions, const i64* slots, const i64* first, const i64* last, char* keys,
    char* values, char* key_scales, char* value_scales, float* sums, float* tops, u32* arrived,
    u8* rows, int tokens, int room, int flags, int capacity, float eps, float scale) {
#if ARCH >= 800
  using W = Window<CHUNK, TOKEN_GROUPS, WARPS>;
  extern __shared__ __align__(128) char shared[];
  griddep_launch_dependents();
  const int n_kv = gridDim.x, blocks = W::token_blocks(tokens);
  const int sequence = blockIdx.y / (u32)blocks, sequences = gridDim.y / (u32)blocks;
  const int row = sequence * tokens;
  first += row, last += row, positions += row;
  const i64 ring = __ldcg(slots + row) * n_kv * capacity, partial = (i64)sequence * room;
  const int normed = (q_norm ? 3 : 0) | (k_norm ? 4 : 0) | (flags & NORM_V ? 8 : 0);
  const Args a = {y + (i64)row * 4 * n_kv * D,
                  keys + ring * D,
                  values + ring * D,
                  key_scales + ring * (D / 16),
                  value_scales + ring * (D / 16),
                  sums + partial * D,
                  tops + partial * 2,
                  arrived + sequence * blocks * n_kv,
                  rows,
                  tokens,
                  n_kv,
                  capacity,
                  row,
                  sequences * tokens,
                  normed,
                  eps,
                  scale * LOG2E};
  // Issue all loads of data older than the preceding kernel together.
  const int lane = threadIdx.x % 32, own_token = min_of(lane, tokens - 1);
  const int from = (int)__ldcg(first + own_token), to = (int)__ldcg(last + own_token);
  BlockWork p;
  p.settled = (int)__ldcg(positions), p.ring = (u32)p.settled % (u32)capacity;
  StepVectors<W, SLICES> own(q_norm, k_norm, freqs);
  p.set<W>(from, to, tokens, blockIdx.y - sequence * blocks);
  const int token = p.first_token + min_of(lane / 2, p.n_tokens - 1);
  int2 sees = {__shfl_sync(FULL_MASK, from, token), __shfl_sync(FULL_MASK, to, token)};
  if (p.first_slot >= p.chunks) return;
  p.at<W>(p.chunks - 1 - p.first_slot);
  TileLoads<W> loads = {p};
  if constexpr (W::TWO_SLOTS) {
#pragma unroll 1
    for (int i = 0; i < 2; ++i) loads.request(shared, a, p);
  } else {
    load_chunk<W>(shared, a, p);
  }
  if ((int)threadIdx.x >= p.n_tokens * 2) sees = {0, -1};
  if (threadIdx.x < W::ROWS) ((int2*)(shared + W::VISIBLE_AT))[threadIdx.x] = sees;
  own.prepare(shared, a, p);
#pragma unroll 1
  for (bool first = true;; first = false) {
    char* here = (char*)materialize_shared((
        const u8*)shared);  // addresses are recomputed per chunk instead of being kept in registers
    own.finish_all(here, first, a, p);
    if constexpr (W::TWO_SLOTS) {
      attend_in_turns<W>(here, a, p, loads);
    } else {
      cp_async_wait_group<0>();
      __syncthreads();
      zero_nonfinite_scales<W>(here, p, p.first_tile, p.end_tile);
      if (p.token_groups == 1)
        attend<W, 1>(here, a, p);
      else
        attend<W, TOKEN_GROUPS>(here, a, p);
      if (p.chunks > 1) store_partial<W>(here, a, p);
    }
    if (p.slot < p.slot_stride) break;
    p.at<W>(p.slot - p.slot_stride);
    if constexpr (!W::TWO_SLOTS) {
      __syncthreads();  // sums in shared memory have been read
      load_chunk<W>(shared, a, p);
    }
  }
  if (p.chunks == 1 || is_last_block(a, p)) write<W>(shared, a, p);
#endif
}
