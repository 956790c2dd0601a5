// GEMM for decode, producer side and kernel body (linear.cu, linear_wide.cu). One producer warp
// copies weights and activations into a ring of stages in shared memory: by bulk copies on sm_90
// and newer, by cp.async before. The consumer warps are in gemm_consumer.cuh.
//
// CTAs that wait for partial sums cannot deadlock: a CTA waits only for CTAs with a lower block
// index, which are scheduled earlier.
#pragma once
#include "gemm_consumer.cuh"

// Rate in bytes per cycle at which a CTA requests its first weights: slightly more than its share
// of the memory bandwidth (20 on an H200). Requests queued beyond that would delay the accesses of
// the preceding kernel, which may still run.
constexpr int PACE = 23;

// Threads of a kernel with several token groups. On sm_90a the producer is a whole warp group,
// which gives registers to the consumers (setmaxnreg). The total stays what the block was launched
// with: acquiring more than was released would hang.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr int WIDE_THREADS = 32 * (GEMM_CONSUMERS + GEMM_PRODUCER_WARPS);
constexpr int INITIAL_REGISTERS = 65536 / WIDE_THREADS / 8 * 8;
template <int KEPT, int TAKEN>
DEVICE void redistribute_registers(bool gives) {
  static_assert(GEMM_PRODUCER_WARPS * KEPT + GEMM_CONSUMERS * TAKEN <=
                    WIDE_THREADS / 32 * INITIAL_REGISTERS,
                "setmaxnreg.inc would wait forever for registers that nobody releases");
  if (gives)
    setmaxnreg_dec<KEPT>();
  else
    setmaxnreg_inc<TAKEN>();
}
#else
constexpr int WIDE_THREADS = GEMM_THREADS;
template <int KEPT, int TAKEN>
DEVICE void redistribute_registers(bool) {}
#endif

// Number of token groups in use.
template <int G>
DEVICE int row_group_count(const GemmWork& w) {
  return G == 1 ? 1 : w.row_groups;
}

// Iterates over the units of a CTA's range and copies them.
template <class F, class S, int HALVES>
struct ProducerCursor {
  const u8* weights;  // of the first 128 rows of the row group
  int k;              // unit of K

  DEVICE ProducerCursor(const GemmWork& w, const UnitRange& run) {
    k = run.begin - run.group * w.units;
    weights = w.weights + ((i64)run.group * HALVES * w.units + k) * PackedInput<F>::UNIT_STRIDE +
              PackedInput<F>::UNIT_OFFSET;
  }
  DEVICE void next(const GemmWork& w) {
    weights += PackedInput<F>::UNIT_STRIDE;
    if (++k < w.units) return;
    k = 0;
    weights += (i64)(HALVES - 1) * w.units * PackedInput<F>::UNIT_STRIDE;
  }
  DEVICE void copy_weights(const GemmWork& w, u8* to, u64* full, int lane) const {
#pragma unroll
    for (int half = 0; half < HALVES; ++half) {
      u8* place = to + S::WEIGHTS_AT + half * F::UNIT_BYTES;
      const u8* from = weights + (i64)half * w.units * PackedInput<F>::UNIT_STRIDE;
#if ARCH >= 900
      cp_async_bulk_evict_first(place, from, F::UNIT_BYTES, full);
#else
#pragma unroll 4
      for (int b = lane * 16; b < F::UNIT_BYTES; b += 512) cp_async16(place + b, from + b);
#endif
    }
  }
  // Called by one lane where bulk copies are used (sm_90 and newer), by all lanes before.
  static DEVICE void copy(u8* to, const u8* from, int bytes, u64* full, int lane) {
#if ARCH >= 900
    cp_async_bulk(to, from, bytes, full);
#else
#pragma unroll 4
    for (int b = lane * 16; b < bytes; b += 512) cp_async16(to + b, from + b);
#endif
  }
  template <int G>
  DEVICE void copy_rows(const GemmWork& w, u8* to, u64* full, int lane) const {
    const i64 group = (i64)w.units * S::ROWS_BYTES;
    const u8* from = w.rows;
    if constexpr (G == 1) {
      copy(to + S::WEIGHTS, from + (i64)k * S::ROWS_BYTES, S::ROWS_BYTES, full, lane);
    } else {
      const i64 tile = (i64)w.units * S::HALVES;
      const u8* halves = from + (i64)k * S::HALVES;
      const u8* sums =
          from + (i64)w.units * S::BLOCKS * (2 * F::SUMS) + (i64)k * S::GROUP_SUM_BYTES;
      for (int g = 0; g < row_group_count<G>(w); ++g, halves += group, sums += group) {
        copy(to + 2 * g * S::HALVES, halves, S::HALVES, full, lane);
        copy(to + (2 * g + 1) * S::HALVES, halves + tile, S::HALVES, full, lane);
        if constexpr (S::GROUP_SUM_BYTES > 0)
          copy(to + S::SUMS_AT + g * S::GROUP_SUM_BYTES, sums, S::GROUP_SUM_BYTES, full, lane);
      }
    }
#if ARCH < 900
    cp_async_mbarrier_arrive(full);
#endif
  }
};

