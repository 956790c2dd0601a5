// y = x W^T for 1 to 16 rows x and a quantized W in packed order.
//
// The work is a list of units, [group of ROWS weights][unit of K], cut into equal runs, one a CTA.
// One warp feeds a ring of stages in shared memory, the others multiply. A run that ends or begins
// inside a group leaves a partial sum; the CTA with the group's first unit adds those that follow,
// in order of K, and writes the result. Which CTA does what depends on the matrix alone, never on
// the number of rows, so a row's bits do not depend on the rows beside it.
//
// Waiting cannot deadlock: a CTA waits only for CTAs with a lower block index, which start earlier.
#include "product.cuh"
#include "q4_0.cuh"
#include "q4_1.cuh"
#include "q4_k.cuh"
#include "q5_0.cuh"
#include "q5_1.cuh"
#include "q5_k.cuh"
#include "q6_k.cuh"
#include "q8_0.cuh"

constexpr int CONSUMERS = 8;  // warps: teams of ROWS / 32, which share the K of a unit
constexpr int THREADS = 32 * (CONSUMERS + 1);

DEVICE void consumers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(32 * CONSUMERS) : "memory"); }

struct Work {
  const u8* weights;       // [groups of 128][units][F::UNIT_BYTES]
  const u8* rows;          // [units][F::UNIT / 64][ACT_BYTES * NT]
  const float* row_scale;  // [16] or null
  float* partial;          // [CTAs][2 * NT * 4][threads of a group]
  u32* arrived;            // [groups], zero before and after
  int units, groups, run;  // units of K, groups of ROWS, units a CTA
};

// Results leave through one of these: value of weight row n for tokens m and m + 1.
struct Plain {
  static constexpr bool PAIRS = false;
  float* y;  // [T, N]
  int n_rows, tokens;

  template <int NT, int ROWS>
  DEVICE void write(const Acc<NT>& acc, int group, const float* row_scale, u8*, float*,
                    int warp, int lane) const {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int m = nt * 8 + 2 * t + j;
        if (m >= tokens) continue;
        const float s = row_scale ? row_scale[m] : 1.0f;
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          const int n = group * ROWS + warp * 32 + q * 8 + g;
          if (n < n_rows) y[(i64)m * n_rows + n] = s * acc[q / 2][nt][(q % 2) * 2 + j];
        }
      }
  }
};

// gelu(gate) * up, where tile 0 of a warp holds gates and tile 1 the rows of up beside them. The
// result is what the next product reads: see "Rows" in g4spec/runtime/cuda/rows.py.
struct GatedGelu {
  static constexpr bool PAIRS = true;
  static constexpr float STORED = 1.0f / 64;  // of the value, as half; the row scale is 64
  u8* y;  // [channels / 64][ACT_BYTES * NT]
  int channels, tokens;

  static DEVICE float gelu(float x) {
    const float inner = 0.7978845608028654f * (x + 0.044715f * (x * x * x));
    return 0.5f * x * (1.0f + tanhf(inner));
  }

  // A warp's 16 channels are one k16 of the result. `sums`: [warp][token], for `write_pairs`.
  template <int NT, int ROWS>
  DEVICE void write(const Acc<NT>& acc, int group, const float* row_scale, u8* scratch,
                    float* sums, int warp, int lane) const {
    const int g = lane / 4, t = lane % 4, k16 = group * (ROWS / 32) + warp, s = k16 % 4;
    u16* halves = (u16*)scratch;  // [lane of the fragment][nt][4]
    __syncwarp();
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int m = nt * 8 + 2 * t + j % 2, channel = g + (j / 2) * 8;
        const float scale = row_scale && m < tokens ? row_scale[m] : 1.0f;
        const float h = gelu(scale * acc[0][nt][j]) * (scale * acc[1][nt][j]);
        halves[(((m % 8) * 4 + channel / 4) * NT + nt) * 4 + channel % 4] =
            to_half(m < tokens ? h * STORED : 0.0f);
      }
    __syncwarp();
    u8* block = y + (i64)(k16 / 4) * ACT_BYTES * NT;
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      const uint2 v = *(const uint2*)(halves + (lane * NT + nt) * 4);
      float sum = from_half(v.x) + from_half(v.x >> 16) + from_half(v.y) + from_half(v.y >> 16);
      sum += __shfl_xor_sync(FULL, sum, 1);
      sum += __shfl_xor_sync(FULL, sum, 2);
      if (t == 0) sums[warp * 8 * NT + nt * 8 + g] = -1024.0f * sum;
      if (k16 * 16 >= channels) continue;
      const int at = NT == 1 ? ((s / 2) * 32 + lane) * 8 + (s % 2) * 4
                             : (s * 32 + lane) * 8 + nt * 4;
      *(uint2*)((u16*)block + at) = v;
      if (t == 0) ((float*)(block + 1024 * NT))[s * 8 * NT + nt * 8 + g] = -1024.0f * sum;
    }
  }

  // Sums of 32 channels: two warps'.
  template <int NT, int ROWS>
  DEVICE void write_pairs(int group, const float* sums, int warp, int lane) const {
    const int k16 = group * (ROWS / 32) + warp;
    if (warp % 2 || lane >= 8 * NT || k16 * 16 >= channels) return;
    float* n32 = (float*)(y + (i64)(k16 / 4) * ACT_BYTES * NT + 1152 * NT);
    n32[k16 % 4 / 2 * 8 * NT + lane] =
        sums[warp * 8 * NT + lane] + sums[(warp + 1) * 8 * NT + lane];
  }
};

