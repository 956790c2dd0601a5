// Decode attention (split-KV), phase 1: for each chunk of keys (attention_chunks.cuh) and row, the
// maximum score, the sum of weights, and the weighted sum of values. Phase 2 is
// attention_combine.cu.
//
// Thread mapping: SCORE_WARPS warps compute scores and weights, VALUE_WARPS warps accumulate
// values, one tile behind. They synchronize once per tile, on a named barrier: the weights of a
// tile are ready and the tile before has been accumulated. Each side copies its own operand (K or
// V) to shared memory with cp.async. Row r of the 8-wide MMA operand is token r / group, query head
// r % group of the KV head. Blocks are distributed among sequences by the number of keys each sees
// (`assign_block`).
//
// Grid: one-dimensional, enough blocks for lists of all chunks of each sequence, KV head and row block
// (S::ROWS rows); attention.py launches as many as run at once. Results do not depend on the number.
// Dynamic shared memory: S::SHARED bytes.
#include "attention_tiles.cuh"

#if ARCH >= 800
// Named barriers (0 is __syncthreads()) of the score warps, of the value warps, and of both.
enum Barrier { SCORE = 1, GATHER, WEIGHED };

struct Args {    // arguments of one sequence
  const u16* q;  // [tokens, n_kv * group, D]
  const i64 *first, *last;
  float* sums;  // [chunks, n_kv, rows, D]; chunk 0 is the first that a row of the sequence sees
  float* tops;  // [chunks, n_kv, rows, 2]: maximum score (base 2), sum of weights
  KvPlane k, v;
  int tokens, n_kv, group, capacity;
  float scale;  // log2(e) included
};

// Fill the ring of stages. Tiles that end before position `settled` were written by earlier steps,
// so their copies start before griddep_wait(), in a first pass over the ring; a second pass copies
// the others. `between` runs right after the wait; its copies and those of the first pass belong to
// the first group.
template <int PARTS, int RING, class S, class Load, class Between>
DEVICE TileCursor<S, PARTS> fill_ring(const AttentionWork<S::KEYS>& work, int settled, Load load,
                                      Between between) {
#pragma unroll 1
  for (int late = 0;; ++late) {
    if (late) {
      griddep_wait();
      between();
    }
    TileCursor<S, PARTS> at(work);
#pragma unroll 1
    for (int i = 0; i < RING; ++i) {
      if (at.valid()) {
        if (((at.tile + 1) * S::KEYS > settled) == late) load(i, at);
        at.next(work);
      }
      if (late) cp_async_commit();
    }
    if (late) return at;
  }
}

// Wait for piece `i`, counted over all tiles of the block, then refill the stage of piece i - 1.
template <int RING, class S, int PARTS, class Load>
DEVICE void advance_ring(int i, TileCursor<S, PARTS>& ahead, const AttentionWork<S::KEYS>& work,
                         int barrier, int threads, Load load) {
  if (i == 0)
    cp_async_wait_group<RING - 1>();
  else
    cp_async_wait_group<RING - 2>();
  named_barrier_sync(barrier, threads);
  if (i == 0) return;
  if (ahead.valid()) {
    load((i - 1) % RING, ahead);
    ahead.next(work);
  }
  cp_async_commit();
}

// Index of the query row that this lane of the warp loads, or -1. Also stores the row's visible
// range to shared memory.
template <class S>
DEVICE int find_query_row(char* shared, const Args& args, const WorkItem& item, int warp) {
  constexpr int OWN = S::ROWS / S::SCORE_WARPS;  // rows per warp
  const int lane = threadIdx.x % 32, first = item.row_block * S::ROWS,
            rows = args.tokens * args.group;
  const int mine = first + warp * OWN + lane;
  const int token = mine < rows ? (u32)mine / (u32)args.group : 0;
  const int head = item.head * args.group + mine - token * args.group;
  if (lane < OWN) {
    const int last = mine < rows ? (int)__ldcg(args.last + token) : -1;
    ((int2*)(shared + S::VISIBLE_AT))[mine - first] = {(int)__ldcg(args.first + token), last};
  }
  return mine < rows ? token * args.n_kv * args.group + head : -1;
}

// Copy the query rows of a work item to shared memory. `row`: from `find_query_row`.
template <class S>
DEVICE void load_queries(char* shared, const Args& args, int row, int warp) {
  constexpr int PIECES = S::D / 8, OWN = S::ROWS / S::SCORE_WARPS;  // of a row, rows of a warp
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    const int from = __shfl_sync(FULL_MASK, row, i);
#pragma unroll
    for (int piece = lane; piece < PIECES; piece += 32) {
      char* to = shared + S::Q_AT + query_offset<S>(warp * OWN + i, piece);
      if (from >= 0)
        cp_async16(to, args.q + (i64)from * S::D + piece * 8);
      else *(uint4*)to = {0, 0, 0, 0};
    }
  }
}

