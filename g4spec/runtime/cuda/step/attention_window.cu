// Sliding-window attention of a decode step in one kernel, from the QKV projection to the packed
// input of the output projection. Heads of 256, two query heads per KV head, Q8_0 cache.
//
// Thread mapping: a block has WINDOW_WARPS or WINDOW_FEW_WARPS warps, one KV head, four or eight tokens
// of a sequence, and some of the chunks (CHUNK positions) that they see, the newest first. Steps:
//   1. copy keys and values of earlier steps to shared memory, those of the first chunk before the
//      preceding kernel has ended;
//   2. one warp per vector: norm and rotation (head_vector.cuh). Queries go to shared memory. So do the
//      step's keys and values; the block that owns the token also writes them to the cache;
//   3. scores, weights, weighted sums. If the tokens see several chunks, partial results go to global
//      memory, and the last block to arrive combines them in the order of the chunks.
// Row r of the 8-wide MMA operand is token r / 2 of the block, query head r % 2.
//
// With WINDOW_FEW_WARPS a block takes half of the registers and of the shared memory, so that a
// multiprocessor runs two: where there are more blocks than multiprocessors, one computes while the
// other waits. Its shared memory has two slots, through which the tiles pass in the order in which they
// are needed: of each chunk the keys of the tiles that the tokens see, one or two, then their values.
#include "attention_tiles.cuh"
#include "head_vector.cuh"
#include "packed_rows.cuh"

#if ARCH >= 800
constexpr int D = WINDOW_HEAD_DIM;
static_assert(WINDOW_GROUP == 2 && WINDOW_TOKENS == 4, "a tile of 8 rows is 4 tokens of 2 heads");
// Floats between rows of sums in shared memory, padded against bank conflicts.
constexpr int SUM_PITCH = D + 4;

// TILES: tiles per chunk; eight warps share a tile, or compute all of them one after the other.
// TOKEN_GROUPS: maximum number of groups of four tokens per block.
template <int TILES_, int TOKEN_GROUPS_, int WARPS_,
          int STAGES = WARPS_ == WINDOW_FEW_WARPS ? 1 : TILES_>
struct Window : AttentionConfig<D, 1, TOKEN_GROUPS_, 8, 8, 1, 1, STAGES, STAGES, 0> {
  static constexpr int TILES = TILES_, TOKEN_GROUPS = TOKEN_GROUPS_, WARPS = WARPS_;
  static constexpr int THREADS = 32 * WARPS, TILE_WARPS = 8;  // TILE_WARPS: that share a tile
  static constexpr bool TWO_SLOTS = WARPS == WINDOW_FEW_WARPS;  // shared memory holds two tiles
  static constexpr int CHUNK = Window::KEYS * TILES, SUMS_AT = Window::RUNNING_MAX_AT;
  static constexpr int MAX_CHUNKS = TILES == 1 ? WINDOW_MAX_CHUNKS_1 : WINDOW_MAX_CHUNKS_2;  // that a row sees
  static constexpr int MAX_TOKENS = TWO_SLOTS ? WINDOW_TOKENS : MAX_STEP_ROWS;  // of a sequence
  static constexpr int ANGLES_AT = Window::SHARED, WEIGHTS_AT = ANGLES_AT + MAX_TOKENS * (D / 2) * 8;
  static constexpr int TILE_SUMS_AT = WEIGHTS_AT + 2 * D * 4;  // with two slots
  static constexpr int TILE_SUMS_BYTES = Window::ROWS * SUM_PITCH * 4;
  static_assert(Window::K_STAGE_BYTES == Window::V_STAGE_BYTES && Window::K_ROW == Window::V_ROW,
                "row_codes() and row_scales_at() address tiles of K and of V alike");
  static_assert(TILE_SUMS_BYTES <= Window::K_STAGE_BYTES,
                "the sums of a tile overwrite its keys in shared memory");
  static_assert(!TWO_SLOTS || TOKEN_GROUPS == 1 && TILES <= 2, "two slots; one group of tokens");
};

struct Args {  // arguments of one sequence
  const float* y;
  char *keys, *values, *key_scales, *value_scales;  // its rings
  float *sums, *tops;  // [chunks][groups][n_kv][rows][D], [..][2]: largest score, sum of weights
  u32* arrived;        // [groups][n_kv], zero before and after
  u8* rows;            // output, packed activations of all sequences
  int tokens, n_kv, capacity;
  int row, count;  // first row of the sequence, and number of rows of all sequences
  int normed;      // bit per kind of vector (see `finish`): RMS norm
  float eps, scale;
};

