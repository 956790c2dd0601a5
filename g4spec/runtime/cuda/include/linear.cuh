// Products whose weights a copy warp brings through shared memory: what linear.cu and linear_wide.cu share.
//
// Waiting cannot deadlock: a CTA waits only for CTAs with a lower block index, which start earlier.
#pragma once
#include "consume.cuh"

// Bytes a cycle at which a CTA asks for its first weights: little more than its share of the memory's
// rate (20 on an H200). What stands in the memory's queue stands before what the kernels in front
// still read and write.
constexpr int PACE = 23;

// Threads of a kernel for several groups of rows. Where warps can hand registers on, those that
// multiply take what a whole group of warps beside them does without. A block has so many registers as
// it starts with: to take more than were given waits for ever.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr int WIDE_THREADS = 32 * (CONSUMERS + 4), STARTED_WITH = 65536 / WIDE_THREADS / 8 * 8;
template <int KEPT, int TAKEN>
DEVICE void share_registers(bool gives) {
  static_assert(4 * KEPT + CONSUMERS * TAKEN <= (CONSUMERS + 4) * STARTED_WITH, "");
  if (gives) fewer_registers<KEPT>();
  else more_registers<TAKEN>();
}
#else
constexpr int WIDE_THREADS = THREADS;
template <int KEPT, int TAKEN>
DEVICE void share_registers(bool) {}
#endif

// Groups of rows that there are.
template <int G>
DEVICE int groups(const Work& w) {
  return G == 1 ? 1 : w.row_groups;
}

// The units of a run, one after the other.
template <class F, class S, int HALVES>
struct Units {
  const u8* weights;  // of the first half of a group
  int k;              // unit of K

  DEVICE Units(const Work& w, const Run& run) {
    k = run.begin - run.group * w.units;
    weights = w.weights + ((i64)run.group * HALVES * w.units + k) * In<F>::WHOLE + In<F>::FIRST;
  }
  DEVICE void next(const Work& w) {
    weights += In<F>::WHOLE;
    if (++k < w.units) return;
    k = 0;
    weights += (i64)(HALVES - 1) * w.units * In<F>::WHOLE;
  }
  DEVICE void copy_weights(const Work& w, u8* to, u64* full, int lane) const {
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
      const u8* from = weights + (i64)half * w.units * In<F>::WHOLE;
#if ARCH >= 900
      bulk_copy_once(to + half * F::UNIT_BYTES, from, F::UNIT_BYTES, full);
#else
#pragma unroll 4
      for (int b = lane * 16; b < F::UNIT_BYTES; b += 512)
        copy16(to + half * F::UNIT_BYTES + b, from + b);
#endif
    }
  }
  template <int G>
  DEVICE void copy_rows(const Work& w, u8* to, u64* full, int lane) const {
    const u8* from = w.rows + (i64)k * S::ROWS_BYTES;
    to += S::WEIGHTS;
#if ARCH >= 900
    for (int g = 0; g < groups<G>(w); ++g)
      bulk_copy(to + g * S::ROWS_BYTES, from + g * (i64)w.units * S::ROWS_BYTES, S::ROWS_BYTES, full);
#else
    for (int g = 0; g < groups<G>(w); ++g, to += S::ROWS_BYTES, from += (i64)w.units * S::ROWS_BYTES)
#pragma unroll 4
      for (int b = lane * 16; b < S::ROWS_BYTES; b += 512) copy16(to + b, from + b);
    barrier_arrive_copied(full);
#endif
  }
};

// Until the slot that unit i comes to is empty.
template <int STAGES, int COUNT>
DEVICE void wait_empty(u64* full, int i) {
  i -= STAGES;
  barrier_wait(full + COUNT + i % COUNT, i / COUNT & 1);
}