template <class F, int NT, int ROWS, int STAGES>
struct Shared {
  static constexpr int WEIGHTS = F::UNIT_BYTES * (ROWS / GROUP);
  static constexpr int ROWS_BYTES = F::UNIT / 64 * ACT_BYTES * NT;
  static constexpr int STAGE = WEIGHTS + ROWS_BYTES;
  static constexpr int TEAMS = CONSUMERS * 32 / ROWS;
  // of a warp: factors of a unit, the sums of a team, or an epilogue's
  static constexpr int OTHER = TEAMS > 1 ? 1024 * NT : 512 * NT;
  static constexpr int SCRATCH = F::SCRATCH / TEAMS > OTHER ? F::SCRATCH / TEAMS : OTHER;
  static constexpr int PAIRS = CONSUMERS * 8 * NT * 4;
  static constexpr int BYTES = STAGES * STAGE + CONSUMERS * SCRATCH + PAIRS + 16 * STAGES;
};

template <class F, int NT, int ROWS, int STAGES>
DEVICE void feed(const Work& w, u8* stages, u64* full, u64* empty, int begin, int end, int lane) {
  using S = Shared<F, NT, ROWS, STAGES>;
  auto weights = [&](int i) {
    const int u = begin + i, s = i % STAGES;
    u8* to = stages + s * S::STAGE;
#pragma unroll
    for (int half = 0; half < ROWS / GROUP; ++half) {
      const i64 group = (i64)(u / w.units) * (ROWS / GROUP) + half;
      const u8* from = w.weights + (group * w.units + u % w.units) * F::UNIT_BYTES;
#if ARCH >= 900
      bulk_copy(to + half * F::UNIT_BYTES, from, F::UNIT_BYTES, full + s);
#else
      for (int b = lane * 16; b < F::UNIT_BYTES; b += 512) copy16(to + half * F::UNIT_BYTES + b, from + b);
#endif
    }
  };
  auto rows = [&](int i) {
    const int u = begin + i, s = i % STAGES;
    u8* to = stages + s * S::STAGE + S::WEIGHTS;
    const u8* from = w.rows + (i64)(u % w.units) * S::ROWS_BYTES;
#if ARCH >= 900
    bulk_copy(to, from, S::ROWS_BYTES, full + s);
#else
    for (int b = lane * 16; b < S::ROWS_BYTES; b += 512) copy16(to + b, from + b);
    barrier_arrive_copied(full + s);
#endif
  };
#if ARCH >= 900
  if (lane) return;
#endif
  const int count = end - begin, first = count < STAGES ? count : STAGES;
  for (int i = 0; i < first; ++i) {  // weights are there before the kernel that makes the rows ends
#if ARCH >= 900
    barrier_expect(full + i, S::STAGE);
#endif
    weights(i);
  }
  grid_wait();
  for (int i = 0; i < first; ++i) rows(i);
  for (int i = first; i < count; ++i) {
    barrier_wait(empty + i % STAGES, (i / STAGES - 1) & 1);
#if ARCH >= 900
    barrier_expect(full + i % STAGES, S::STAGE);
#endif
    weights(i);
    rows(i);
  }
  // Not before: a kernel that starts earlier takes places away from the CTAs of the one between.
  grid_launch();
}

// What the CTAs after this one have left of a group, in order of K, read two at a time.
template <int NT, int ROWS>
DEVICE void gather(const Work& w, Acc<NT>& acc, int group, int cta, bool owner, int thread) {
  const int last = ((group + 1) * w.units - 1) / w.run;
  if (threadIdx.x == 0) {
    while (load_acquire(w.arrived + group) != (u32)(last - cta)) {
    }
    w.arrived[group] = 0;
  }
  consumers_sync();
  if (!owner) return;
  for (int c = cta + 1; c <= last; c += 2) {
    const float* from = w.partial + (i64)c * ROWS * 8 * NT + thread;
    float a[8 * NT], b[8 * NT];
#pragma unroll
    for (int i = 0; i < 8 * NT; ++i) {
      a[i] = __ldcg(from + i * ROWS);
      b[i] = c < last ? __ldcg(from + (i + 8 * NT) * ROWS) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < 8 * NT; ++i) acc[i / (4 * NT)][i / 4 % NT][i % 4] += a[i];
    if (c == last) break;
#pragma unroll
    for (int i = 0; i < 8 * NT; ++i) acc[i / (4 * NT)][i / 4 % NT][i % 4] += b[i];
  }
}