// Index of an item's first row in the partial results.
DEVICE int partial_row(const Args& args, const WorkItem& item) {
  return (item.chunk * args.n_kv + item.head) * args.tokens * args.group;
}

// Update the maxima of two rows, at `place` in `running`, with those of this tile; `rescale` is the
// factor for sums so far. One lane per pair of rows has `keep` and stores the maxima.
template <class S>
DEVICE float2 update_running_max(float2& rescale, const float* tops, float* running, int place,
                                 bool keep) {
  const float2 before = *(const float2*)(running + place);
  float2 top = before;
#pragma unroll
  for (int w = 0; w < S::SCORE_WARPS; ++w) {
    const float2 x = *(const float2*)(tops + w * S::ROWS + place);
    top = {fmaxf(top.x, x.x), fmaxf(top.y, x.y)};
  }
  __syncwarp();
  if (keep) *(float2*)(running + place) = top;
  top = {top.x == NEG_INF ? 0.0f : top.x, top.y == NEG_INF ? 0.0f : top.y};
  rescale = {exp2_approx(__fsub_rn(before.x, top.x)), exp2_approx(__fsub_rn(before.y, top.y))};
  return top;
}

// Store the weights 2^(score - maximum) of a tile to shared memory, with the rescale factors.
template <class S>
DEVICE void compute_weights(const float (&scores)[S::WARP_KEY_TILES][S::ROW_TILES][4], char* shared,
                            int buffer, int warp) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const float* tops = (const float*)(shared + S::TILE_MAX_AT + buffer * S::TILE_MAX_SIZE);
  float* running = (float*)(shared + S::RUNNING_MAX_AT) + warp * S::ROWS;
  float* rescales = (float*)(shared + S::RESCALE_AT + buffer * S::RESCALE_SIZE);
  u32* p = (u32*)(shared + S::P_AT + buffer * S::P_SIZE);
#pragma unroll
  for (int n = 0; n < S::ROW_TILES; ++n) {
    float2 rescale;
    const float2 top = update_running_max<S>(rescale, tops, running, n * 8 + t * 2, g == 0);
    if (warp == 0 && g == 0) *(float2*)(rescales + n * 8 + t * 2) = rescale;
#pragma unroll
    for (int w = 0; w < S::WARP_KEY_TILES; ++w)
      store_attention_weights(p, (warp * S::WARP_KEY_TILES + w) * S::ROW_TILES + n, scores[w][n],
                              top);
  }
}

template <class S>
DEVICE void store_row_max(const float* tops, const Args& args, const WorkItem& item) {
  const int first = item.row_block * S::ROWS, rows = args.tokens * args.group;
  for (int i = threadIdx.x; i < S::ROWS && first + i < rows; i += 32)
    args.tops[(partial_row(args, item) + first + i) * 2] = tops[i];
}

// Compute the scores of one tile: pieces part .. part + K_PARTS - 1 of this block.
template <class S, class Load>
DEVICE void score_tile(float (&scores)[S::WARP_KEY_TILES][S::ROW_TILES][4], char* shared,
                       const AttentionWork<S::KEYS>& work, TileCursor<S, S::K_PARTS>& ahead,
                       int part, float scale, int tile, Load load) {
  const int warp = threadIdx.x / 32;
#pragma unroll 1
  for (int i = 0; i < S::K_PARTS; ++i, ++part) {
    advance_ring<S::K_STAGES>(part, ahead, work, SCORE, 32 * S::SCORE_WARPS, load);
    accumulate_scores<S>(scores, shared + S::K_AT + part % S::K_STAGES * S::K_STAGE_BYTES,
                         shared + S::Q_AT, i, warp);
  }
#pragma unroll
  for (int w = 0; w < S::WARP_KEY_TILES; ++w)
#pragma unroll
    for (int n = 0; n < S::ROW_TILES; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) scores[w][n][c] = __fmul_rn(scores[w][n][c], scale);
  if (!work.fully_visible(tile)) mask_scores<S>(scores, shared, tile, warp);
}

