// Attention of a few rows over a cache, first phase: for each chunk of keys (chunks.cuh) and row
// the largest score, the sum of weights and the weighted sum of values. The second phase is
// attention_combine.cu.
//
// Some warps compute scores and weights (`score`), the others sum values (`gather`), one tile
// behind: all meet when a tile has its weights, and the tile before has been summed. Each side brings
// its own operand to shared memory. A row of the 8-wide operand is a (token, head) pair: row r is
// token r / group, head r % group of the KV head. Blocks are shared out among sequences by what these see.
#include "attend_tiles.cuh"

#if ARCH >= 800
enum Barrier { SCORE = 1, GATHER, WEIGHED };

struct Args {    // of a sequence
  const u16* q;  // [tokens, n_kv * group, D]
  const i64 *first, *last;
  float* sums;  // [chunks, n_kv, rows, D]
  float* tops;  // [chunks, n_kv, rows, 2]: largest score in units of log 2, sum of weights
  Planes k, v;
  int tokens, n_kv, group, capacity;
  float scale;  // log2(e) included
};

// Fills the ring. Tiles that were complete before this step may be read before the kernel in front
// of this one has ended; `between` runs when it has, its copies belong to the first part.
template <int PARTS, int RING, class S, class Load, class Between>
DEVICE Cursor<S, PARTS> fill(const Work<S::KEYS>& work, int settled, Load load, Between between) {
#pragma unroll 1
  for (int late = 0;; ++late) {
    if (late) {
      grid_wait();
      between();
    }
    Cursor<S, PARTS> at(work);
#pragma unroll 1
    for (int i = 0; i < RING; ++i) {
      if (at.valid()) {
        if (((at.tile + 1) * S::KEYS > settled) == late) load(i, at);
        at.next(work);
      }
      if (late) commit_copies();
    }
    if (late) return at;
  }
}

// Waits for part `i` of a ring, then hands the place of part i - 1 to the next one.
template <int RING, class S, int PARTS, class Load>
DEVICE void advance(int i, Cursor<S, PARTS>& ahead, const Work<S::KEYS>& work, int barrier,
                    int threads, Load load) {
  if (i == 0) wait_copies<RING - 1>();
  else wait_copies<RING - 2>();
  meet(barrier, threads);
  if (i == 0) return;
  if (ahead.valid()) {
    load((i - 1) % RING, ahead);
    ahead.next(work);
  }
  commit_copies();
}

// Where the row of a lane comes from, of those of an item that a warp loads, or -1; what it sees goes
// to shared memory.
template <class S>
DEVICE int find_row(char* shared, const Args& args, const Item& item, int warp) {
  constexpr int OWN = S::ROWS / S::QW;  // rows of a warp
  const int lane = threadIdx.x % 32, first = item.rows * S::ROWS, rows = args.tokens * args.group;
  const int mine = first + warp * OWN + lane;
  const int token = mine < rows ? (u32)mine / (u32)args.group : 0;
  const int head = item.head * args.group + mine - token * args.group;
  if (lane < OWN) {
    const int last = mine < rows ? (int)__ldcg(args.last + token) : -1;
    ((int2*)(shared + S::SEES_AT))[mine - first] = {(int)__ldcg(args.first + token), last};
  }
  return mine < rows ? token * args.n_kv * args.group + head : -1;
}

// Rows of an item to shared memory. `row`: what `find_row` found.
template <class S>
DEVICE void load_rows(char* shared, const Args& args, int row, int warp) {
  constexpr int PIECES = S::D / 8, OWN = S::ROWS / S::QW;  // of a row, rows of a warp
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    const int from = __shfl_sync(FULL, row, i);
#pragma unroll
    for (int piece = lane; piece < PIECES; piece += 32) {
      char* to = shared + S::Q_AT + place_of_row<S>(warp * OWN + i, piece);
      if (from >= 0) copy16(to, args.q + (i64)from * S::D + piece * 8);
      else *(uint4*)to = {0, 0, 0, 0};
    }
  }
}

// Where the rows of an item begin among all partial results.
DEVICE int place_of(const Args& args, const Item& item) {
  return (item.chunk * args.n_kv + item.head) * args.tokens * args.group;
}