struct Chunk {
  int slot, start;           // its number among those that the block's tokens see; first position
  int first_tile, end_tile;  // tiles that some token sees

  DEVICE int tiles() const { return end_tile - first_tile; }
  DEVICE bool one_tile() const { return tiles() == 1; }
  DEVICE bool tile_visible(int tile) const { return tile >= first_tile && tile < end_tile; }
};

// The work of a block: which tokens of the sequence, and which chunks. Base: the current chunk.
struct BlockWork : Chunk {
  int own, blocks;  // this block is number `own` of the `blocks` that split the tokens
  int head;
  int first_token, n_tokens;    // tokens of the block
  int token_groups;             // groups of four that they form
  int first_slot, slot_stride;  // chunks of this block: first_slot, first_slot + slot_stride, ...
  int chunks;                   // that the tokens see
  int settled, ring;            // first position of this step, and its row in the ring
  Span span;

  // `first`, `last`: visible range of token `lane`; all lanes of the warp call it. If blocks of
  // four tokens would have several chunks each, two of them share eight tokens instead, so that K
  // and V are read once for both.
  template <class W>
  DEVICE void set(int first, int last, int tokens, int place) {
    auto of = [](int x, int lane) { return __shfl_sync(FULL_MASK, x, lane); };
    const int most = of(last, tokens - 1) / W::CHUNK - of(first, 0) / W::CHUNK + 1;
    token_groups = W::TOKEN_GROUPS > 1 && most > gridDim.z ? 2 : 1;
    head = blockIdx.x, blocks = (tokens + WINDOW_TOKENS - 1) / WINDOW_TOKENS, own = place;
    first_token = group() * WINDOW_TOKENS * token_groups;
    n_tokens = min_of(tokens - first_token, WINDOW_TOKENS * token_groups);
    const int sharing = min_of(token_groups, blocks - group() * token_groups),
              end = first_token + n_tokens - 1;
    first_slot = blockIdx.z * sharing + place % token_groups, slot_stride = gridDim.z * sharing;
    span = {of(first, first_token), of(last, end), of(first, end), of(last, first_token)};
    chunks = span.hi / W::CHUNK - span.lo / W::CHUNK + 1;
  }
  // Index of this block's token group, and number of token groups.
  DEVICE int group() const { return own >> token_groups - 1; }
  DEVICE int groups() const { return blocks + token_groups - 1 >> token_groups - 1; }
  DEVICE int block() const { return group() * gridDim.x + head; }
  DEVICE int rows() const { return 8 * token_groups; }

  template <class W>
  DEVICE Chunk chunk(int slot) const {
    const int start = (span.lo / W::CHUNK + slot) * W::CHUNK;
    return {slot, start, max_of(0, span.lo - start) / W::KEYS,
            min_of(W::TILES, (span.hi - start) / W::KEYS + 1)};
  }
  template <class W>
  DEVICE void at(int slot) {
    (Chunk&)*this = chunk<W>(slot);
  }

  // Index of the block's first row in the partial results of chunk `chunk`.
  DEVICE int place(int chunk) const { return chunk * stride() + block() * rows(); }
  DEVICE int stride() const { return groups() * gridDim.x * rows(); }

  DEVICE bool visible_to_all(int position) const {  // every row sees it
    return position >= span.all_lo && position <= span.all_hi;
  }
  template <class W>
  DEVICE bool tile_visible_to_all(int tile) const {
    const int first = start + tile * W::KEYS;
    return visible_to_all(first) && visible_to_all(first + W::KEYS - 1);
  }
};

// Keys or values of tile `tile` of the chunk in shared memory, and the sums over its keys.
template <class W>
DEVICE char* tile_at(char* shared, const Chunk& p, bool is_key, int tile) {
  const int slot = W::TWO_SLOTS && p.one_tile() ? !is_key : tile;
  const int plane = W::TWO_SLOTS || is_key ? W::K_AT : W::V_AT;
  return shared + plane + slot * W::K_STAGE_BYTES;
}
template <class W>
DEVICE float* tile_sums(char* shared, int tile) {
  return (float*)(shared + (W::TWO_SLOTS ? W::TILE_SUMS_AT + tile * W::TILE_SUMS_BYTES
                                         : W::K_AT + tile * W::K_STAGE_BYTES));
}
// True if values take the place of keys.
template <class W>
DEVICE bool values_after_keys(const Chunk& p) {
  return W::TWO_SLOTS && !p.one_tile();
}