template <class S>
DEVICE void run_score_warps(char* shared, const AttentionWork<S::KEYS>& work, const Args& args,
                            int settled) {
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  constexpr int ALL = 32 * (S::SCORE_WARPS + S::VALUE_WARPS);
  const u32 stages = shared_address(shared + S::K_AT);
  auto load = [&](int stage, const TileCursor<S, S::K_PARTS>& at) {
    load_key_tile<S>(stages + stage * S::K_STAGE_BYTES, args.k, args.v, at, args.capacity, thread);
  };
  const int row = work.count ? find_query_row<S>(shared, args, work.items[0], warp) : -1;
  auto ahead = fill_ring<S::K_PARTS, S::K_STAGES, S>(work, settled, load, [&] {
    if (work.count) load_queries<S>(shared, args, row, warp);
  });
  float* running = (float*)(shared + S::RUNNING_MAX_AT) + warp * S::ROWS;  // one copy per warp
  int tile = 0;  // tiles so far, over all items
#pragma unroll 1
  for (int round = 0; round < work.count; ++round) {
    const WorkItem item = work.items[round], before = work.items[max_of(0, round - 1)];
    if (item.head != before.head || item.row_block != before.row_block) {
      load_queries<S>(shared, args, find_query_row<S>(shared, args, item, warp), warp);
      cp_async_commit();
      cp_async_wait_group<0>();
    }
    for (int i = lane; i < S::ROWS; i += 32) running[i] = NEG_INF;
#pragma unroll 1
    for (int at = work.items[round].tile; at < work.items[round].end; ++at, ++tile) {
      float scores[S::WARP_KEY_TILES][S::ROW_TILES][4] = {};
      score_tile<S>(scores, shared, work, ahead, tile * S::K_PARTS, args.scale, at, load);
      tile_row_max<S>(scores, (float*)(shared + S::TILE_MAX_AT + tile % 2 * S::TILE_MAX_SIZE),
                      warp);
      named_barrier_sync(SCORE, 32 * S::SCORE_WARPS);
      compute_weights<S>(scores, shared, tile % 2, warp);
      named_barrier_sync(WEIGHED, ALL);
    }
    __syncwarp();
    if (warp == 0) store_row_max<S>(running, args, work.items[round]);
  }
}

// Store one item's weighted sums of values, [rows, D].
template <class S>
DEVICE void store_sums(const float (&out)[S::WARP_DIMS / 16][S::ROW_TILES][4], const Args& args,
                       const WorkItem& item, int warp) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, rows = args.tokens * args.group;
#pragma unroll
  for (int n = 0; n < S::ROW_TILES; ++n)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int row = item.row_block * S::ROWS + n * 8 + t * 2 + c;
      if (row >= rows) continue;
      float* to = args.sums + (i64)(partial_row(args, item) + row) * S::D + warp * S::WARP_DIMS;
#pragma unroll
      for (int b = 0; b < S::WARP_DIMS / 32; ++b) {
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

// Store one item's sums of weights, added over the warps in order.
template <class S>
DEVICE void store_weight_sums(const float (&sums)[S::ROW_TILES], char* shared, const Args& args,
                              const WorkItem& item, int thread) {
  float* all = (float*)(shared + S::WEIGHT_SUM_AT);
#pragma unroll
  for (int n = 0; n < S::ROW_TILES; ++n) {
    float x = __fadd_rn(sums[n], __shfl_xor_sync(FULL_MASK, sums[n], 1));
    x = __fadd_rn(x, __shfl_xor_sync(FULL_MASK, x, 2));
    if (thread % 4 == 0) all[thread / 32 * S::ROWS + n * 8 + thread % 32 / 4] = x;
  }
  named_barrier_sync(GATHER, 32 * S::VALUE_WARPS);
  const int row = item.row_block * S::ROWS + thread;
  if (thread >= S::ROWS || row >= args.tokens * args.group) return;
  float x = all[thread];
#pragma unroll
  for (int w = 1; w < S::VALUE_WARPS; ++w) x = __fadd_rn(x, all[w * S::ROWS + thread]);
  args.tops[(partial_row(args, item) + row) * 2 + 1] = x;
}

template <class S>
DEVICE void rescale_sums(float (&out)[S::WARP_DIMS / 16][S::ROW_TILES][4],
                         float (&sums)[S::ROW_TILES], const float* rescales) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < S::ROW_TILES; ++n) {
    const float2 by = *(const float2*)(rescales + n * 8 + lane % 4 * 2);
    sums[n] = __fmul_rn(sums[n], rescales[n * 8 + lane / 4]);
#pragma unroll
    for (int d = 0; d < S::WARP_DIMS / 16; ++d)
#pragma unroll
      for (int i = 0; i < 4; ++i) out[d][n][i] = __fmul_rn(out[d][n][i], i % 2 ? by.y : by.x);
  }
}

