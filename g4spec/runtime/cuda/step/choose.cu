// Sampling: from logits [T, V] to tokens, as `g4spec.ops.sampling` defines it.
//
// Rows of several sequences are handled in one launch, each with its sequence's sampler. There is
// one kernel per sampler mode. A batch with several modes launches all of theirs, and each kernel
// skips the rows of the other modes and writes nothing for them. First kernel of a mode: blocks
// find the best keys of a span of columns; second kernel: they are reduced over the row.
#include "gumbel_noise.cuh"
#include "logits.cuh"
#include "reduce.cuh"

struct Sampling {  // sampler of a sequence, in device memory
  u64 seed;
  float temperature, top_p, min_p;
  int top_k;
  float top_n_sigma;  // not read: torch applies it (choose.py)
  int mode;
};
static_assert(sizeof(Sampling) == SAMPLER_BYTES, "choose.py packs samplers of this size");

// True if the row's sampler has another mode. `all`: samplers [S]; null: every row has `mode`.
DEVICE bool is_other_mode(const Sampling* all, const Logits& logits, int row,
                          SampleMode::Value mode) {
  return all && all[logits.sequence(row)].mode != mode;
}

DEVICE float with_noise(float value, const Sampling& s, float noise) {
  return __fdiv_rn(value, s.temperature) + noise;
}

// Largest raw logit of a thread's columns, and whether any is NaN.
struct ThreadMax {
  float most;
  bool nan;

  DEVICE ThreadMax(const float (&v)[QUADS][4]) : most(NEG_INF), nan(false) {
#pragma unroll
    for (int j = 0; j < QUADS; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) most = fmaxf(most, v[j][e]), nan |= v[j][e] != v[j][e];
  }
};
struct MaxIgnoreNan {
  DEVICE float operator()(float a, float b) const { return fmaxf(a, b); }
};

// Best key of a thread's columns. Only logits that may tie with the warp's largest after capping
// are capped (tanh is expensive).
DEVICE u64 best_greedy(const Logits& logits, const float (&v)[QUADS][4], int start,
                       const ThreadMax& seen) {
  const float least = logits.tie_lower_bound(warp_reduce(seen.most, MaxIgnoreNan()));
  u64 key = 0;
#pragma unroll
  for (int j = 0; j < QUADS; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (v[j][e] >= least && v[j][e] != NEG_INF)
        key = MaxKey()(key, make_key(logits.value(v[j][e]), start + j * LOGIT_THREADS * 4 + e));
  return key;
}

// The same with Gumbel noise. `sure` is a noisy value that some lane reaches. A logit can only win
// if its noise g is large enough; since u >= exp(-exp(-g)) implies 1 - u <= exp(-g), one
// exponential rules out most logits. Only the others get their exact noise.
DEVICE u64 best_sampled(const Logits& logits, const float (&v)[QUADS][4], int row, int start,
                        const ThreadMax& seen, const Sampling& s, u64 position) {
  int best = 0;  // index of the thread's largest logit
#pragma unroll
  for (int i = QUADS * 4 - 1; i >= 0; --i)
    if (v[i / 4][i % 4] == seen.most) best = i;
  auto column_of = [&](int i) { return start + i / 4 * LOGIT_THREADS * 4 + i % 4; };
  float sure = NEG_INF;
  if (seen.most != sure) {
    const u32 word = noise_word(s.seed, position, column_of(best));
    sure = with_noise(logits.value(seen.most), s, gumbel(word));
  }
  sure = warp_reduce(sure, MaxIgnoreNan());
  const float slack = fabsf(sure) * 1e-6f + 1e-4f, inverse = 1.0f / s.temperature;
  u32 left = 0;
#pragma unroll
  for (int j = 0; j < QUADS; ++j) {
    const uint4 words = noise_words(s.seed, position, column_of(4 * j) / 4);
    const u32 w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float most = __expf(logits.upper_bound(v[j][e]) * inverse - sure + slack);
      if ((float)(0xffffffu - (w[e] >> 8)) <= most * 0x1.004p24f + 1.0f) left |= 1u << (4 * j + e);
    }
  }
  u64 key = 0;
  for (; left; left &= left - 1) {
    const int column = column_of(__ffs(left) - 1);
    const float x = logits.load(row, column);
    if (x == NEG_INF) continue;
    const u32 word = noise_word(s.seed, position, column);
    key = MaxKey()(key, make_key(with_noise(logits.value(x), s, gumbel(word)), column));
  }
  return key;
}

