// y = x W^T for 1 to 16 rows x and a quantized W in packed order, one product a launch. One warp
// feeds a ring of stages in shared memory, the others multiply (see consume.cuh).
//
// Waiting cannot deadlock: a CTA waits only for CTAs with a lower block index, which start earlier.
#include "consume.cuh"
#include "q4_0.cuh"
#include "q4_1.cuh"
#include "q4_k.cuh"
#include "q5_0.cuh"
#include "q5_1.cuh"
#include "q5_k.cuh"
#include "q6_k.cuh"
#include "q8_0.cuh"

// Bytes a cycle at which a CTA asks for its first weights: little more than its share of the memory's
// rate (20 on an H200). All at once would stand in the way of what the kernels before still read.
constexpr int PACE = 23;

#if ARCH >= 900
template <class S>
DEVICE void copy_rows(const Work& w, int unit, u8* stage, u64* full) {
  bulk_copy(stage + S::WEIGHTS, w.rows + (i64)(unit % w.units) * S::ROWS_BYTES, S::ROWS_BYTES,
            full);
}
#endif

template <class F, int NT, int ROWS, int STAGES>
DEVICE void feed(const Work& w, u8* stages, u64* full, u64* empty, int cta, int lane) {
  using S = Stage<F, NT, ROWS>;
  const int begin = w.begin(cta), end = w.end(cta);
  auto weights = [&](int i) {
    const int u = begin + i, s = i % STAGES;
    u8* to = stages + s * S::BYTES;
#pragma unroll
    for (int half = 0; half < ROWS / GROUP; ++half) {
      const i64 group = (i64)(u / w.units) * (ROWS / GROUP) + half;
      const u8* from = w.weights + (group * w.units + u % w.units) * F::UNIT_BYTES;
#if ARCH >= 900
      bulk_copy(to + half * F::UNIT_BYTES, from, F::UNIT_BYTES, full + s);
#else
#pragma unroll 4
      for (int b = lane * 16; b < F::UNIT_BYTES; b += 512)
        copy16(to + half * F::UNIT_BYTES + b, from + b);
#endif
    }
  };
  auto rows = [&](int i) {
    const int u = begin + i, s = i % STAGES;
#if ARCH >= 900
    copy_rows<S>(w, u, stages + s * S::BYTES, full + s);
#else
    u8* to = stages + s * S::BYTES + S::WEIGHTS;
    const u8* from = w.rows + (i64)(u % w.units) * S::ROWS_BYTES;
#pragma unroll 4
    for (int b = lane * 16; b < S::ROWS_BYTES; b += 512) copy16(to + b, from + b);
    barrier_arrive_copied(full + s);
#endif
  };
#if ARCH >= 900
  if (lane) return;
#endif
  const int count = end - begin, first = count < STAGES ? count : STAGES;
  // Weights are there before the kernel that makes the rows ends.
#if ARCH >= 900
  const u32 began = cycles();
  for (int i = 0; i < first; ++i) {
    while (i > 1 && cycles() - began < (i - 1) * (S::WEIGHTS / PACE)) {
    }
    barrier_expect(full + i, S::FILL);
    weights(i);
  }
  grid_wait();
#else
  for (int i = 0; i < first; ++i) weights(i);
  grid_wait();
  for (int i = 0; i < first; ++i) rows(i);
#endif
  for (int i = first; i < count; ++i) {
    barrier_wait(empty + i % STAGES, (i / STAGES - 1) & 1);
#if ARCH >= 900
    barrier_expect(full + i % STAGES, S::FILL);
#endif
    weights(i);
    rows(i);
  }
  // Not before: a kernel that starts earlier takes places away from the CTAs of the one between.
  grid_launch();
  const int last = last_contributor(w, cta, begin, end);
  if (last == cta) return;
  u32* arrived = w.arrived + (end - 1) / w.units;
  if (lane == 0) {
    while (load_acquire(arrived) != (u32)(last - cta)) {
    }
    *arrived = 0;
    copy_engine_fence();
  }
#if ARCH < 900
  __syncwarp();
#endif
  for (int i = count; i < count + last - cta; ++i) {
    const int s = i % STAGES;
    const float* from = w.partial + (i64)(cta + 1 + i - count) * (LEFT<NT, ROWS> / 4);
    if (i >= STAGES) barrier_wait(empty + s, (i / STAGES - 1) & 1);
#if ARCH >= 900
    barrier_expect(full + s, LEFT<NT, ROWS>);
    bulk_copy(stages + s * S::BYTES, from, LEFT<NT, ROWS>, full + s);
#else
#pragma unroll 4
    for (int b = lane * 16; b < LEFT<NT, ROWS>; b += 512)
      copy16(stages + s * S::BYTES + b, (const u8*)from + b);
    barrier_arrive_copied(full + s);
#endif
  }
}