// Q8_0 codes and scales of a row of the chunk in shared memory.
template <class W>
DEVICE char* row_codes(char* shared, const Chunk& p, bool is_key, u32 row) {
  return tile_at<W>(shared, p, is_key, row / W::KEYS) + row % W::KEYS * W::K_ROW;
}
template <class W>
DEVICE char* row_scales_at(char* shared, const Chunk& p, bool is_key, u32 row) {
  return tile_at<W>(shared, p, is_key, row / W::KEYS) + W::KEYS * W::K_ROW + row % W::KEYS * 16;
}

// The rows of a visible tile that earlier steps wrote: begin .. end - 1, and where they are in the cache.
// Tiles are contiguous there: the capacity of a ring is a multiple of theirs.
template <class W>
struct SettledRows {
  int begin, end;  // from the first row of the tile on
  const char *codes, *scales;

  DEVICE SettledRows(const Args& a, const BlockWork& p, const Chunk& c, bool is_key, int tile) {
    const int first = c.start + tile * W::KEYS;
    begin = max_of(0, p.span.lo - first), end = min_of(W::KEYS, p.settled - first);
    const i64 row = (i64)p.head * a.capacity + (u32)first % (u32)a.capacity;
    codes = (is_key ? a.keys : a.values) + row * D;
    scales = (is_key ? a.key_scales : a.value_scales) + row * 16;
  }
};

// Copy the settled rows of a visible tile: keys or values. Scales of V are set to zero for the other rows.
template <class W>
DEVICE void load_tile(char* shared, const Args& a, const BlockWork& p, const Chunk& c, bool is_key,
                      int tile) {
  const SettledRows<W> rows(a, p, c, is_key, tile);
  char* to = tile_at<W>(shared, c, is_key, tile);
  const int thread = threadIdx.x, first = thread / 16, piece = thread % 16 * 16;
  const char* from = rows.codes + first * D + piece;
#pragma unroll
  for (int i = 0; i < W::KEYS; i += W::THREADS / 16)
    if (i + first >= rows.begin && i + first < rows.end)
      cp_async16(to + first * W::K_ROW + piece + i * W::K_ROW, from + i * D);
  if (thread >= W::KEYS) return;
  char* own = to + W::KEYS * W::K_ROW + thread * 16;
  if (thread >= rows.begin && thread < rows.end)
    cp_async16(own, rows.scales + thread * 16);
  else if (!is_key) *(uint4*)own = {0, 0, 0, 0};
}

// Copy the keys and values of all visible tiles of a chunk.
template <class W>
DEVICE void load_chunk(char* shared, const Args& a, const BlockWork& p) {
#pragma unroll 1
  for (int i = 0; i < 2 * p.tiles(); ++i)
    load_tile<W>(shared, a, p, p, i % 2 == 0, p.first_tile + i / 2);
  cp_async_commit();
}

// The tiles of a block's chunks in the order in which two slots take them: of each chunk the keys of
// its visible tiles, then their values. A chunk has two or four, so the slots take turns.
template <class W>
struct TileLoads {
  Chunk chunk;   // of the next tile
  int done = 0;  // tiles of this chunk that have been requested

  // Wait until the older of two requested tiles is in shared memory.
  DEVICE void wait() const {
    cp_async_wait_group<1>();
    __syncthreads();
  }
  // Request one more tile, for the slot of the tile that was waited for last. All warps call it when
  // they have used that tile.
  DEVICE void next(char* shared, const Args& a, const BlockWork& p) {
    __syncthreads();
    request(shared, a, p);
  }
  // The same for a free slot. A group of copies each, which is empty after the last tile.
  DEVICE void request(char* shared, const Args& a, const BlockWork& p) {
    if (chunk.slot >= 0) {
      const int n = chunk.tiles();
      const bool is_key = done < n;
      load_tile<W>(shared, a, p, chunk, is_key, chunk.first_tile + (is_key ? done : done - n));
      if (++done == 2 * n) {
        chunk = p.chunk<W>(chunk.slot - p.slot_stride);
        done = 0;
      }
    }
    cp_async_commit();
  }
};

