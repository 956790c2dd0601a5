// Attention of a few rows over a cache, first phase: for each chunk of keys (chunks.cuh) and row
// the largest score, the sum of weights and the weighted sum of values. The second phase is
// attention_combine.cu.
//
// Some warps compute scores and weights (`score`), the others sum values (`gather`), one tile
// behind; each side brings its own operand to shared memory. A row of the 8-wide operand is a
// (token, head) pair: row r is token r / group, head r % group of the KV head.
#include "attend_tiles.cuh"

#if ARCH >= 800
constexpr float LIFT = 6.0f;  // weights are stored times 2^6, away from the end of half precision
enum Barrier { SCORE = 1, GATHER, WRITTEN, FREE = 5 };  // WRITTEN, FREE: one for each of 2 buffers

struct Args {
  const u16* q;         // [tokens, n_kv * group, D]
  const i64 *first, *last, *settled;
  float* sums;          // [chunks, n_kv, rows, D]
  float2* tops;         // [chunks, n_kv, rows]: largest score in units of log 2, sum of weights
  Planes k, v;
  int tokens, n_kv, group, capacity;
  float scale;          // log2(e) included
};

// Fills the ring. Tiles that were complete before this step may be read before the kernel in front
// of this one has ended; `between` runs when it has, its copies belong to the first part.
template <int PARTS, int RING, class S, class Load, class Between>
DEVICE Cursor<S, PARTS> fill(const Work<S::KEYS>& work, const Args& args, int settled, Load load,
                             Between between) {
  Cursor<S, PARTS> at(work);
  if (args.settled) {
#pragma unroll 1
    for (int i = 0; i < RING && at.valid(); ++i, at.next(work))
      if ((at.tile + 1) * S::KEYS <= settled) load(i, at);
    grid_wait();
    at = Cursor<S, PARTS>(work);
  }
  between();
#pragma unroll 1
  for (int i = 0; i < RING; ++i) {
    if (at.valid()) {
      if (!args.settled || (at.tile + 1) * S::KEYS > settled) load(i, at);
      at.next(work);
    }
    commit_copies();
  }
  return at;
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

// Rows of an item to shared memory: [NT][D / 32][lane] 16 bytes, and what each row sees.
template <class S>
DEVICE void load_rows(char* shared, const Args& args, const Item& item, int thread) {
  const int rows = args.tokens * args.group, heads = args.n_kv * args.group;
  const u32 to = shared_address(shared + S::Q_AT);
#pragma unroll 1
  for (int i = thread; i < S::ROWS * S::D / 8; i += 32 * S::QW) {
    const int r = i / (S::D / 8), piece = i % (S::D / 8), row = item.rows * S::ROWS + r;
    const int place = (r / 8 * (S::D / 32) + piece / 4) * 32 + r % 8 * 4 + piece % 4;
    const i64 at = (i64)(row / args.group) * heads + item.head * args.group + row % args.group;
    if (row < rows) copy_piece<16>(to + place * 16, (const char*)(args.q + at * S::D + piece * 8));
    else ((uint4*)(shared + S::Q_AT))[place] = {0, 0, 0, 0};
  }
  if (thread < S::ROWS) {
    const int row = item.rows * S::ROWS + thread, token = row < rows ? row / args.group : 0;
    const int last = row < rows ? (int)__ldcg(args.last + token) : -1;
    ((int2*)(shared + S::SEES_AT))[thread] = {(int)__ldcg(args.first + token), last};
  }
}

// What is known of each row before the first tile: running tops of each warp, sums of each 16 keys.
template <class S>
DEVICE void clear_rows(char* shared, int warp) {
  float* tops = (float*)(shared + S::LAST_AT) + warp * S::ROWS;
  float* sums = (float*)(shared + S::SUM_AT) + warp * S::WT * S::ROWS;
  for (int i = threadIdx.x % 32; i < S::ROWS; i += 32) tops[i] = NEVER;
  for (int i = threadIdx.x % 32; i < S::WT * S::ROWS; i += 32) sums[i] = 0.0f;
}

template <class S>
DEVICE void mask(float (&scores)[S::WT][S::NT][4], const char* shared, int tile, int warp) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < S::NT; ++n)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int2 sees = ((const int2*)(shared + S::SEES_AT))[n * 8 + lane % 4 * 2 + c];
#pragma unroll
      for (int w = 0; w < S::WT; ++w)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int key = tile * S::KEYS + (warp * S::WT + w) * 16 + half * 8 + lane / 4;
          if (key < sees.x || key > sees.y) scores[w][n][half * 2 + c] = NEVER;
        }
    }
}