template <class F, int NT, int ROWS, int STAGES, class Out>
DEVICE void multiply(const Work& w, const Out& out, u8* shared, int cta) {
  using S = Stage<F, NT, ROWS>;
  u8* scratch = shared + STAGES * S::BYTES;
  float* pairs = (float*)(scratch + CONSUMERS * S::SCRATCH);
  u64* full = (u64*)((u8*)pairs + pair_bytes(NT));
  u64* empty = full + STAGES;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      barrier_init(full + s, ARCH >= 900 ? 1 : 32);
      barrier_init(empty + s, CONSUMERS);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (warp == CONSUMERS) {
    feed<F, NT, ROWS, STAGES>(w, shared, full, empty, cta, lane);
    return;
  }
  grid_wait();
#if ARCH >= 900
  if (threadIdx.x == 0) {  // the first rows: the copy warp may be busy with weights
    const int begin = w.begin(cta), count = min(w.end(cta) - begin, STAGES);
    for (int i = 0; i < count; ++i)
      copy_rows<S>(w, begin + i, shared + i * S::BYTES, full + i);
  }
#endif
  int used = 0;
  consume<F, NT, ROWS, STAGES, S::BYTES, S::SCRATCH>(w, out, shared, full, empty, used,
                                                     scratch + warp * S::SCRATCH, pairs, cta);
}

#define WORK \
  const u8 *weights, const u8 *rows, const float *row_scale, float *partial, u32 *arrived, \
      int units, int groups, int run

DEVICE int last_first() { return gridDim.x - 1 - blockIdx.x; }

// y [T, N], or its partial sums [slices, T, N]
template <class F, int NT, int ROWS, int STAGES>
__global__ __launch_bounds__(THREADS, 1) void linear(WORK, float* y, int n_rows, int slices,
                                                     int tokens) {
  extern __shared__ __align__(128) u8 shared[];
  const int cta = last_first();
  if (slices) y += (i64)(cta % slices) * tokens * n_rows;
  multiply<F, NT, ROWS, STAGES>(
      {weights, rows, row_scale, partial, arrived, units, groups, run, slices},
      Plain{y, n_rows, n_rows, tokens}, shared, cta);
}

// gelu(gate x) or silu(gate x), times up x, as input of the next product
template <class F, int NT, int ROWS, int STAGES>
__global__ __launch_bounds__(THREADS, 1) void gate_up(WORK, u8* y, int channels, int silu,
                                                      int tokens) {
  extern __shared__ __align__(128) u8 shared[];
  multiply<F, NT, ROWS, STAGES>({weights, rows, row_scale, partial, arrived, units, groups, run, 0},
                                Gated{y, channels, tokens, silu != 0}, shared, last_first());
}

// Two products of the same rows, side by side in y: CTAs from `others` on have the second.
template <class A, class B, int NT, int ROWS_A, int STAGES_A, int ROWS_B, int STAGES_B>
__global__ __launch_bounds__(THREADS, 1) void linear_two(
    WORK, const u8* weights_b, int units_b, int groups_b, int run_b, int others, float* y,
    int n_rows, int n_rows_b, int stride, int tokens) {
  extern __shared__ __align__(128) u8 shared[];
  if (blockIdx.x < others)
    multiply<A, NT, ROWS_A, STAGES_A>(
        {weights, rows, row_scale, partial, arrived, units, groups, run, 0},
        Plain{y, n_rows, stride, tokens}, shared, others - 1 - blockIdx.x);
  else
    multiply<B, NT, ROWS_B, STAGES_B>(
        {weights_b, rows, row_scale, partial + (i64)others * LEFT<2, 256> / 4, arrived + groups,
         units_b, groups_b, run_b, 0},
        Plain{y + n_rows, n_rows_b, stride, tokens}, shared, last_first());
}
