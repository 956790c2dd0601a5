// From logits [T, V] to tokens, as `g4spec.runtime.sampling` defines it.
//
// Candidates are 64-bit keys, larger for larger values and then for lower columns: no two are equal,
// so that a maximum does not depend on the order in which it is taken. NaN is above all numbers.
#include "random.cuh"
#include "reduce.cuh"

enum {
  THREADS = 256,  // of a block
  QUADS = 4,      // 16-byte loads of a thread
  SPAN = THREADS * QUADS * 4,  // columns of a block
  LAST = 512,     // threads that end a row of top-k
  PER = 16,       // keys of each
};

struct Sampling {  // in device memory
  u64 seed;
  float temperature, top_p, min_p;
  int top_k;
};

struct Logits {
  const float* z;          // [rows, columns], raw
  const i64* positions;    // [rows], of the rows; a choice goes `ahead` positions further
  const i64* tokens;       // [columns], ascending: the token of each; null: the column itself
  const u32* suppressed;   // bit per column, or null
  int columns, ahead;
  float scale, cap;        // a logit is cap tanh(scale z / cap), or scale z without cap

  DEVICE float value(float x) const {
    if (x == lowest()) return x;
    x *= scale;
    return cap > 0.0f ? cap * tanhf(x / cap) : x;
  }
  DEVICE u32 token(int column) const { return tokens ? (u32)tokens[column] : (u32)column; }
  // Four columns from `first` on; -inf where suppressed or out of range.
  DEVICE float4 load(int row, int first) const {
    const float* p = z + (i64)row * columns + first;
    float v[4];
    if (columns % 4 == 0 && first < columns) {
      const float4 x = __ldcg((const float4*)p);
      v[0] = x.x, v[1] = x.y, v[2] = x.z, v[3] = x.w;
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) v[e] = first + e < columns ? __ldcg(p + e) : lowest();
    }
    const u32 out = suppressed && first < columns ? suppressed[first / 32] >> first % 32 & 15 : 0;
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (out >> e & 1) v[e] = lowest();
    return {v[0], v[1], v[2], v[3]};
  }
  static DEVICE float lowest() { return __int_as_float(0xff800000); }
};

DEVICE u64 key_of(float value, int column) {  // above 0
  const u32 bits = value != value ? 0x7fffffffu : __float_as_uint(value + 0.0f);  // -0 is 0
  return (u64)(bits >> 31 ? ~bits : bits | 0x80000000u) << 32 | (0xffffffffu - (u32)column);
}
DEVICE float value_of(u64 key) {
  const u32 bits = (u32)(key >> 32);
  return __uint_as_float(bits >> 31 ? bits & 0x7fffffffu : ~bits);
}
DEVICE bool finite(u64 key) {  // 0 is not
  const float v = value_of(key);
  return v - v == 0.0f;
}
DEVICE int column_of(u64 key) { return (int)(0xffffffffu - (u32)key); }

struct Highest {
  DEVICE u64 operator()(u64 a, u64 b) const { return a > b ? a : b; }
};
DEVICE u64 highest_of_warp(u64 key) {
#pragma unroll
  for (int step = 16; step; step /= 2) key = Highest()(key, __shfl_xor_sync(FULL, key, step));
  return key;
}

// What is compared, of a logit. An infinite one is refused, as on the CPU, whatever the noise.
DEVICE float sampled(float value, const Sampling& s, float noise) {
  return __fdiv_rn(value, s.temperature) + noise;
}

#define LOGITS                                                                             \
  const float *z, const i64 *positions, const i64 *tokens, const u32 *suppressed, int columns, \
      int ahead, float scale, float cap
#define LOGITS_GIVEN {z, positions, tokens, suppressed, columns, ahead, scale, cap}