// The largest score of two rows so far, and by what earlier sums of them fade.
template <class S>
DEVICE float2 raise(float2& fade, const float* tops, float* last, int place, bool keep) {
  const float2 before = *(const float2*)(last + place);
  float2 top = before;
#pragma unroll
  for (int w = 0; w < S::QW; ++w) {
    const float2 x = *(const float2*)(tops + w * S::ROWS + place);
    top = {fmaxf(top.x, x.x), fmaxf(top.y, x.y)};
  }
  __syncwarp();
  if (keep) *(float2*)(last + place) = top;
  top = {top.x == NEVER ? 0.0f : top.x, top.y == NEVER ? 0.0f : top.y};
  fade = {exp2_fast(__fsub_rn(before.x, top.x)), exp2_fast(__fsub_rn(before.y, top.y))};
  return top;
}

// Weights 2^(score - top) of a tile to shared memory.
template <class S>
DEVICE void weigh(const float (&scores)[S::WT][S::NT][4], char* shared, int buffer, int warp) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const float* tops = (const float*)(shared + S::TOP_AT + buffer * S::TOP_SIZE);
  float* last = (float*)(shared + S::LAST_AT) + warp * S::ROWS;
  float* fades = (float*)(shared + S::FADE_AT + buffer * S::FADE_SIZE);
  u32* p = (u32*)(shared + S::P_AT + buffer * S::P_SIZE);
#pragma unroll
  for (int n = 0; n < S::NT; ++n) {
    float2 fade;
    const float2 top = raise<S>(fade, tops, last, n * 8 + t * 2, g == 0);
    if (warp == 0 && g == 0) *(float2*)(fades + n * 8 + t * 2) = fade;
#pragma unroll
    for (int w = 0; w < S::WT; ++w)
      put_weights(p, (warp * S::WT + w) * S::NT + n, scores[w][n], top);
  }
}

template <class S>
DEVICE void store_tops(const float* tops, const Args& args, const Item& item) {
  const int first = item.rows * S::ROWS, rows = args.tokens * args.group;
  for (int i = threadIdx.x; i < S::ROWS && first + i < rows; i += 32)
    args.tops[(place_of(args, item) + first + i) * 2] = tops[i];
}

// The scores of one tile: parts part .. part + KS - 1 of this block.
template <class S, class Load>
DEVICE void score_tile(float (&scores)[S::WT][S::NT][4], char* shared, const Work<S::KEYS>& work,
                       Cursor<S, S::KS>& ahead, int part, float scale, int tile, Load load) {
  const int warp = threadIdx.x / 32;
#pragma unroll 1
  for (int i = 0; i < S::KS; ++i, ++part) {
    advance<S::KR>(part, ahead, work, SCORE, 32 * S::QW, load);
    multiply_keys<S>(scores, shared + S::K_AT + part % S::KR * S::K_STAGE, shared + S::Q_AT, i,
                     warp);
  }
#pragma unroll
  for (int w = 0; w < S::WT; ++w)
#pragma unroll
    for (int n = 0; n < S::NT; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) scores[w][n][c] = __fmul_rn(scores[w][n][c], scale);
  if (!work.whole(tile)) mask<S>(scores, shared, tile, warp);
}

