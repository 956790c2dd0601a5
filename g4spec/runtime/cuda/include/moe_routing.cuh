// Routing of a step's rows to experts. All CTAs compute router scores together. Up to 16 rows, every
// CTA then chooses the experts itself, which is faster than broadcasting the choice. For more rows,
// the CTA that finishes the last scores of four rows chooses for them. Every CTA builds the list of
// visits itself, in shared memory.
#pragma once
#include "packed_rows.cuh"
#include "ptx.cuh"

constexpr int TILE_ROWS = 8;    // rows per MMA
constexpr int ROUTER_ROWS = 4;  // rows of a job that computes router scores

// Up to TILE_ROWS rows that use the same expert.
struct Visit {
  u16 expert, count;
  u16 pair[TILE_ROWS];  // row * K + slot, where slot is the expert's rank (0 .. K - 1) for the row
};

// Consecutive visits of one expert, for which its weights are read once.
struct VisitRun {
  u16 first, count;
};

// The routing of up to ROWS rows. The sum over experts of ceil(pairs / TILE_ROWS) is at most
// MAX_VISITS.
template <int EXPERTS, int K, int ROWS>
struct Routing {
  static constexpr int PAIRS = ROWS * K, USED = PAIRS < EXPERTS ? PAIRS : EXPERTS;
  static constexpr int MAX_VISITS = (PAIRS + (TILE_ROWS - 1) * USED) / TILE_ROWS;
  static constexpr int WORDS = (ROWS + 31) / 32;
  Visit visits[MAX_VISITS];  // by expert, then row
  VisitRun runs[ROWS > GROUP_ROWS ? MAX_VISITS : 1];
  float weight[PAIRS];       // router weight of each pair
  u32 rows[EXPERTS][WORDS];  // bit mask of the rows that use each expert
  u16 expert[PAIRS];         // expert of each pair
  u16 first[EXPERTS];        // first visit of each expert
  int count, n_runs;         // number of visits, and of their runs
};

// Warp sums of four values: lanes 0, 8, 16, 24 get the sums of s[0] .. s[3].
DEVICE float warp_reduce4(const float (&s)[4], int lane) {
  const bool upper = lane & 16, right = lane & 8;
  const float a = (upper ? s[2] : s[0]) + __shfl_xor_sync(FULL_MASK, upper ? s[0] : s[2], 16);
  const float b = (upper ? s[3] : s[1]) + __shfl_xor_sync(FULL_MASK, upper ? s[1] : s[3], 16);
  float v = (right ? b : a) + __shfl_xor_sync(FULL_MASK, right ? a : b, 8);
#pragma unroll
  for (int step = 4; step; step /= 2) v += __shfl_xor_sync(FULL_MASK, v, step);
  return v;
}

// Router scores gate [EXPERTS, width] * (rms_norm(x) * norm / sqrt(width)). A job computes 4
// experts for up to 4 rows: job j has experts from 4 (j % BLOCKS) on and rows from 4 (j / BLOCKS)
// on.
template <int EXPERTS, int WARPS, int LOADS>
struct RouterScores {
  static constexpr int BLOCKS = (EXPERTS + 3) / 4, THREADS = 32 * WARPS, PARTS = WARPS * 20;
  const float *x, *gate, *norm;
  float* scores;  // [rows, EXPERTS]
  float eps;
  int rows, width;
  float4 w[4][LOADS];

  static DEVICE int row_groups(int rows) { return (rows + ROUTER_ROWS - 1) / ROUTER_ROWS; }
  static DEVICE int jobs(int rows) { return BLOCKS * row_groups(rows); }

  DEVICE float4 at(const float* p, int j) const {
    const int i = j * THREADS + threadIdx.x;
    return i < width / 4 ? __ldcg((const float4*)p + i) : float4{0, 0, 0, 0};
  }

  DEVICE void load(int job) {  // load weights only; may run before griddep_wait()
    float4 n[LOADS];
#pragma unroll
    for (int j = 0; j < LOADS; ++j) n[j] = at(norm, j);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int expert = job % BLOCKS * 4 + e;
#pragma unroll
      for (int j = 0; j < LOADS; ++j)
        w[e][j] = expert < EXPERTS ? mul4(at(gate + (i64)expert * width, j), n[j])
                                   : float4{0, 0, 0, 0};
    }
  }

  // `parts`: [WARPS][4 rows][4 experts, squares] in shared memory, PARTS floats.
  DEVICE void run(int job, float* parts) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = job / BLOCKS * 4;
    float4 v[4][LOADS];
#pragma unroll
    for (int r = 0; r < 4; ++r)
#pragma unroll
      for (int j = 0; j < LOADS; ++j)
        v[r][j] = first + r < rows ? at(x + (i64)(first + r) * width, j) : float4{0, 0, 0, 0};
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      if (first + r >= rows) break;
      float s[4] = {0, 0, 0, 0}, squares = 0;
#pragma unroll
      for (int j = 0; j < LOADS; ++j) {
        squares += square4(v[r][j]);
#pragma unroll
        for (int e = 0; e < 4; ++e) s[e] += sum4(mul4(v[r][j], w[e][j]));
      }
      const float dot = warp_reduce4(s, lane);