using Vector = HeadVector<D, 0>;

// Apply norm and rotation to vector `kind` of token t (0, 1: queries; 2: key; 3: value) and store
// it.
template <class W>
DEVICE void finish(Vector& x, int kind, int t, char* shared, const Args& a, const BlockWork& p) {
  const float2* angles = (const float2*)(shared + W::ANGLES_AT) + t * (D / 2);
  const bool normed = a.normed >> kind & 1, weighted = normed && kind < 3;
  Vector weight;
  if (weighted) weight.load_shared((const float*)(shared + W::WEIGHTS_AT) + kind / 2 * D);
  x.finish(normed, weighted, weight, kind < 3, angles, a.eps);
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
  x.store<0>((u8*)row_codes<W>(shared, p, is_key, row), (u16*)row_scales_at<W>(shared, p, is_key, row),
             (u8*)cache, (u16*)cache_scales);
}

// Vectors of this step, one per warp: with the block's first chunk the queries of its tokens (first
// warps), and with every chunk the keys and values of this step that lie in it and are visible.
template <class W, int SLICES>
struct StepVectors {
  static constexpr int ROUNDS = W::TWO_SLOTS ? 2 : 3, WEIGHTS = 2 * D / W::THREADS;
  float freq, weight[WEIGHTS];  // frequency of pair threadIdx.x % 128; norm weights (queries, then keys)
  Vector x[ROUNDS];             // this warp's vectors

  DEVICE StepVectors(const float* q_norm, const float* k_norm, const float* freqs) {
    freq = __ldcg(freqs + threadIdx.x % (D / 2));
#pragma unroll
    for (int i = 0; i < WEIGHTS; ++i) {
      const int at = i * W::THREADS + threadIdx.x;
      const float* norm = at < D ? q_norm : k_norm;
      weight[i] = norm ? __ldcg(norm + at % D) : 1.0f;
    }
  }
  // Store the cosines and sines of the step's tokens, and the norm weights, to shared memory.
  DEVICE void prepare(char* shared, const Args& a, const BlockWork& p) const {
#pragma unroll
    for (int i = 0; i < WEIGHTS; ++i)
      ((float*)(shared + W::WEIGHTS_AT))[i * W::THREADS + threadIdx.x] = weight[i];
    float2* angles = (float2*)(shared + W::ANGLES_AT);
#pragma unroll 1
    for (int t = threadIdx.x / (D / 2); t < a.tokens; t += W::THREADS / (D / 2))
      angles[t * (D / 2) + threadIdx.x % (D / 2)] = cos_sin((float)(p.settled + t) * freq);
  }
  // {token, kind} of this warp's vector; token -1: none.
  DEVICE int2 vector(int round, bool queries, const Args& a, const BlockWork& p) const {
    const int warp = threadIdx.x / 32, i = round * W::WARPS + warp - 2 * p.n_tokens;
    if (i < 0) return {queries ? p.first_token + warp / 2 : -1, warp % 2};
    const int t = i / 2;
    const bool stored = (u32)(p.settled + t - p.start) < W::CHUNK && p.settled + t <= p.span.hi;
    return {t < a.tokens && stored ? t : -1, 2 + i % 2};
  }
  // All but the values if these take the place of keys.
  DEVICE void finish_all(char* shared, bool queries, const Args& a, const BlockWork& p) {
    if (!queries && p.start + W::CHUNK <= p.settled) return;  // all of the chunk is settled
    int from[ROUNDS];  // computed before griddep_wait(): integer work of all warps
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
      const int2 v = vector(i, queries, a, p);
      const int head = v.y < 2 ? 2 * p.head + v.y : v.y * a.n_kv + p.head;
      from[i] = materialize(v.x < 0 ? -1 : (v.x * 4 * a.n_kv + head) * D);
    }
    const int apart = SLICES > 1 ? materialize(a.count * 4 * a.n_kv * D) : 0;
    griddep_wait();
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i)
      if (from[i] >= 0) x[i].template load<SLICES>(a.y + from[i], apart);
    __syncthreads();  // orders `prepare` and the zeroed scales before `finish`
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
      const int2 v = vector(i, queries, a, p);
      if (v.x >= 0 && !(v.y == 3 && values_after_keys<W>(p)))
        finish<W>(x[i], v.y, v.x, shared, a, p);
    }
  }
  // The values that `finish_all` left.
  DEVICE void finish_values(char* shared, bool queries, const Args& a, const BlockWork& p) {
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
      const int2 v = vector(i, queries, a, p);
      if (v.x >= 0 && v.y == 3) finish<W>(x[i], v.y, v.x, shared, a, p);
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

// Store the weighted sum of a tile's values to shared memory, over its keys, and the sums of
// weights.
template <class W, int ROW_TILES>
DEVICE void sum_values(char* shared, const BlockWork& p, int tile, int warp) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  float out[2][W::ROW_TILES][4] = {}, sums[W::ROW_TILES] = {};
  accumulate_values<W, ROW_TILES>(out, sums, tile_at<W>(shared, p, false, tile),
                                  (const uint2*)(shared + W::P_AT + tile * W::P_SIZE), 0, warp);
  float* to = tile_sums<W>(shared, tile) + warp * 32 + g * 4;
  float* weights = (float*)(shared + W::SUMS_AT) + (tile * 8 + warp) * W::ROWS;
#pragma unroll
  for (int n = 0; n < ROW_TILES; ++n) {
    float x = __fadd_rn(sums[n], __shfl_xor_sync(FULL_MASK, sums[n], 1));
    x = __fadd_rn(x, __shfl_xor_sync(FULL_MASK, x, 2));
    if (t == 0) weights[n * 8 + g] = x;
#pragma unroll
    for (int c = 0; c < 2; ++c)
      *(float4*)(to + (n * 8 + t * 2 + c) * SUM_PITCH) = {out[0][n][c], out[0][n][c + 2],
                                                          out[1][n][c], out[1][n][c + 2]};
  }
}