// The best key of each span of columns, [rows, blocks]. Without SAMPLED only values that exceed
// all before them are capped: the cap keeps their order.
template <int SAMPLED>
__global__ __launch_bounds__(THREADS) void best(LOGITS, const Sampling* sampling, u64* keys) {
  grid_launch();
  __shared__ u64 slots[THREADS / 32];
  const Logits logits = LOGITS_GIVEN;
  const int row = blockIdx.y, start = blockIdx.x * SPAN + threadIdx.x * 4;
  grid_wait();
  float4 x[QUADS];
#pragma unroll
  for (int j = 0; j < QUADS; ++j) x[j] = logits.load(row, start + j * THREADS * 4);
  const Sampling s = SAMPLED ? *sampling : Sampling{};
  const u64 position = SAMPLED ? (u64)(positions[row] + ahead) : 0;
  u64 key = 0;
  float most = Logits::lowest();
#pragma unroll
  for (int j = 0; j < QUADS; ++j) {
    const int first = start + j * THREADS * 4;
    if (first >= columns) break;
    const float v[4] = {x[j].x, x[j].y, x[j].z, x[j].w};
    uint4 words = {};
    if (SAMPLED && !tokens) words = noise_words(s.seed, position, first / 4);
    const u32 w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int column = first + e;
      if (SAMPLED) {
        if (column >= columns || v[e] == Logits::lowest()) continue;
        const float noise = tokens ? gumbel_of(s.seed, position, logits.token(column))
                                   : gumbel(w[e]);
        const float value = logits.value(v[e]);
        key = Highest()(key, key_of(sampled(value, s, noise), column));
      } else if (!(v[e] <= most)) {
        most = v[e];
        key = Highest()(key, key_of(logits.value(v[e]), column));
      }
    }
  }
  key = highest_of_warp(key);
  if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = key;
  __syncthreads();
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 1; i < THREADS / 32; ++i) key = Highest()(key, slots[i]);
    keys[(i64)row * gridDim.x + blockIdx.x] = key;
  }
}

struct Chosen {
  i64* ids;     // [rows]
  float* values;  // [rows], the logit of each choice
  int* bad;     // [rows], 1: there is no largest logit

  DEVICE void write(const Logits& logits, int row, u64 key, bool sampled) const {
    const bool good = finite(key);
    const int column = good ? column_of(key) : 0;
    ids[row] = logits.token(column);
    values[row] = sampled && good ? logits.value(logits.z[(i64)row * logits.columns + column])
                                  : value_of(key);
    bad[row] = !good;
  }
};

// The best of a row's `blocks` keys; one warp a row.
template <int SAMPLED>
__global__ void best_end(LOGITS, const u64* keys, int blocks, int rows, i64* ids, float* values,
                         int* bad) {
  grid_launch();
  grid_wait();
  const int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  if (row >= rows) return;
  u64 key = 0;
  for (int i = threadIdx.x % 32; i < blocks; i += 32)
    key = Highest()(key, __ldcg(keys + (i64)row * blocks + i));
  key = highest_of_warp(key);
  if (threadIdx.x % 32 == 0) Chosen{ids, values, bad}.write(LOGITS_GIVEN, row, key, SAMPLED);
}

// The k largest of a block's keys (N a thread, 0: none), in order -> `out`; how many there are.
// The k-th largest of the threads' own largest keys bounds them from below, and at most k threads
// hold anything above that. Ranks are counted, so the result does not depend on who comes first.
template <int BLOCK, int N>
DEVICE int select(const u64 (&keys)[N], int k, u64* out, u64* list, u64* heads, u64* bound,
                  int* count) {
  u64 head = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) head = Highest()(head, keys[i]);
  heads[threadIdx.x] = head;
  if (threadIdx.x == 0) *count = 0;
  __syncthreads();
  int rank = 0;
#pragma unroll 8
  for (int i = 0; i < BLOCK; ++i)
    rank += heads[i] > head || (heads[i] == head && i < (int)threadIdx.x);
  if (rank == min(k, BLOCK) - 1) *bound = head;
  __syncthreads();
  const u64 least = *bound ? *bound : 1;
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (keys[i] >= least) list[atomicAdd(count, 1)] = keys[i];
  __syncthreads();
  const int n = *count;
  for (int i = threadIdx.x; i < n; i += BLOCK) {
    int above = 0;
    for (int j = 0; j < n; ++j) above += list[j] > list[i];
    if (above < k) out[above] = list[i];
  }
  __syncthreads();
  return min(n, k);
}

