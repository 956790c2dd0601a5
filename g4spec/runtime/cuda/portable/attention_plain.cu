// Decode attention, phase 1, without tensor cores or asynchronous copies, for sm_70 and sm_75. Same
// results in the same places as attention.cu, in float32 arithmetic. blockIdx.y is the sequence; a
// block of PLAIN_THREADS threads handles PLAIN_ROWS rows and tiles of KEYS keys.
#include "attention_chunks.cuh"
#include "cache_types.cuh"

constexpr int KEYS = 64;  // per tile

// ROTARY_PAIRS: see attention_tiles.cuh.
template <int D, int Q8, int ROTARY_PAIRS>
DEVICE float key_at(const PlaneReader& k, const PlaneReader& v, i64 row, int d) {
  if (!ROTARY_PAIRS) return k.at<D, Q8>(row, d);
  const int half = d / (D / 2), inside = d % (D / 2);
  return inside < ROTARY_PAIRS
             ? k.at<ROTARY_PAIRS ? 2 * ROTARY_PAIRS : D, Q8>(row, half * ROTARY_PAIRS + inside)
             : v.at<D, Q8>(row, d);
}

struct SharedState {
  float scores[PLAIN_ROWS][KEYS], top[PLAIN_ROWS], sum[PLAIN_ROWS], rescale[PLAIN_ROWS];
  int first[PLAIN_ROWS], last[PLAIN_ROWS];
  int offset[PLAIN_ROWS];  // of a row's query in q; -1: no such row
};

// Scores of one tile. A thread computes key thread % 64 for rows thread / 64 * 4 .. + 3.
template <int D, int Q8, int ROTARY_PAIRS>
DEVICE void score(SharedState& s, const u16* q, const PlaneReader& k, const PlaneReader& v, i64 at,
                  int position, float scale) {
  const int key = threadIdx.x % KEYS, row = threadIdx.x / KEYS * 4;
  float dot[4] = {0, 0, 0, 0};
#pragma unroll 4
  for (int d = 0; d < D; ++d) {
    const float x = key_at<D, Q8, ROTARY_PAIRS>(k, v, at + key, d);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (s.offset[row + i] >= 0) dot[i] = fmaf(x, from_half(q[s.offset[row + i] + d]), dot[i]);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool seen = position + key >= s.first[row + i] && position + key <= s.last[row + i];
    s.scores[row + i][key] = seen ? dot[i] * scale : NEG_INF;
  }
}

// Online softmax of a tile: scores become weights. Each warp handles two rows.
DEVICE void scores_to_weights(SharedState& s) {
  const int lane = threadIdx.x % 32;
  for (int row = threadIdx.x / 32 * 2; row < threadIdx.x / 32 * 2 + 2; ++row) {
    float* x = s.scores[row];
    float top = fmaxf(x[lane], x[lane + 32]);
#pragma unroll
    for (int step = 16; step; step /= 2) top = fmaxf(top, __shfl_xor_sync(FULL_MASK, top, step));
    const float before = s.top[row];
    top = fmaxf(top, before);
    const float origin = top == NEG_INF ? 0.0f : top, rescale = exp2_approx(before - origin);
    x[lane] = exp2_approx(x[lane] - origin);
    x[lane + 32] = exp2_approx(x[lane + 32] - origin);
    float sum = x[lane] + x[lane + 32];
#pragma unroll
    for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(FULL_MASK, sum, step);
    __syncwarp();
    if (lane == 0)
      s.top[row] = top, s.rescale[row] = rescale, s.sum[row] = fmaf(s.sum[row], rescale, sum);
  }
}

// Initialize the state of an item's rows. `start`: first row of the sequence.
template <int D>
DEVICE void open_rows(SharedState& s, const i64* first, const i64* last, int start, int begin,
                      int head, int tokens, int n_kv, int group) {
  if (threadIdx.x >= PLAIN_ROWS) return;
  const int r = threadIdx.x, row = begin + r, token = start + row / group;
  const bool real = row < tokens * group;
  s.offset[r] = real ? (token * n_kv * group + head * group + row % group) * D : -1;
  s.first[r] = real ? (int)__ldcg(first + token) : 0;
  s.last[r] = real ? (int)__ldcg(last + token) : -1;
  s.top[r] = NEG_INF, s.sum[r] = 0;
}