// Best key of each span of columns -> keys [rows, blocks].
template <int MODE>
__global__ __launch_bounds__(LOGIT_THREADS, MODE == SampleMode::SAMPLED ? 4 : 8) void best(
    LOGITS, const Sampling* sampling, u64* keys) {
  griddep_launch_dependents();
  __shared__ u64 slots[LOGIT_THREADS / 32];
  const Logits logits = LOGITS_GIVEN;
  const int row = blockIdx.y, start = blockIdx.x * LOGIT_SPAN + threadIdx.x * 4;
  griddep_wait();
  if (is_other_mode(sampling, logits, row, (SampleMode::Value)MODE)) return;
  float v[QUADS][4];
  logits.load(v, row, start);
  const ThreadMax seen(v);
  u64 key;
  if constexpr (MODE == SampleMode::SAMPLED)
    key = best_sampled(logits, v, row, start, seen, sampling[logits.sequence(row)],
                       logits.position(row));
  else
    key = best_greedy(logits, v, start, seen);
  if (seen.nan ||
      (MODE == SampleMode::SAMPLED && isinf(logits.value(seen.most)) && seen.most > 0.0f))
    key = make_key(QUIET_NAN, 0);  // the host reports the row as invalid
  key = warp_max_key(key);
  if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = key;
  __syncthreads();
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 1; i < LOGIT_THREADS / 32; ++i) key = MaxKey()(key, slots[i]);
    keys[(i64)row * gridDim.x + blockIdx.x] = key;
  }
}

struct ChoiceOutput {
  i64* ids;       // [rows]
  float* values;  // [rows], the logit of each choice
  int* bad;       // `RowFault` of each row, at its `Logits::row_index`

  DEVICE void write(const Logits& logits, int row, u64 key, bool sampled) const {
    const bool good = finite(key);
    const int column = good ? column_of(key) : 0;
    ids[row] = column;
    values[row] = sampled && good ? logits.value(logits.z[(i64)row * logits.columns + column])
                                  : value_of(key);
    const bool none = !key || value_of(key) == NEG_INF;
    bad[logits.row_index(row)] = good                         ? RowFault::NONE
                                 : none && logits.suppressed ? RowFault::SUPPRESSED
                                                             : RowFault::NOT_FINITE;
  }
};

// Best of a row's `blocks` keys; one warp per row.
template <int MODE>
__global__ void best_end(LOGITS, const Sampling* sampling, const u64* keys, int blocks, int rows,
                         i64* ids, float* values, int* bad) {
  griddep_launch_dependents();
  griddep_wait();
  const Logits logits = LOGITS_GIVEN;
  const int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  if (row >= rows || is_other_mode(sampling, logits, row, (SampleMode::Value)MODE)) return;
  u64 key = 0;
  for (int i = threadIdx.x % 32; i < blocks; i += 32)
    key = MaxKey()(key, __ldcg(keys + (i64)row * blocks + i));
  key = warp_max_key(key);
  if (threadIdx.x % 32 == 0)
    ChoiceOutput{ids, values, bad}.write(logits, row, key, MODE == SampleMode::SAMPLED);
}

// At least the top-k keys of each span of columns -> keys [rows, blocks, K], padded with 0. k is
// the sampler's top_k, or K without samplers.
template <int K>
__global__ __launch_bounds__(LOGIT_THREADS) void top(LOGITS, const Sampling* sampling, u64* keys) {
  griddep_launch_dependents();
  __shared__ u64 list[K * QUADS * 4];
  __shared__ int count;
  const Logits logits = LOGITS_GIVEN;
  const int row = blockIdx.y, start = blockIdx.x * LOGIT_SPAN + threadIdx.x * 4;
  griddep_wait();
  if (is_other_mode(sampling, logits, row, SampleMode::TOP)) return;
  float v[QUADS][4];
  logits.load(v, row, start);
  const int k = sampling ? sampling[logits.sequence(row)].top_k : K;
  u64 mine[QUADS * 4];
#pragma unroll
  for (int i = 0; i < QUADS * 4; ++i) {
    const int column = start + i / 4 * LOGIT_THREADS * 4 + i % 4;
    mine[i] = column < columns ? make_key(logits.value(v[i / 4][i % 4]), column) : 0;
  }
  u64* out = keys + ((i64)row * gridDim.x + blockIdx.x) * K;
  const int n = collect_candidates(mine, k, list, &count);
  if (n > K) sort_top_k(list, n, k, out);
  const int filled = n > K ? k : n;
  for (int i = threadIdx.x; i < K; i += LOGIT_THREADS)
    if (i >= filled) out[i] = 0;
    else if (n <= K) out[i] = list[i];
}