#pragma unroll
      for (int step = 16; step; step /= 2) squares += __shfl_xor_sync(FULL_MASK, squares, step);
      float* mine = parts + (warp * 4 + r) * 5;
      if (lane % 8 == 0) mine[lane / 8] = dot;
      if (lane == 0) mine[4] = squares;
    }
  }

  // Called by one warp after all warps have called `run`.
  DEVICE void finish(int job, const float* parts, int lane) const {
    const int r = lane / 4, e = lane % 4;
    const int row = job / BLOCKS * 4 + r, expert = job % BLOCKS * 4 + e;
    if (r < 4 && row < rows && expert < EXPERTS) {
      float dot = 0, squares = 0;
#pragma unroll
      for (int i = 0; i < WARPS; ++i) {
        dot += parts[(i * 4 + r) * 5 + e];
        squares += parts[(i * 4 + r) * 5 + 4];
      }
      const float n = (float)width;
      scores[row * EXPERTS + expert] = dot * rsqrtf(squares / n + eps) * rsqrtf(n);
    }
    __syncwarp();
  }
};

// Called by one warp: lane s < K gets the s-th best expert of a row (the lowest index among equals)
// and its weight.
template <int EXPERTS, int K>
DEVICE void choose_experts(const float* scores, const float* gains, int lane, int& expert,
                           float& weight) {
  constexpr int PER = (EXPERTS + 31) / 32;
  u32 key[PER];
#pragma unroll
  for (int i = 0; i < PER; ++i)
    key[i] = i * 32 + lane < EXPERTS ? float_to_ordered(__ldcg(scores + i * 32 + lane)) : 0;
  float score = 0;
#pragma unroll
  for (int s = 0; s < K; ++s) {
    u32 best = key[0];
#pragma unroll
    for (int i = 1; i < PER; ++i) best = max(best, key[i]);
    const u32 most = __reduce_max_sync(FULL_MASK, best);
    u32 mine = EXPERTS - 1;
#pragma unroll
    for (int i = PER - 1; i >= 0; --i)
      if (key[i] == most) mine = min(i * 32 + lane, EXPERTS - 1);
    const int winner = __reduce_min_sync(FULL_MASK, mine);
    if (lane == s) expert = winner, score = ordered_to_float(most);
#pragma unroll
    for (int i = 0; i < PER; ++i)
      if (winner == i * 32 + lane) key[i] = 0;
  }
  const float e = expf(score - __shfl_sync(FULL_MASK, score, 0));
  float sum = __shfl_sync(FULL_MASK, e, 0);
#pragma unroll
  for (int s = 1; s < K; ++s) sum += __shfl_sync(FULL_MASK, e, s);
  weight = lane < K ? e / sum * gains[expert] : 0.0f;
}

// Inclusive prefix sum over the lanes of a warp.
DEVICE int prefix_sum(int sum, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_sync(FULL_MASK, sum, max(lane - step, 0));
    if (lane >= step) sum += before;
  }
  return sum;
}

// Count the visits of each expert from `rows`; write all of `visits` but the pairs, and runs of at
// most TILES visits. Called by one warp.
template <int TILES, int EXPERTS, int K, int ROWS>
DEVICE void count_visits(Routing<EXPERTS, K, ROWS>& r, int lane) {
  int count = 0, n_runs = 0;
  for (int begin = 0; begin < EXPERTS; begin += 32) {
    const int expert = begin + lane;
    int pairs = 0;
    if (expert < EXPERTS)
#pragma unroll
      for (int word = 0; word < r.WORDS; ++word) pairs += __popc(r.rows[expert][word]);
    const int visits = (pairs + TILE_ROWS - 1) / TILE_ROWS;
    const int runs = (visits + TILES - 1) / TILES;
    // Both prefix sums in one: at most 32 x 16 visits.
    const int ends = prefix_sum(visits | runs << 16, lane), all = __shfl_sync(FULL_MASK, ends, 31);
    const int first = count + (ends & 0xffff) - visits, first_run = n_runs + (ends >> 16) - runs;
    if (expert < EXPERTS) r.first[expert] = first;
    for (int i = 0; i < visits; ++i) {
      r.visits[first + i].expert = expert;
      r.visits[first + i].count = min(pairs - i * TILE_ROWS, TILE_ROWS);
    }
    for (int i = 0; TILES > 1 && i < runs; ++i)
      r.runs[first_run + i] = {(u16)(first + i * TILES), (u16)min(visits - i * TILES, TILES)};
    count += all & 0xffff, n_runs += all >> 16;
  }
  if (lane == 0) r.count = count, r.n_runs = n_runs;
}

// Write pair `pair` into its visit, after `count_visits`. An expert's rows are in ascending order.
template <int EXPERTS, int K, int ROWS>
DEVICE void place_pair(Routing<EXPERTS, K, ROWS>& r, int pair) {
  const int row = pair / K, expert = r.expert[pair];
  int rank = 0;
#pragma unroll
  for (int word = 0; word < r.WORDS; ++word) {
    const int bits = min(max(row - word * 32, 0), 32);  // rows of this word that precede the row
    rank += __popc(r.rows[expert][word] & (bits == 32 ? FULL_MASK : (1u << bits) - 1));
  }
  r.visits[r.first[expert] + rank / TILE_ROWS].pair[rank % TILE_ROWS] = pair;
}