// Four output values of a row before normalization, summed over tiles; and the row's sum of
// weights.
template <class W>
DEVICE float4 row_values(char* shared, const BlockWork& p, int row, int quad) {
  float4 v = {0, 0, 0, 0};
#pragma unroll
  for (int tile = 0; tile < W::TILES; ++tile)
    if (p.tile_visible(tile))
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
      __stcg((float2*)a.tops + place,
             float2{((const float*)(shared + W::RESCALE_AT))[row], weight});
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

// Attention over the current chunk, all tiles of which are in shared memory: eight warps for each.
template <class W, int ROW_TILES>
DEVICE void attend(char* shared, const Args& a, const BlockWork& p) {
  const int warp = threadIdx.x / 32, part = warp % W::TILE_WARPS, tile = warp / W::TILE_WARPS;
  float* tops = (float*)(shared + W::TILE_MAX_AT);
  float* top = (float*)(shared + W::RESCALE_AT);
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
template <class W, class V>
DEVICE void attend_in_turns(char* shared, const Args& a, const BlockWork& p, TileLoads<W>& loads,
                            V& own, bool queries) {
  const int part = threadIdx.x / 32;
  float* tops = (float*)(shared + W::TILE_MAX_AT);
  float* top = (float*)(shared + W::RESCALE_AT);
  float scores[W::TILES][1][W::ROW_TILES][4] = {};
#pragma unroll
  for (int tile = 0; tile < W::TILES; ++tile) {
    if (!p.tile_visible(tile)) continue;
    loads.wait();
    score_tile<W, 1>(scores[tile], tops, shared, a, p, tile, part);
    loads.next(shared, a, p);
  }
  chunk_row_max<W>(top, tops, p);
  __syncthreads();
  if (values_after_keys<W>(p)) own.finish_values(shared, queries, a, p);
#pragma unroll
  for (int tile = 0; tile < W::TILES; ++tile)
    if (p.tile_visible(tile)) store_tile_weights<W, 1>(shared, top, scores[tile], tile, part);
#pragma unroll
  for (int tile = 0; tile < W::TILES; ++tile) {
    if (!p.tile_visible(tile)) continue;
    loads.wait();
    if (!p.tile_visible_to_all<W>(tile)) {
      zero_nonfinite_scales<W>(shared, p, tile, tile + 1);
      __syncthreads();
    }
    sum_values<W, 1>(shared, p, tile, part);
    loads.next(shared, a, p);
  }
}
#endif

// Sequences of `tokens` rows each. y [SLICES][rows][4 n_kv heads][256]: 2 n_kv query heads, n_kv
// key heads, n_kv value heads; SLICES split-K slices to be added. Rows see positions `first` ..
// `last` (both non-decreasing); `positions` are consecutive. These and `slots` were written before
// the preceding kernel started. Grid: [n_kv, sequences * ceil(tokens / 4), blocks per token group].
// The third dimension, TOKEN_GROUPS (2 for more than four tokens) and WARPS (WINDOW_FEW_WARPS for
// at most four tokens; WINDOW_WARPS) do not change the result. `room`: rows of partial results per
// sequence.
template <int TILES, int SLICES, int TOKEN_GROUPS, int WARPS>
__global__ __launch_bounds__(32 * WARPS, WINDOW_WARPS / WARPS) void attend_window(
    const float* y, const float* q_norm, const float* k_norm, const float* freqs,
    const i64* positions, const i64* slots, const i64* first, const i64* last, char* keys,
    char* values, char* key_scales, char* value_scales, float* sums, float* tops, u32* arrived,
    u8* rows, int tokens, int room, int flags, int capacity, float eps, float scale) {
#if ARCH >= 800
  using W = Window<TILES, TOKEN_GROUPS, WARPS>;
  extern __shared__ __align__(128) char shared[];
  griddep_launch_dependents();
  const int n_kv = gridDim.x, blocks = (tokens + WINDOW_TOKENS - 1) / WINDOW_TOKENS;
  const int sequence = blockIdx.y / (u32)blocks, sequences = gridDim.y / (u32)blocks;
  const int row = sequence * tokens;
  first += row, last += row, positions += row;
  const i64 ring = __ldcg(slots + row) * n_kv * capacity, partial = (i64)sequence * room;
  const int normed = (q_norm ? 3 : 0) | (k_norm ? 4 : 0) | (flags & NORM_V ? 8 : 0);
  const Args a = {y + (i64)row * 4 * n_kv * D, keys + ring * D, values + ring * D,
                  key_scales + ring * (D / 16), value_scales + ring * (D / 16), sums + partial * D,
                  tops + partial * 2, arrived + sequence * blocks * n_kv, rows, tokens, n_kv, capacity,
                  row, sequences * tokens, normed, eps, scale * 1.44269504f};
  // Issue all loads of data older than the preceding kernel together.
  const int lane = threadIdx.x % 32, own_token = min_of(lane, tokens - 1);
  const int from = (int)__ldcg(first + own_token), to = (int)__ldcg(last + own_token);
  BlockWork p;
  p.settled = (int)__ldcg(positions), p.ring = (u32)p.settled % (u32)capacity;
  StepVectors<W, SLICES> own(q_norm, k_norm, freqs);
  p.set<W>(from, to, tokens, blockIdx.y - sequence * blocks);
  const int token = p.first_token + lane / 2 % p.n_tokens;
  int2 sees = {__shfl_sync(FULL_MASK, from, token), __shfl_sync(FULL_MASK, to, token)};
  if (p.first_slot >= p.chunks) return;
  p.at<W>(p.chunks - 1 - p.first_slot);
  TileLoads<W> loads = {p};
  if constexpr (W::TWO_SLOTS)
    loads.request(shared, a, p), loads.request(shared, a, p);
  else
    load_chunk<W>(shared, a, p);
  if ((int)threadIdx.x >= p.n_tokens * 2) sees = {0, -1};
  if (threadIdx.x < W::ROWS) ((int2*)(shared + W::VISIBLE_AT))[threadIdx.x] = sees;
  own.prepare(shared, a, p);
#pragma unroll 1
  for (bool first = true;; first = false) {
    char* here = (char*)materialize_shared((
        const u8*)shared);  // addresses are recomputed per chunk instead of being kept in registers
    own.finish_all(here, first, a, p);
    if constexpr (W::TWO_SLOTS) {
      attend_in_turns<W>(here, a, p, loads, own, first);
    } else {
      cp_async_wait_group<0>();
      __syncthreads();
      zero_nonfinite_scales<W>(here, p, p.first_tile, p.end_tile);
      if (p.token_groups == 1)
        attend<W, 1>(here, a, p);
      else
        attend<W, TOKEN_GROUPS>(here, a, p);
    }
    if (p.chunks > 1) store_partial<W>(here, a, p);
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
