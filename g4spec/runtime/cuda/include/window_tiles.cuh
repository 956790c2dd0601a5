// The tiles of attention_window.cu: configuration of an instance, the work of a block, and copies of
// keys and values from the rings of the cache to shared memory.
#pragma once
#include "attention_tiles.cuh"

#if ARCH >= 800
constexpr int D = WINDOW_HEAD_DIM;
static_assert(WINDOW_GROUP == 2 && WINDOW_TOKENS == 4, "a tile of 8 rows is 4 tokens of 2 heads");
// Floats between rows of sums in shared memory, padded against bank conflicts.
constexpr int SUM_PITCH = D + 4;

// Scores: 16 keys of a tile per warp. TWO_SLOTS: shared memory holds two tiles, through which all warps go
// one after the other; else a whole chunk, whose tiles are divided among the warps.
constexpr int window_keys(int warps) { return warps < 8 ? 16 * warps : 128; }

// CHUNK: positions of a chunk. TOKEN_GROUPS: maximum number of groups of four tokens per block.
template <int CHUNK_, int TOKEN_GROUPS_, int WARPS_, int KEYS_ = window_keys(WARPS_),
          int STAGES = WARPS_ < WINDOW_WARPS ? 1 : CHUNK_ / KEYS_>
struct Window
    : AttentionConfig<D, 1, TOKEN_GROUPS_, KEYS_ / 16, KEYS_ / 16, 1, 1, STAGES, STAGES, 0, KEYS_> {
  static constexpr int CHUNK = CHUNK_, TOKEN_GROUPS = TOKEN_GROUPS_, WARPS = WARPS_;
  static constexpr int TILES = CHUNK / Window::KEYS, THREADS = 32 * WARPS;
  static constexpr int TILE_WARPS = Window::KEYS / 16;  // that share a tile
  static constexpr bool TWO_SLOTS = WARPS < WINDOW_WARPS;
  // True: loops over tiles are not unrolled, and vectors are loaded one round at a time. A launch finds the
  // instruction cache cold, and blocks at different places of 150 KB of code evict what others need.
  static constexpr bool SHORT_CODE = Window::KEYS < 128;
  // That a row sees.
  static constexpr int MAX_CHUNKS = CHUNK == 128 ? WINDOW_MAX_CHUNKS_128 : WINDOW_MAX_CHUNKS_256;
  static constexpr int MAX_TOKENS = TWO_SLOTS ? WINDOW_TOKENS : MAX_STEP_ROWS;  // of a sequence
  // Blocks of WINDOW_TOKENS tokens of a sequence.
  static DEVICE int token_blocks(int tokens) {
    return TWO_SLOTS ? 1 : (tokens + WINDOW_TOKENS - 1) / WINDOW_TOKENS;
  }
  // Offsets in shared memory, in bytes. For each tile of a chunk attention weights, and for each 16 keys
  // of one the largest score and the sum of weights of each row; the largest score in the chunk.
  static constexpr int PER_ROW = TILES * TILE_WARPS * Window::ROWS * 4;
  static constexpr int TOPS_AT = Window::P_AT + TILES * Window::P_SIZE, SUMS_AT = TOPS_AT + PER_ROW;
  static constexpr int TOP_AT = SUMS_AT + PER_ROW, VISIBLE_AT = TOP_AT + Window::ROWS * 4;
  static constexpr int COS_SIN_AT = VISIBLE_AT + Window::ROWS * 8;
  static constexpr int WEIGHTS_AT = COS_SIN_AT + MAX_TOKENS * (D / 2) * 8;
  // With two slots: keys and values of the step's tokens whose tile has no slot yet.
  static constexpr int OWN_AT = WEIGHTS_AT + 2 * D * 4, OWN_ROW = D + D / 16;
  static constexpr int SHARED = OWN_AT + (TWO_SLOTS ? 2 * MAX_TOKENS * OWN_ROW : 0);
  static constexpr int TILE_SUMS_BYTES = Window::ROWS * SUM_PITCH * 4;
  static_assert(Window::K_STAGE_BYTES == Window::V_STAGE_BYTES && Window::K_ROW == Window::V_ROW,
                "row_codes() and row_scales_at() address tiles of K and of V alike");
  static_assert(MAX_TOKENS * (OWN_ROW / 16) <= THREADS || !TWO_SLOTS,
                "a thread copies 16 bytes of OWN_AT");
  static_assert(TILE_SUMS_BYTES <= Window::K_STAGE_BYTES,
                "the sums of a tile overwrite its keys in shared memory");
  static_assert(!TWO_SLOTS || TOKEN_GROUPS == 1, "two slots; one group of tokens");
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
  // Place of a tile of keys or of values in the order in which this chunk's tiles take two slots.
  DEVICE int turn(bool is_key, int tile) const {
    return tile - first_tile + (is_key ? 0 : tiles());
  }
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
    head = blockIdx.x, blocks = W::token_blocks(tokens), own = place;
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
  return shared + (W::TWO_SLOTS ? p.turn(is_key, tile) % 2 * W::K_STAGE_BYTES
                                : (is_key ? W::K_AT : W::V_AT) + tile * W::K_STAGE_BYTES);
}
template <class W>
DEVICE float* tile_sums(char* shared, int tile) {
  return (float*)(shared + W::K_AT + tile * W::K_STAGE_BYTES);
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
    int place = p.ring + first - p.settled;
    while (place < 0) place += a.capacity;
    const i64 row = (i64)p.head * a.capacity + place;
    codes = (is_key ? a.keys : a.values) + row * D;
    scales = (is_key ? a.key_scales : a.value_scales) + row * 16;
  }
  DEVICE bool has(int row) const { return (u32)(row - begin) < (u32)max_of(end - begin, 0); }
};