// The largest score of each row among a warp's keys of this tile. Lane (g, t) has rows 2 t, 2 t + 1
// of each 8 and keys g, g + 8 of each 16.
template <class S>
DEVICE void find_tops(const float (&scores)[S::WT][S::NT][4], float* tops, int warp) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < S::NT; ++n) {
    float found[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float x = fmaxf(scores[0][n][c], scores[0][n][c + 2]);
      if (S::WT == 2) x = fmaxf(x, fmaxf(scores[S::WT - 1][n][c], scores[S::WT - 1][n][c + 2]));
#pragma unroll
      for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(FULL, x, step));
      found[c] = x;
    }
    if (lane < 4) *(float2*)(tops + warp * S::ROWS + n * 8 + lane * 2) = {found[0], found[1]};
  }
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

// Weights 2^(score - top) of a tile to shared memory, and their sums.
template <class S>
DEVICE void weigh(const float (&scores)[S::WT][S::NT][4], char* shared, int buffer, int warp) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const float* tops = (const float*)(shared + S::TOP_AT + buffer * S::TOP_SIZE);
  float* last = (float*)(shared + S::LAST_AT) + warp * S::ROWS;
  float* fades = (float*)(shared + S::FADE_AT + buffer * S::FADE_SIZE);
  u32* p = (u32*)(shared + S::P_AT + buffer * S::P_SIZE);
  float2 fade[S::NT];
  float sum[S::WT][S::NT][2];
#pragma unroll
  for (int n = 0; n < S::NT; ++n) {
    const float2 top = raise<S>(fade[n], tops, last, n * 8 + t * 2, g == 0);
    if (warp == 0 && g == 0) *(float2*)(fades + n * 8 + t * 2) = fade[n];
#pragma unroll
    for (int w = 0; w < S::WT; ++w)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float origin = c ? top.y : top.x;
        const float a = exp2_fast(__fadd_rn(__fsub_rn(scores[w][n][c], origin), LIFT));
        const float b = exp2_fast(__fadd_rn(__fsub_rn(scores[w][n][c + 2], origin), LIFT));
        sum[w][n][c] = __fadd_rn(a, b);
        const int place = ((warp * S::WT + w) * S::NT + n) * 32 + (t * 2 + c) * 4 + g % 4;
        p[place * 2 + g / 4] = pack_halves(a, b);
      }
  }
  arrive(WRITTEN + buffer, 32 * (S::QW + S::PW));
  float* sums = (float*)(shared + S::SUM_AT) + warp * S::WT * S::ROWS;
#pragma unroll
  for (int n = 0; n < S::NT; ++n)
#pragma unroll
    for (int w = 0; w < S::WT; ++w)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float x = sum[w][n][c];
#pragma unroll
        for (int step = 4; step < 32; step *= 2) x = __fadd_rn(x, __shfl_xor_sync(FULL, x, step));
        float* at = sums + w * S::ROWS + n * 8 + t * 2 + c;
        if (g == 0) *at = fmaf(*at, c ? fade[n].y : fade[n].x, x);
      }
}

// What the item found: tops, and sums of weights over its keys in order of the tiles of 16.
template <class S>
DEVICE void finish_rows(const Args& args, const Item& item, const char* shared, i64 place) {
  const float* sums = (const float*)(shared + S::SUM_AT);
  const int thread = threadIdx.x, row = item.rows * S::ROWS + thread;
  meet(SCORE, 32 * S::QW);
  if (thread < S::ROWS && row < args.tokens * args.group) {
    float x = sums[thread];
#pragma unroll
    for (int w = 1; w < S::KT; ++w) x = __fadd_rn(x, sums[w * S::ROWS + thread]);
    args.tops[place + row] = {((const float*)(shared + S::LAST_AT))[thread], x};
  }
  meet(SCORE, 32 * S::QW);
}

// Where the rows of a (chunk, head) begin among all partial results.
template <class S>
DEVICE i64 place_of(const Work<S::KEYS>& work, const Args& args, const Item& item) {
  return ((i64)(item.chunk - work.low) * args.n_kv + item.head) * args.tokens * args.group;
}