template <class F, int NT, int ROWS, int STAGES, int G>
DEVICE void feed(const Work& w, u8* stages, u64* full, const Run& run, int lane) {
  using S = Stage<F, NT, ROWS, G>;
  constexpr int COUNT = RingOf<F, NT, ROWS, STAGES, G>::COUNT;
  const u32 fill = S::WEIGHTS + S::ROWS_BYTES * groups<G>(w);
  using U = Units<F, S, ROWS / GROUP>;
#if ARCH >= 900
  if (lane) return;
#endif
  const int count = run.end - run.begin, first = count < STAGES ? count : STAGES;
  U at(w, run);
  // Weights are there before the kernel that makes the rows ends.
#if ARCH >= 900
  const u32 began = cycles();
  for (int i = 0; i < first; ++i, at.next(w)) {
    while (cycles() - began < i * (S::WEIGHTS / PACE)) {
    }
    at.copy_weights(w, stages + i * S::BYTES, full + i, lane);
    barrier_expect(full + i, fill);
  }
  grid_wait();
#else
  for (int i = 0; i < first; ++i, at.next(w))
    at.copy_weights(w, stages + i * S::BYTES, full + i, lane);
  grid_wait();
  U early(w, run);
  for (int i = 0; i < first; ++i, early.next(w))
    early.template copy_rows<G>(w, stages + i * S::BYTES, full + i, lane);
#endif
  for (int i = first; i < count; ++i, at.next(w)) {
    u8* to = stages + i % STAGES * S::BYTES;
    u64* filled = full + i % COUNT;
    wait_empty<STAGES, COUNT>(full, i);
    at.copy_weights(w, to, filled, lane);
    at.template copy_rows<G>(w, to, filled, lane);
#if ARCH >= 900
    barrier_expect(filled, fill);
#endif
  }
  // Not before: a kernel that starts earlier takes places away from the CTAs of the one between.
  grid_launch();
  const int group = (run.end - 1) / w.units, last = last_contributor(w, run, group);
  if (last == run.cta) return;
  u32* arrived = w.arrived + group;
  if (lane == 0) {
    while (load_acquire(arrived) != (u32)(last - run.cta)) {
    }
    *arrived = 0;
    copy_engine_fence();
  }
#if ARCH < 900
  __syncwarp();
#endif
  for (int i = count; i < count + (last - run.cta) * G; ++i) {
    u8* to = stages + i % STAGES * S::BYTES;
    u64* filled = full + i % COUNT;
    const float* from = w.partial + (i64)((run.cta + 1) * G + i - count) * (LEFT<NT, ROWS> / 4);
    if (i >= STAGES) wait_empty<STAGES, COUNT>(full, i);
#if ARCH >= 900
    bulk_copy(to, from, LEFT<NT, ROWS>, filled);
    barrier_expect(filled, LEFT<NT, ROWS>);
#else
#pragma unroll 4
    for (int b = lane * 16; b < LEFT<NT, ROWS>; b += 512) copy16(to + b, (const u8*)from + b);
    barrier_arrive_copied(filled);
#endif
  }
}

template <class F, int NT, int ROWS, int STAGES, int G = 1, class Out>
DEVICE void multiply(const Work& w, const Out& out, u8* shared, int cta) {
  using S = Stage<F, NT, ROWS, G>;
  using R = RingOf<F, NT, ROWS, STAGES, G>;
  u8* scratch = shared + STAGES * S::BYTES;
  float* sums = (float*)(scratch + CONSUMERS * S::SCRATCH);
  u64* full = (u64*)((u8*)sums + sum_bytes(NT));
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < R::COUNT; ++i) {
      barrier_init(full + i, ARCH >= 900 ? 1 : 32);
      barrier_init(full + R::COUNT + i, ROWS / 32);
    }
    barrier_init_fence();
  }
  __syncthreads();
  const Run run(w, cta);
  if (warp >= CONSUMERS) {
    if constexpr (G > 1) share_registers<40, 232>(true);
    if (warp == CONSUMERS) feed<F, NT, ROWS, STAGES, G>(w, shared, full, run, lane);
    return;
  }
  if constexpr (G > 1) share_registers<40, 232>(false);
#if ARCH >= 900
  // The first rows, a unit each warp: the copy warp may be busy with weights.
  static_assert(STAGES <= CONSUMERS, "");
  Units<F, S, ROWS / GROUP> at(w, run);
  at.k = now((at.k + warp) % w.units);
  grid_wait();
  if (lane == 0 && warp < min(run.end - run.begin, STAGES))
    at.template copy_rows<G>(w, shared + warp * S::BYTES, full + warp, lane);
#else
  grid_wait();
#endif
  consume<F, NT, ROWS, STAGES, S::SCRATCH, G>(w, out, R{shared, full}, scratch + warp * S::SCRATCH,
                                              sums, run);
}

#define WORK \
  const u8 *weights, const u8 *rows, const float *row_scale, float *partial, u32 *arrived, \
      int units, int groups, int run

DEVICE int last_first() { return gridDim.x - 1 - blockIdx.x; }