template <int NT, int ROWS>
DEVICE void leave(const Work& w, const Acc<NT>& acc, int group, int cta, bool owner, int thread) {
  if (owner) {
    float* to = w.partial + (i64)cta * ROWS * 8 * NT + thread;
#pragma unroll
    for (int i = 0; i < 8 * NT; ++i) __stcg(to + i * ROWS, acc[i / (4 * NT)][i / 4 % NT][i % 4]);
  }
  consumers_sync();
  if (threadIdx.x == 0) add_release(w.arrived + group, 1);
}

template <class F, int NT, int ROWS, int STAGES, class Out>
DEVICE void multiply(const Work& w, const Out& out, u8* shared) {
  using S = Shared<F, NT, ROWS, STAGES>;
  u8* stages = shared;
  u8* scratch = stages + STAGES * S::STAGE;
  float* pairs = (float*)(scratch + CONSUMERS * S::SCRATCH);
  u64* full = (u64*)((u8*)pairs + S::PAIRS);
  u64* empty = full + STAGES;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  constexpr int WARPS = ROWS / 32, TEAMS = S::TEAMS;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(full + s, ARCH >= 900 ? 1 : 32);
      barrier_init(empty + s, CONSUMERS);
    }
    barrier_init_fence();
  }
  __syncthreads();
  const int cta = gridDim.x - 1 - blockIdx.x;
  const int begin = cta * w.run, end = min(begin + w.run, w.units * w.groups);
  if (warp == CONSUMERS) {
    feed<F, NT, ROWS, STAGES>(w, stages, full, empty, begin, end, lane);
    return;
  }
  grid_wait();
  const int team = warp / WARPS, part = warp % WARPS;
  u8* mine = scratch + warp * S::SCRATCH;
  for (int i = 0; begin + i < end;) {
    const int group = (begin + i) / w.units, first = (begin + i) % w.units;
    const int until = min(i + w.units - first, end - begin);
    Acc<NT> acc = {};
    for (; i < until; ++i) {
      const int s = i % STAGES;
      barrier_wait(full + s, (i / STAGES) & 1);
      const u8* stage = stages + s * S::STAGE;
      F::template multiply<NT, TEAMS>(acc, stage + part / 4 * F::UNIT_BYTES, stage + S::WEIGHTS,
                                      mine, part % 4, lane, team);
      __syncwarp();
      if (lane == 0) barrier_arrive(empty + s);
    }
    if constexpr (TEAMS > 1) {
      float* slot = (float*)mine + lane;
      if (team) {
        __syncwarp();
#pragma unroll
        for (int j = 0; j < 8 * NT; ++j) slot[j * 32] = acc[j / (4 * NT)][j / 4 % NT][j % 4];
      }
      consumers_sync();
      if (team == 0) {
#pragma unroll
        for (int j = 0; j < 8 * NT; ++j)
          acc[j / (4 * NT)][j / 4 % NT][j % 4] += slot[WARPS * S::SCRATCH / 4 + j * 32];
      }
    }
    const bool owner = team == 0;
    if (first != 0) {
      leave<NT, ROWS>(w, acc, group, cta, owner, part * 32 + lane);
      continue;
    }
    if ((begin + i) % w.units) gather<NT, ROWS>(w, acc, group, cta, owner, part * 32 + lane);
    if (owner) out.template write<NT, ROWS>(acc, group, w.row_scale, mine, pairs, part, lane);
    if (TEAMS > 1 || Out::PAIRS) consumers_sync();  // what the teams exchanged has been read
    if constexpr (Out::PAIRS) {
      if (owner) out.template write_pairs<NT, ROWS>(group, pairs, part, lane);
      consumers_sync();
    }
  }
}

#define WORK \
  const u8 *weights, const u8 *rows, const float *row_scale, float *partial, u32 *arrived, \
      int units, int groups, int run

// y [T, N]
template <class F, int NT, int ROWS, int STAGES>
__global__ __launch_bounds__(THREADS) void linear(WORK, float* y, int n_rows, int tokens) {
  extern __shared__ __align__(128) u8 shared[];
  multiply<F, NT, ROWS, STAGES>({weights, rows, row_scale, partial, arrived, units, groups, run},
                                Plain{y, n_rows, tokens}, shared);
}

// gelu(gate x) * up x as input of the next product
template <class F, int NT, int ROWS, int STAGES>
__global__ __launch_bounds__(THREADS) void gate_up(WORK, u8* y, int channels, int tokens) {
  extern __shared__ __align__(128) u8 shared[];
  multiply<F, NT, ROWS, STAGES>({weights, rows, row_scale, partial, arrived, units, groups, run},
                                GatedGelu{y, channels, tokens}, shared);
}