template <class S>
DEVICE void score(char* shared, const Work<S::KEYS>& work, const Args& args, int settled) {
  const int thread = threadIdx.x, warp = thread / 32;
  constexpr int ALL = 32 * (S::QW + S::PW);
  const u32 stages = shared_address(shared + S::K_AT);
  auto load = [&](int stage, const Cursor<S, S::KS>& at) {
    load_keys<S>(stages + stage * S::K_STAGE, args.k, at, args.capacity, thread);
  };
  Item item;
  auto ahead = fill<S::KS, S::KR, S>(work, args, settled, load, [&] {
    if (work.item(0, item)) load_rows<S>(shared, args, item, thread);
  });
  int part = 0, tile = 0;  // so far, over all items
#pragma unroll 1
  for (int round = 0; work.item(round, item); ++round) {
    if (round) {
      load_rows<S>(shared, args, item, thread);
      commit_copies();
      wait_copies<0>();
    }
    clear_rows<S>(shared, warp);
#pragma unroll 1
    for (int at = item.tile, end = item.end; at < end; ++at, ++tile) {
      float scores[S::WT][S::NT][4] = {};
#pragma unroll 1
      for (int i = 0; i < S::KS; ++i, ++part) {
        advance<S::KR>(part, ahead, work, SCORE, 32 * S::QW, load);
        multiply_keys<S>(scores, shared + S::K_AT + part % S::KR * S::K_STAGE,
                         (const uint4*)(shared + S::Q_AT), i, warp);
      }
#pragma unroll
      for (int w = 0; w < S::WT; ++w)
#pragma unroll
        for (int n = 0; n < S::NT; ++n)
#pragma unroll
          for (int c = 0; c < 4; ++c) scores[w][n][c] = __fmul_rn(scores[w][n][c], args.scale);
      if (!work.whole(at)) mask<S>(scores, shared, at, warp);
      find_tops<S>(scores, (float*)(shared + S::TOP_AT + tile % 2 * S::TOP_SIZE), warp);
      meet(SCORE, 32 * S::QW);
      if (tile >= 2) meet(FREE + tile % 2, ALL);
      weigh<S>(scores, shared, tile % 2, warp);
    }
    work.item(round, item);  // computed again: registers are scarce
    finish_rows<S>(args, item, shared, place_of<S>(work, args, item));
  }
  for (int i = most(0, tile - 2); i < tile; ++i) meet(FREE + i % 2, ALL);
}

// Sums of one item as they stand in registers, to [rows, D].
template <class S>
DEVICE void store_sums(const float (&out)[S::DP / 16][S::NT][4], const Args& args, const Item& item,
                       i64 place, int warp) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, rows = args.tokens * args.group;
#pragma unroll
  for (int n = 0; n < S::NT; ++n)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int row = item.rows * S::ROWS + n * 8 + t * 2 + c;
      if (row >= rows) continue;
      float* to = args.sums + (place + row) * S::D + warp * S::DP;
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

template <class S>
DEVICE void fade_sums(float (&out)[S::DP / 16][S::NT][4], const float* fades) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < S::NT; ++n) {
    const float2 by = *(const float2*)(fades + n * 8 + t * 2);
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
  auto ahead = fill<S::VS, S::VR, S>(work, args, settled, load, [] {});
  int part = 0, tile = 0;
  Item item;
#pragma unroll 1
  for (int round = 0; work.item(round, item); ++round) {
    float out[S::DP / 16][S::NT][4] = {};
#pragma unroll 1
    for (int at = item.tile, end = item.end; at < end; ++at, ++tile) {
#pragma unroll 1
      for (int i = 0; i < S::VS; ++i, ++part) {
        char* stage = shared + S::V_AT + part % S::VR * S::V_STAGE;
        advance<S::VR>(part, ahead, work, i ? GATHER : WRITTEN + tile % 2, i ? 32 * S::PW : ALL,
                       load);
        if (!work.whole(at)) {
          clean_values<S>(stage, thread);
          meet(GATHER, 32 * S::PW);
        }
        if (i == 0) fade_sums<S>(out, (float*)(shared + S::FADE_AT + tile % 2 * S::FADE_SIZE));
        multiply_values<S>(out, stage, (uint2*)(shared + S::P_AT + tile % 2 * S::P_SIZE), i, warp);
      }
      arrive(FREE + tile % 2, ALL);
    }
    work.item(round, item);
    store_sums<S>(out, args, item, place_of<S>(work, args, item), warp);
  }
}
#endif

// `settled`: null, or the first position whose keys and values this step writes; then first, last,
// settled and everything before it were written before the kernel in front of this one started.
template <int D, int Q8, int NT, int QW, int PW, int KS, int VS, int KR, int VR>
__global__ __launch_bounds__(32 * (QW + PW), 1) void attend_chunks(
    const u16* q, const char* keys, const char* values, const char* key_scales,
    const char* value_scales, const i64* first, const i64* last, const i64* settled, float* sums,
    float2* tops, int tokens, int n_kv, int group, int capacity, int unit, int growing,
    float scale) {
#if ARCH >= 800
  using S = Shape<D, Q8, NT, QW, PW, KS, VS, KR, VR>;
  extern __shared__ __align__(128) char shared[];
  grid_launch();
  if (!settled) grid_wait();
  __shared__ Work<S::KEYS> work;
  const Span span = span_of(first, last, tokens);
  if (threadIdx.x == 0)
    work.set({unit, growing}, span, n_kv, (tokens * group + S::ROWS - 1) / S::ROWS);
  __syncthreads();
  const Args args = {q, first, last, settled, sums, tops, {keys, key_scales},
                     {values, value_scales}, tokens, n_kv, group, capacity,
                     scale * 1.44269504f};
  const int from = settled ? (int)__ldcg(settled) : 0;
  if (threadIdx.x < 32 * QW) score<S>(shared, work, args, from);
  else gather<S>(shared, work, args, from);
#endif
}