// Copy the settled rows of a visible tile: keys or values. Scales of V are set to zero for the other rows.
template <class W>
DEVICE void load_tile(char* shared, const Args& a, const BlockWork& p, const Chunk& c, bool is_key,
                      int tile) {
  const SettledRows<W> rows(a, p, c, is_key, tile);
  char* to = tile_at<W>(shared, c, is_key, tile);
  const int thread = threadIdx.x, first = thread / 16, piece = thread % 16 * 16;
  // Addresses are materialized: otherwise they are computed again for each copy.
  const u32 at = materialize(shared_address(to) + first * W::K_ROW + piece);
  const char* from = materialize(rows.codes + first * D + piece);
#pragma unroll
  for (int i = 0; i < W::KEYS; i += W::THREADS / 16)
    if (rows.has(i + first)) cp_async<16>(at + i * W::K_ROW, from + i * D);
  if (thread >= W::KEYS) return;
  char* own = to + W::KEYS * W::K_ROW + thread * 16;
  if (rows.has(thread))
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

// True if a tile has its slot when the chunk begins, so that rows of the step's tokens can be stored to
// it at once. Others are stored to `own_row` first: the key or value of token `t`.
template <class W>
DEVICE bool has_slot(const Chunk& p, bool is_key, int tile) {
  return !W::TWO_SLOTS || p.turn(is_key, tile) < 2;
}
template <class W>
DEVICE char* own_row(char* shared, bool is_key, int t) {
  return shared + W::OWN_AT + (t * 2 + !is_key) * W::OWN_ROW;
}

// Copy the rows of the step's tokens that lie in a visible tile to its slot, if `finish` could not store
// them there (`has_slot`). All threads call it.
template <class W>
DEVICE void add_own_rows(char* shared, const Args& a, const BlockWork& p, bool is_key, int tile) {
  if (has_slot<W>(p, is_key, tile)) return;
  const int first = p.start + tile * W::KEYS;  // position of the first row of the tile
  const int last = min_of(min_of(p.settled + a.tokens - 1, p.span.hi), first + W::KEYS - 1);
  if (last < p.settled) return;  // all of them are settled
  const int position = max_of(first, p.settled) + threadIdx.x / (W::OWN_ROW / 16);
  const int piece = threadIdx.x % (W::OWN_ROW / 16) * 16, row = position - p.start;
  if (position <= last)
    *(uint4*)(piece < D ? row_codes<W>(shared, p, is_key, row) + piece
                        : row_scales_at<W>(shared, p, is_key, row)) =
        *(const uint4*)(own_row<W>(shared, is_key, position - p.settled) + piece);
  __syncthreads();
}

// The tiles of a block's chunks in the order in which two slots take them: of each chunk the keys of
// its visible tiles, then their values, so always an even number.
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
#endif