// Wait until the slot of unit i has been released.
template <int STAGES, int COUNT>
DEVICE void wait_slot_empty(u64* full, int i) {
  i -= STAGES;
  mbarrier_wait(full + COUNT + i % COUNT, i / COUNT & 1);
}

template <class F, int NT, int ROWS, int STAGES, int G>
DEVICE void run_producer(const GemmWork& w, u8* stages, u64* full, const UnitRange& run, int lane) {
  using S = Stage<F, NT, ROWS, G>;
  constexpr int COUNT = RingOf<F, NT, ROWS, STAGES, G>::COUNT;
  const u32 fill = S::WEIGHTS + S::COPIED * row_group_count<G>(w);
  using U = ProducerCursor<F, S, ROWS / PACK_ROWS>;
#if ARCH >= 900
  if (lane) return;
#endif
  const int count = run.end - run.begin, first = count < STAGES ? count : STAGES;
  U at(w, run);
  // Weights are constant: copy them before the kernel that computes the activations ends.
#if ARCH >= 900
  const u32 began = clock_cycles();
  for (int i = 0; i < first; ++i, at.next(w)) {
    while (clock_cycles() - began < i * (S::WEIGHTS / PACE)) {
    }
    at.copy_weights(w, stages + i * S::BYTES, full + i, lane);
    mbarrier_arrive_expect_tx(full + i, fill);
  }
  griddep_wait();
#else
  for (int i = 0; i < first; ++i, at.next(w))
    at.copy_weights(w, stages + i * S::BYTES, full + i, lane);
  griddep_wait();
  U early(w, run);
  for (int i = 0; i < first; ++i, early.next(w))
    early.template copy_rows<G>(w, stages + i * S::BYTES, full + i, lane);
#endif
  for (int i = first; i < count; ++i, at.next(w)) {
    u8* to = stages + i % STAGES * S::BYTES;
    u64* filled = full + i % COUNT;
    wait_slot_empty<STAGES, COUNT>(full, i);
    at.copy_weights(w, to, filled, lane);
    at.template copy_rows<G>(w, to, filled, lane);
#if ARCH >= 900
    mbarrier_arrive_expect_tx(filled, fill);
#endif
  }
  // Not earlier: a dependent kernel that starts sooner would occupy SM resources that CTAs of this
  // grid need.
  griddep_launch_dependents();
  const int group = (run.end - 1) / w.units, last = last_contributor(w, run, group);
  if (last == run.cta) return;
  u32* arrived = w.arrived + group;
  if (lane == 0) {
    while (load_acquire(arrived) != (u32)(last - run.cta)) {
    }
    *arrived = 0;
    fence_proxy_async();
  }
#if ARCH < 900
  __syncwarp();
#endif
  for (int i = count; i < count + (last - run.cta) * G; ++i) {
    u8* to = stages + i % STAGES * S::BYTES;
    u64* filled = full + i % COUNT;
    const float* from =
        w.partial + (i64)((run.cta + 1) * G + i - count) * (PARTIAL_BYTES<NT, ROWS> / 4);
    if (i >= STAGES) wait_slot_empty<STAGES, COUNT>(full, i);
#if ARCH >= 900
    cp_async_bulk(to, from, PARTIAL_BYTES<NT, ROWS>, filled);
    mbarrier_arrive_expect_tx(filled, PARTIAL_BYTES<NT, ROWS>);
#else
#pragma unroll 4
    for (int b = lane * 16; b < PARTIAL_BYTES<NT, ROWS>; b += 512)
      cp_async16(to + b, (const u8*)from + b);
    cp_async_mbarrier_arrive(filled);
#endif
  }
}