template <int D, int Q8, int ROTARY_PAIRS>
__global__ __launch_bounds__(PLAIN_THREADS, 4) void attend_plain(
    const u16* q, const char* keys, const char* values, const u16* key_scales,
    const u16* value_scales, const int* table, const i64* first, const i64* last, const i64* slots,
    float* sums, float2* tops, int tokens, int n_kv, int group, int width, int capacity, int room,
    int shift, int growing, float scale) {
  griddep_launch_dependents();
  griddep_wait();
  __shared__ SharedState s;
  constexpr int DIMS_PER_THREAD = (D + PLAIN_THREADS - 1) / PLAIN_THREADS;  // dims per thread
  const PlaneReader k = {keys, key_scales}, v = {values, value_scales};
  const Chunks chunks = {shift, growing};
  const int start = blockIdx.y * tokens, rows = tokens * group;
  const Units units = {table, width, (int)__ldcg(slots + start)};
  const Span span = span_of(first + start, last + start, tokens);
  const int row_blocks = (rows + PLAIN_ROWS - 1) / PLAIN_ROWS;
  const int low = chunks.chunk_of(span.lo), high = chunks.chunk_of(span.hi);
  for (int i = blockIdx.x; i < (high - low + 1) * n_kv * row_blocks; i += gridDim.x) {
    const int begin = i % row_blocks * PLAIN_ROWS, head = i / row_blocks % n_kv;
    const int chunk = high - i / row_blocks / n_kv;
    const i64 place = (((i64)blockIdx.y * room + chunk - low) * n_kv + head) * rows + begin;
    open_rows<D>(s, first, last, start, begin, head, tokens, n_kv, group);
    __syncthreads();
    float out[PLAIN_ROWS][DIMS_PER_THREAD] = {};
    const int from = max_of(chunks.start(chunk), span.lo) / KEYS;
    const int to = min_of(chunks.start(chunk + 1) - 1, span.hi) / KEYS;
    for (int tile = from; tile <= to; ++tile) {
      const i64 kv_block = (i64)units.unit_of(tile * KEYS) * n_kv + head;
      const i64 at = kv_block * capacity + tile * KEYS % capacity;
      score<D, Q8, ROTARY_PAIRS>(s, q, k, v, at, tile * KEYS, scale * LOG2E);
      __syncthreads();
      scores_to_weights(s);
      __syncthreads();
#pragma unroll
      for (int j = 0; j < DIMS_PER_THREAD; ++j) {
        const int d = threadIdx.x + j * PLAIN_THREADS;
        if (d >= D) break;
#pragma unroll
        for (int r = 0; r < PLAIN_ROWS; ++r) out[r][j] *= s.rescale[r];
#pragma unroll 4  // NVRTC 13.2 would unroll all keys, and spill registers
        for (int key = 0; key < KEYS; ++key) {
          const float x = v.at<D, Q8>(at + key, d);
#pragma unroll
          for (int r = 0; r < PLAIN_ROWS; ++r) {  // values of masked keys may be NaN
            const float weight = s.scores[r][key];
            if (weight != 0.0f) out[r][j] = fmaf(weight, x, out[r][j]);
          }
        }
      }
      __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < PLAIN_ROWS; ++r)
#pragma unroll
      for (int j = 0; j < DIMS_PER_THREAD; ++j)
        if (threadIdx.x + j * PLAIN_THREADS < D && s.offset[r] >= 0)
          sums[(place + r) * D + threadIdx.x + j * PLAIN_THREADS] = out[r][j];
    if (threadIdx.x < PLAIN_ROWS && s.offset[threadIdx.x] >= 0)
      tops[place + threadIdx.x] = {s.top[threadIdx.x], s.sum[threadIdx.x]};
    __syncthreads();
  }
}