// Number of candidates that remain after top-p and min-p, of n sorted best first. Called by one
// warp; lane l handles candidates from K / 32 * l on.
template <int K>
DEVICE int count_kept(const u64* best, int n, const Sampling& s) {
  constexpr int EACH = K / 32;
  const int lane = threadIdx.x % 32;
  float upto[EACH], sum = 0;  // cumulative probability mass within the lane
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int at = lane * EACH + i;
    upto[i] = sum += at < n ? expf(value_of(best[at]) - value_of(best[0])) : 0.0f;
  }
  float before = sum;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float other = __shfl_up_sync(FULL_MASK, before, step);
    if (lane >= step) before += other;
  }
  const float total = __shfl_sync(FULL_MASK, before, 31);
  before -= sum;
  const float least = s.min_p > 0.0f ? value_of(best[0]) + logf(s.min_p) : NEG_INF;
  int below = 0, likely = 0;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int at = lane * EACH + i;
    below +=
        __popc(__ballot_sync(FULL_MASK, at < n && __fdiv_rn(before + upto[i], total) < s.top_p));
    likely += __popc(__ballot_sync(FULL_MASK, at < n && value_of(best[at]) >= least));
  }
  return min(min(s.top_p < 1.0f ? below + 1 : n, n), likely);
}

// Choose among the top k of a row, from the keys of its spans; one block per row.
template <int K>
__global__ __launch_bounds__(TOP_THREADS) void top_end(LOGITS, const Sampling* sampling,
                                                       const u64* keys, int blocks, i64* ids,
                                                       float* values, int* bad) {
  griddep_launch_dependents();
  __shared__ u64 list[K * TOP_KEYS], best[K], winners[K / 32];
  __shared__ int count, keep;
  const Logits logits = LOGITS_GIVEN;
  const int row = blockIdx.x, me = threadIdx.x;
  griddep_wait();
  if (is_other_mode(sampling, logits, row, SampleMode::TOP)) return;
  const Sampling s = sampling[logits.sequence(row)];
  const u64 position = logits.position(row);
  u64 mine[TOP_KEYS];
#pragma unroll
  for (int i = 0; i < TOP_KEYS; ++i) {
    // Each thread takes a different rank of every span: if one thread held many of the largest
    // keys, collect_candidates would keep all of its keys.
    const int at = i * TOP_THREADS + me, block = at / K, slot = (at + block * 5) % K;
    mine[i] = block < blocks ? __ldcg(keys + ((i64)row * blocks + block) * K + slot) : 0;
  }
  const int found = collect_candidates(mine, s.top_k, list, &count), n = min(found, s.top_k);
  sort_top_k(list, found, s.top_k, best);
  __syncthreads();
  u64 key = 0;
  if (me < n && value_of(best[me]) != NEG_INF) {
    const int column = column_of(best[me]);
    const float noise = gumbel_of(s.seed, position, column);
    key = make_key(with_noise(value_of(best[me]), s, noise), column);
  }
  if (me >= TOP_THREADS - 32) {
    const int stay = n ? count_kept<K>(best, n, s) : 0;
    if (me == TOP_THREADS - 1) keep = stay;
  }
  __syncthreads();
  if (me >= keep) key = 0;
  if (me == 0 && n > 0 && !finite(best[0])) key = best[0];  // NaN or infinite
  key = warp_max_key(key);
  if (me < K && me % 32 == 0) winners[me / 32] = key;
  __syncthreads();
  if (me == 0) {
    for (int i = 1; i < K / 32; ++i) key = MaxKey()(key, winners[i]);
    ChoiceOutput{ids, values, bad}.write(logits, row, key, true);
  }
}