// Offsets in dynamic shared memory, in bytes: the stages, scratch of the consumer warps, sums of the
// epilogue [warp][token], mbarriers of the ring, and the format's table, if it has one.
template <class F, int NT, int ROWS, int STAGES, int G = 1>
struct GemmShared {
  using S = Stage<F, NT, ROWS, G>;
  static constexpr int SCRATCH_AT = STAGES * S::BYTES;
  static constexpr int SUMS_AT = SCRATCH_AT + GEMM_CONSUMERS * S::SCRATCH;
  static constexpr int BARRIERS_AT = SUMS_AT + GEMM_CONSUMERS * 8 * NT * 4;
  static constexpr int TABLE_AT = BARRIERS_AT + 2 * STAGES * S::TEAMS * 8;
  static constexpr int BYTES = TABLE_AT + TABLE_BYTES<F>;
};

template <class F, int NT, int ROWS, int STAGES, int G = 1, bool WGMMA = false, class Out>
DEVICE void multiply(const GemmWork& w, const Out& out, u8* shared, int cta) {
  using S = Stage<F, NT, ROWS, G>;
  using R = RingOf<F, NT, ROWS, STAGES, G>;
  using At = GemmShared<F, NT, ROWS, STAGES, G>;
  u8* scratch = shared + At::SCRATCH_AT;
  float* sums = (float*)(shared + At::SUMS_AT);
  u64* full = (u64*)(shared + At::BARRIERS_AT);
  const int warp = uniform<WGMMA>(threadIdx.x / 32), lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < R::COUNT; ++i) {
      mbarrier_init(full + i, ARCH >= 900 ? 1 : 32);
      mbarrier_init(full + R::COUNT + i, ROWS / 32);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  const UnitRange run(w, cta);
  if (warp >= GEMM_CONSUMERS) {
    if constexpr (G > 1) redistribute_registers<40, 232>(true);
    if (warp == GEMM_CONSUMERS) run_producer<F, NT, ROWS, STAGES, G>(w, shared, full, run, lane);
    return;
  }
  if constexpr (G > 1) redistribute_registers<40, 232>(false);
  if constexpr (TABLE_BYTES<F> > 0) {
    F::fill_table(shared + At::TABLE_AT);
    consumers_sync();
  }
#if ARCH >= 900
  // Activations of the first STAGES units are copied by the consumers, one unit per warp: the
  // producer may still be issuing weights.
  static_assert(STAGES <= GEMM_CONSUMERS, "each consumer warp copies the activations of one stage");
  ProducerCursor<F, S, ROWS / PACK_ROWS> at(w, run);
  at.k = materialize((at.k + warp) % w.units);
  griddep_wait();
  if (lane == 0 && warp < min(run.end - run.begin, STAGES))
    at.template copy_rows<G>(w, shared + warp * S::BYTES, full + warp, lane);
#else
  griddep_wait();
#endif
  run_consumer<F, NT, ROWS, STAGES, S::SCRATCH, G, WGMMA>(w, out, R{shared, full},
                                                          scratch + warp * S::SCRATCH, sums, run);
}

#define GEMM_PARAMS                                                                        \
  const u8 *weights, const u8 *rows, const float *row_scale, float *partial, u32 *arrived, \
      int units, int groups, int run

DEVICE int reversed_block_index() { return gridDim.x - 1 - blockIdx.x; }