template <class S>
DEVICE void score(char* shared, const Work<S::KEYS>& work, const Args& args, int settled) {
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  constexpr int ALL = 32 * (S::QW + S::PW);
  const u32 stages = shared_address(shared + S::K_AT);
  auto load = [&](int stage, const Cursor<S, S::KS>& at) {
    load_keys<S>(stages + stage * S::K_STAGE, args.k, args.v, at, args.capacity, thread);
  };
  const int row = work.count ? find_row<S>(shared, args, work.items[0], warp) : -1;
  auto ahead = fill<S::KS, S::KR, S>(work, settled, load, [&] {
    if (work.count) load_rows<S>(shared, args, row, warp);
  });
  float* last = (float*)(shared + S::LAST_AT) + warp * S::ROWS;  // each warp has its own
  int tile = 0;  // so far, over all items
#pragma unroll 1
  for (int round = 0; round < work.count; ++round) {
    const Item item = work.items[round], before = work.items[most(0, round - 1)];
    if (item.head != before.head || item.rows != before.rows) {
      load_rows<S>(shared, args, find_row<S>(shared, args, item, warp), warp);
      commit_copies();
      wait_copies<0>();
    }
    for (int i = lane; i < S::ROWS; i += 32) last[i] = NEVER;
#pragma unroll 1
    for (int at = work.items[round].tile; at < work.items[round].end; ++at, ++tile) {
      float scores[S::WT][S::NT][4] = {};
      score_tile<S>(scores, shared, work, ahead, tile * S::KS, args.scale, at, load);
      find_tops<S>(scores, (float*)(shared + S::TOP_AT + tile % 2 * S::TOP_SIZE), warp);
      meet(SCORE, 32 * S::QW);
      weigh<S>(scores, shared, tile % 2, warp);
      meet(WEIGHED, ALL);
    }
    __syncwarp();
    if (warp == 0) store_tops<S>(last, args, work.items[round]);
  }
}

// Sums of one item as they stand in registers, to [rows, D].
template <class S>
DEVICE void store_sums(const float (&out)[S::DP / 16][S::NT][4], const Args& args, const Item& item,
                       int warp) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, rows = args.tokens * args.group;
#pragma unroll
  for (int n = 0; n < S::NT; ++n)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int row = item.rows * S::ROWS + n * 8 + t * 2 + c;
      if (row >= rows) continue;
      float* to = args.sums + (i64)(place_of(args, item) + row) * S::D + warp * S::DP;
#pragma unroll
      for (int b = 0; b < S::DP / 32; ++b) {
        const float x0 = out[2 * b][n][c], x1 = out[2 * b][n][c + 2];
        const float x2 = out[2 * b + 1][n][c], x3 = out[2 * b + 1][n][c + 2];
        if constexpr (S::Q8) {
          *(float4*)(to + b * 32 + g * 4) = {x0, x1, x2, x3};
        } else {
          to[b * 32 + g] = x0, to[b * 32 + g + 8] = x1;
          to[b * 32 + g + 16] = x2, to[b * 32 + g + 24] = x3;
        }
      }
    }
}

// Sums of weights over the warps, in their order.
template <class S>
DEVICE void store_weights(const float (&sums)[S::NT], char* shared, const Args& args,
                          const Item& item, int thread) {
  float* all = (float*)(shared + S::SUM_AT);
#pragma unroll
  for (int n = 0; n < S::NT; ++n) {
    float x = __fadd_rn(sums[n], __shfl_xor_sync(FULL, sums[n], 1));
    x = __fadd_rn(x, __shfl_xor_sync(FULL, x, 2));
    if (thread % 4 == 0) all[thread / 32 * S::ROWS + n * 8 + thread % 32 / 4] = x;
  }
  meet(GATHER, 32 * S::PW);
  const int row = item.rows * S::ROWS + thread;
  if (thread >= S::ROWS || row >= args.tokens * args.group) return;
  float x = all[thread];
#pragma unroll
  for (int w = 1; w < S::PW; ++w) x = __fadd_rn(x, all[w * S::ROWS + thread]);
  args.tops[(place_of(args, item) + row) * 2 + 1] = x;
}

template <class S>
DEVICE void fade_sums(float (&out)[S::DP / 16][S::NT][4], float (&sums)[S::NT],
                      const float* fades) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < S::NT; ++n) {
    const float2 by = *(const float2*)(fades + n * 8 + lane % 4 * 2);
    sums[n] = __fmul_rn(sums[n], fades[n * 8 + lane / 4]);
#pragma unroll
    for (int d = 0; d < S::DP / 16; ++d)
#pragma unroll
      for (int i = 0; i < 4; ++i) out[d][n][i] = __fmul_rn(out[d][n][i], i % 2 ? by.y : by.x);
  }
}