// The top-k keys of each span of columns, in order, [rows, blocks, K]; 0 behind the last.
template <int K>  // room for the k of any sampler
__global__ __launch_bounds__(THREADS) void top(LOGITS, const Sampling* sampling, u64* keys) {
  grid_launch();
  __shared__ u64 list[K * QUADS * 4], heads[THREADS], bound;
  __shared__ int count;
  const Logits logits = LOGITS_GIVEN;
  const int row = blockIdx.y, start = blockIdx.x * SPAN + threadIdx.x * 4;
  grid_wait();
  const int k = sampling->top_k;
  u64 mine[QUADS * 4];
#pragma unroll
  for (int j = 0; j < QUADS; ++j) {
    const int first = start + j * THREADS * 4;
    const float4 x = logits.load(row, first);
    const float v[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int e = 0; e < 4; ++e)
      mine[j * 4 + e] = first + e < columns ? key_of(logits.value(v[e]), first + e) : 0;
  }
  u64* out = keys + ((i64)row * gridDim.x + blockIdx.x) * K;
  const int n = select<THREADS>(mine, k, out, list, heads, &bound, &count);
  for (int i = n + threadIdx.x; i < k; i += THREADS) out[i] = 0;
}

// How many of n candidates, best first, stay after top-p and min-p. One thread; `shares` scratch.
DEVICE int kept(const u64* best, int n, const Sampling& s, const float* shares) {
  int keep = n;
  if (s.top_p < 1.0f) {
    float total = 0, mass = 0;
    for (int i = 0; i < n; ++i) total += shares[i];
    for (keep = 0; keep < n; ++keep) {
      mass += shares[keep] / total;
      if (!(mass < s.top_p)) break;
    }
    keep = min(keep + 1, n);
  }
  if (s.min_p > 0.0f) {
    const float least = value_of(best[0]) + logf(s.min_p);
    while (keep > 1 && value_of(best[keep - 1]) < least) --keep;
  }
  return keep;
}

// The choice among the top k of a row, from those of its spans; one block a row.
template <int K>
__global__ __launch_bounds__(LAST) void top_end(LOGITS, const Sampling* sampling, const u64* keys,
                                                int blocks, i64* ids, float* values, int* bad) {
  grid_launch();
  __shared__ u64 list[K * PER], heads[LAST], best[K], bound;
  __shared__ float shares[K];
  __shared__ int count, keep;
  const Logits logits = LOGITS_GIVEN;
  const int row = blockIdx.x, me = threadIdx.x;
  grid_wait();
  const Sampling s = *sampling;
  u64 mine[PER];
#pragma unroll
  for (int i = 0; i < PER; ++i) {
    const int at = i * LAST + me;
    mine[i] = at < blocks * s.top_k
                  ? __ldcg(keys + ((i64)row * blocks + at / s.top_k) * K + at % s.top_k) : 0;
  }
  const int n = select<LAST>(mine, s.top_k, best, list, heads, &bound, &count);
  if (me < n) shares[me] = expf(value_of(best[me]) - value_of(best[0]));
  __syncthreads();
  if (me == 0) keep = kept(best, n, s, shares);
  __syncthreads();
  u64 key = 0;
  if (me < keep && value_of(best[me]) != Logits::lowest()) {
    const int column = column_of(best[me]);
    const float noise = gumbel_of(s.seed, (u64)(positions[row] + ahead), logits.token(column));
    key = key_of(sampled(value_of(best[me]), s, noise), column);
  }
  if (me == 0 && n > 0 && !finite(best[0])) key = best[0];  // NaN, or infinite
  key = highest_of_warp(key);
  if (me % 32 == 0) heads[me / 32] = key;
  __syncthreads();
  if (me == 0) {
    for (int i = 1; i < K / 32; ++i) key = Highest()(key, heads[i]);
    Chosen{ids, values, bad}.write(logits, row, key, true);
  }
}