template <class S>
DEVICE void run_value_warps(char* shared, const AttentionWork<S::KEYS>& work, const Args& args,
                            int settled) {
  const int thread = threadIdx.x - 32 * S::SCORE_WARPS, warp = thread / 32;
  constexpr int ALL = 32 * (S::SCORE_WARPS + S::VALUE_WARPS);
  const u32 stages = shared_address(shared + S::V_AT);
  auto load = [&](int stage, const TileCursor<S, S::V_PARTS>& at) {
    load_value_tile<S>(stages + stage * S::V_STAGE_BYTES, args.v, at, args.capacity, thread);
  };
  auto ahead = fill_ring<S::V_PARTS, S::V_STAGES, S>(work, settled, load, [] {});
  int tile = 0;  // so far, over all items
#pragma unroll 1
  for (int round = 0; round < work.count; ++round) {
    float out[S::WARP_DIMS / 16][S::ROW_TILES][4] = {}, sums[S::ROW_TILES] = {};
#pragma unroll 1
    for (int at = work.items[round].tile; at < work.items[round].end; ++at, ++tile) {
#pragma unroll S::V_PARTS > 2 ? 1 : 2
      for (int i = 0; i < S::V_PARTS; ++i) {
        const int part = tile * S::V_PARTS + i;
        char* stage = shared + S::V_AT +
                      (S::V_STAGES == S::V_PARTS ? i : part % S::V_STAGES) * S::V_STAGE_BYTES;
        advance_ring<S::V_STAGES>(part, ahead, work, i ? GATHER : WEIGHED,
                                  i ? 32 * S::VALUE_WARPS : ALL, load);
        if (!work.fully_visible(at)) {
          zero_nonfinite_values<S>(stage, work, at * S::KEYS + i * S::PART_KEYS, thread);
          named_barrier_sync(GATHER, 32 * S::VALUE_WARPS);
        }
        if (i == 0)
          rescale_sums<S>(out, sums, (float*)(shared + S::RESCALE_AT + tile % 2 * S::RESCALE_SIZE));
        accumulate_values<S>(out, sums, stage, (uint2*)(shared + S::P_AT + tile % 2 * S::P_SIZE), i,
                             warp);
      }
    }
    store_sums<S>(out, args, work.items[round], warp);
    store_weight_sums<S>(sums, shared, args, work.items[round], thread);
  }
}
#endif

// `sequences` sequences of `tokens` rows each. Planes are [units, n_kv, capacity, columns]
// (kv_storage.cuh). `width`: pages per row of the table. `shift`, `growing`: see `Chunks`. `room`:
// chunks of partial results allocated per sequence. This step writes keys and values from the
// sequence's first position on. first, last, positions, slots and older keys and values were
// written before the preceding kernel started, so they are read before griddep_wait().
template <int D, int Q8, int ROW_TILES, int SCORE_WARPS, int VALUE_WARPS, int K_PARTS, int V_PARTS,
          int K_STAGES, int V_STAGES, int ROTARY_PAIRS>
__global__ __launch_bounds__(32 * (SCORE_WARPS + VALUE_WARPS), 1) void attend_chunks(
    const u16* q, const char* keys, const char* values, const char* key_scales,
    const char* value_scales, const int* table, const i64* first, const i64* last,
    const i64* positions, const i64* slots, float* sums, float* tops, int tokens, int n_kv,
    int group, int width, int capacity, int room, int shift, int growing, int sequences,
    float scale) {
#if ARCH >= 800
  using S = AttentionConfig<D, Q8, ROW_TILES, SCORE_WARPS, VALUE_WARPS, K_PARTS, V_PARTS, K_STAGES,
                            V_STAGES, ROTARY_PAIRS>;
  extern __shared__ __align__(128) char shared[];
  __shared__ AttentionWork<S::KEYS> work;
  static_assert(sizeof work <= ATTENTION_WORK_BYTES, "attention.py leaves so much shared memory");
  griddep_launch_dependents();
  const int rows = tokens * group, row_blocks = (rows + S::ROWS - 1) / S::ROWS;
  if (threadIdx.x < 32) {
    const Chunks chunks = {shift, growing};
    const BlockShare own =
        work.assign_block(chunks, first, last, sequences, tokens, n_kv * row_blocks);
    const int row = own.sequence * tokens;
    work.build_items(chunks, span_of(first + row, last + row, tokens),
                     {table, width, (int)__ldcg(slots + row)}, capacity, n_kv, row_blocks, own);
  }
  const int only = sequences == 1 ? (int)__ldcg(positions) : 0;  // does not need `work.sequence`
  __syncthreads();
  const int row = work.sequence * tokens;
  const int settled = sequences == 1 ? only : (int)__ldcg(positions + row);
  const i64 partial = (i64)work.sequence * room * n_kv * rows;
  const Args args = {q + (i64)row * n_kv * group * D, first + row, last + row, sums + partial * D,
                     tops + partial * 2, {keys, key_scales}, {values, value_scales}, tokens, n_kv,
                     group, capacity, scale * LOG2E};
  if (threadIdx.x < 32 * SCORE_WARPS)
    run_score_warps<S>(shared, work, args, settled);
  else
    run_value_warps<S>(shared, work, args, settled);
#endif
}