template <class S>
DEVICE void gather(char* shared, const Work<S::KEYS>& work, const Args& args, int settled) {
  const int thread = threadIdx.x - 32 * S::QW, warp = thread / 32;
  constexpr int ALL = 32 * (S::QW + S::PW);
  const u32 stages = shared_address(shared + S::V_AT);
  auto load = [&](int stage, const Cursor<S, S::VS>& at) {
    load_values<S>(stages + stage * S::V_STAGE, args.v, at, args.capacity, thread);
  };
  auto ahead = fill<S::VS, S::VR, S>(work, settled, load, [] {});
  int tile = 0;  // so far, over all items
#pragma unroll 1
  for (int round = 0; round < work.count; ++round) {
    float out[S::DP / 16][S::NT][4] = {}, sums[S::NT] = {};
#pragma unroll 1
    for (int at = work.items[round].tile; at < work.items[round].end; ++at, ++tile) {
#pragma unroll S::VS > 2 ? 1 : 2
      for (int i = 0; i < S::VS; ++i) {
        const int part = tile * S::VS + i;
        char* stage = shared + S::V_AT + (S::VR == S::VS ? i : part % S::VR) * S::V_STAGE;
        advance<S::VR>(part, ahead, work, i ? GATHER : WEIGHED, i ? 32 * S::PW : ALL, load);
        if (!work.whole(at)) {
          clean_values<S>(stage, work, at * S::KEYS + i * S::VKEYS, thread);
          meet(GATHER, 32 * S::PW);
        }
        if (i == 0) fade_sums<S>(out, sums, (float*)(shared + S::FADE_AT + tile % 2 * S::FADE_SIZE));
        multiply_values<S>(out, sums, stage, (uint2*)(shared + S::P_AT + tile % 2 * S::P_SIZE), i,
                           warp);
      }
    }
    store_sums<S>(out, args, work.items[round], warp);
    store_weights<S>(sums, shared, args, work.items[round], thread);
  }
}
#endif

// Sequences of `tokens` rows each. Planes are [units, n_kv, capacity, columns], see units.cuh; `width`:
// of the table. `room`: chunks that partial results of a sequence have room for. Keys and values from
// the first position of a sequence on are written by this step. first, last, positions, slots and what
// earlier steps have written were there before the kernel in front of this one started.
template <int D, int Q8, int NT, int QW, int PW, int KS, int VS, int KR, int VR, int TURN>
__global__ __launch_bounds__(32 * (QW + PW), 1) void attend_chunks(
    const u16* q, const char* keys, const char* values, const char* key_scales,
    const char* value_scales, const int* table, const i64* first, const i64* last,
    const i64* positions, const i64* slots, float* sums, float* tops, int tokens, int n_kv, int group,
    int width, int capacity, int room, int shift, int growing, int sequences, float scale) {
#if ARCH >= 800
  using S = Shape<D, Q8, NT, QW, PW, KS, VS, KR, VR, TURN>;
  extern __shared__ __align__(128) char shared[];
  __shared__ Work<S::KEYS> work;
  grid_launch();
  const int rows = tokens * group, row_blocks = (rows + S::ROWS - 1) / S::ROWS;
  if (threadIdx.x < 32) {
    const Chunks chunks = {shift, growing};
    const Share own = work.share(chunks, first, last, sequences, tokens, n_kv * row_blocks);
    const int row = own.sequence * tokens;
    work.set(chunks, span_of(first + row, last + row, tokens),
             {table, width, (int)__ldcg(slots + row)}, capacity, n_kv, row_blocks, own);
  }
  const int only = sequences == 1 ? (int)__ldcg(positions) : 0;
  __syncthreads();
  const int row = work.sequence * tokens;
  const int settled = sequences == 1 ? only : (int)__ldcg(positions + row);
  const i64 partial = (i64)work.sequence * room * n_kv * rows;
  const Args args = {q + (i64)row * n_kv * group * D, first + row, last + row, sums + partial * D,
                     tops + partial * 2, {keys, key_scales}, {values, value_scales}, tokens, n_kv,
                     group, capacity, scale * 1.44269504f};
  if (threadIdx.x < 32 * QW) score<S>(shared, work, args, settled);
  else gather<S>(shared, work, args, settled);
#endif
}
