// GEMM for decode, consumer side: eight warps multiply the units that the producer warp
// (gemm_pipeline.cuh) copied to shared memory, and store the results.
//
// Work decomposition. The units of a matrix form a list [group of ROWS weight rows][unit of K].
//   split-K   (slices > 0)   each row group is cut into `slices` CTAs; the reader of y adds their sums.
//   stream-K  (slices == 0)  the list is cut into equal ranges of units, one per CTA. A range that begins
//                            or ends inside a row group leaves a partial sum in global memory. The CTA
//                            with the group's first unit adds the partial sums that follow, in order of
//                            K, and stores the result; its producer warp copies them like further stages.
// The decomposition depends on the matrix and the GPU, never on the number of tokens, so a token's bits
// do not depend on the other tokens of the step.
//
// Warps form TEAMS = 256 / ROWS teams of ROWS / 32 warps; teams take turns with units and add their
// sums at the end of a group. With G > 1 a CTA multiplies G groups of 16 tokens with the same
// weights; partial sums and sums exchanged between teams are kept per token group. WGMMA: wgmma
// (`multiply_wgmma`) instead of mma.sync.
#pragma once
#include "activations.cuh"
#include "gemm_tile.cuh"
#include "mbarrier.cuh"

// A number that is equal in all lanes; with IT the compiler learns that (needed around wgmma).
template <bool IT>
DEVICE int uniform(int x) {
  return IT ? __shfl_sync(FULL_MASK, x, 0) : x;
}

DEVICE void consumers_sync() { named_barrier_sync<1, 32 * GEMM_CONSUMERS>(); }

struct GemmWork {
  const u8* weights;       // [groups of 128][units][PackedInput<F>::UNIT_STRIDE]
  const u8* rows;          // [G][units][PackedInput<F>::ROWS * NT]
  const float* row_scale;  // [16 G] or null
  float* partial;          // [CTAs][G][2 * NT * 4][threads of a group]
  u32* arrived;            // [groups] counters of partial sums; zero before and after the kernel
  int units, groups, run;  // units of K, row groups, units per CTA (stream-K)
  int slices;              // split-K factor; 0: stream-K
  int row_groups = 1;      // token groups in use, at most G
};

// Range of units of a CTA. Computed before griddep_wait(), because integer divisions are slow.
struct UnitRange {
  int cta, begin, end, group;  // group: row group of unit `begin`

  DEVICE UnitRange(const GemmWork& w, int cta) : cta(cta) {
    if (w.slices) {
      const int of = cta / w.slices, slice = cta - of * w.slices;
      begin = of * w.units + slice * w.units / w.slices;
      end = of * w.units + (slice + 1) * w.units / w.slices;
      group = of;
    } else {
      begin = cta * w.run, end = min(begin + w.run, w.units * w.groups);
      group = begin / w.units;
    }
    begin = materialize(begin), end = materialize(end), group = materialize(group);
  }
};

// Output scales of a lane's tokens 8 nt + 2 t and + 1. Loaded at the start, applied at the end.
template <int NT>
struct RowScales {
  float of[NT][2];

  DEVICE RowScales(const float* row_scale, int tokens, int lane) {
#pragma unroll
    for (int i = 0; i < 2 * NT; ++i) {
      const int m = i / 2 * 8 + lane % 4 * 2 + i % 2;
      of[i / 2][i % 2] = row_scale && m < tokens ? __ldcg(row_scale + m) : 1.0f;
    }
  }
};

// Epilogues: StoreFloat and StoreGated.

// Store float32 results, y [tokens, n_rows].
struct StoreFloat {
  static constexpr bool SUMS = false;
  float* y;  // row m begins at m * stride
  int n_rows, stride, tokens;

  DEVICE StoreFloat of(int g) const {
    return {y + (i64)g * 16 * stride, n_rows, stride, tokens - 16 * g};
  }

  template <int NT, int ROWS>
  DEVICE void write(const Acc<NT>& acc, int group, const RowScales<NT>& scales, u8*, float*,
                    int warp, int lane) const {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int m = nt * 8 + 2 * t + j;
        if (m >= tokens) continue;
        const float s = scales.of[nt][j];
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          const int n = group * ROWS + warp * 32 + q * 8 + g;
          if (n < n_rows) y[(i64)m * stride + n] = s * acc[q / 2][nt][(q % 2) * 2 + j];
        }
      }
  }
};

// Store gelu(gate) * up or silu(gate) * up as packed activations of the next GEMM (packed_rows.py).
// Weights interleave 16 gate rows and 16 up rows: tile 0 of a warp holds gates, tile 1 the ups of
// the same channels.
struct StoreGated {
  static constexpr bool SUMS = true;
  u8* y;  // [G][channels / 64][ACT_BYTES * NT]
  int channels, tokens;
  bool silu, swizzled;  // swizzled: layout of y, for more than 16 tokens

  DEVICE StoreGated of(int g) const {
    return {y + (i64)g * (channels / 64) * (2 * ACT_BYTES), channels, tokens - 16 * g, silu,
            swizzled};
  }

  DEVICE float activated(float x) const { return times_sigmoid(x, silu ? x : gelu_sigmoid_arg(x)); }

  // A warp's 16 channels are one k16 step of the result. Also stores their sums to `sums`
  // [warp][token].
  template <int NT, int ROWS>
  DEVICE void write(const Acc<NT>& acc, int group, const RowScales<NT>& scales, u8* scratch,
                    float* sums, int warp, int lane) const {
    const int g = lane / 4, t = lane % 4, k16 = group * (ROWS / 32) + warp, s = k16 % 4;
    u16* halves = (u16*)scratch;  // [lane of the fragment][nt][4]
    __syncwarp();
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int m = nt * 8 + 2 * t + j % 2, channel = g + (j / 2) * 8;
        const float scale = scales.of[nt][j % 2];
        const float h = activated(scale * acc[0][nt][j]) * (scale * acc[1][nt][j]);
        halves[(((m % 8) * 4 + channel / 4) * NT + nt) * 4 + channel % 4] =
            to_half(m < tokens ? h * (1.0f / GATED_SCALE) : 0.0f);
      }
    __syncwarp();
    u8* block = y + (i64)(k16 / 4) * ACT_BYTES * NT;
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      const uint2 v = *(const uint2*)(halves + (lane * NT + nt) * 4);
      float sum = from_half(v.x) + from_half(v.x >> 16) + from_half(v.y) + from_half(v.y >> 16);
      sum += __shfl_xor_sync(FULL_MASK, sum, 1);
      sum += __shfl_xor_sync(FULL_MASK, sum, 2);
      if (t == 0) sums[warp * 8 * NT + nt * 8 + g] = sum;
      if (k16 * 16 >= channels || tokens <= 0) continue;
      if (swizzled) {
        const u32 at = swizzled_word_offset(channels / 64, k16 / 4, nt * 8 + g, 2 * s, t);
        *(u32*)(y + at) = v.x, *(u32*)(y + (at ^ NEXT_CHUNK)) = v.y;
        continue;
      }
      const int at = NT == 1 ? ((s / 2) * 32 + lane) * 8 + (s % 2) * 4
                             : (s * 32 + lane) * 8 + nt * 4;
      *(uint2*)((u16*)block + at) = v;
    }
  }

  // Store the sums of 16, 32 and 64 channels, from those of four warps.
  template <int NT, int ROWS>
  DEVICE void write_sums(int group, const float* sums, int warp, int lane) const {
    const int k16 = group * (ROWS / 32) + warp;
    if (warp % 4 || lane >= 8 * NT || k16 * 16 >= channels || tokens <= 0) return;
    u8* to = swizzled ? y : y + (i64)(k16 / 4) * ACT_BYTES * NT;
    const float* of = sums + warp * 8 * NT + lane;
    const float a = of[0], b = of[8 * NT], c = of[16 * NT], d = of[24 * NT];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const SumOffsets at =
          swizzled ? SumOffsets(channels / 64, k16 / 4, lane, half) : SumOffsets(NT, lane, half);
      at.store32(to, half ? c : a, half ? d : b);
      if (half == 0) at.store64(to, a + b, c + d);
    }
  }
};

// Bytes of the activation sums that a format reads per 8 tokens and 64 columns; 0 for formats
// without G > 1.
template <class F, class = void>
struct FormatSums {
  static constexpr int BYTES = 0;
};
template <class F>
struct FormatSums<F, decltype(void(F::SUMS))> {
  static constexpr int BYTES = F::SUMS_BYTES;
};
template <class F>
constexpr int format_sum_bytes() {
  return FormatSums<F>::BYTES;
}

// Bytes of a partial sum of a row group, per token group.
template <int NT, int ROWS>
constexpr int PARTIAL_BYTES = ROWS * 8 * NT * 4;

// Layout of a pipeline stage in shared memory. G == 1: weights, activations, on 128 bytes, because bulk
// copies to other addresses are slower. G > 1: halves of activations [tiles of all token groups][blocks
// of 64 k], weights, activation sums [G][blocks].
template <class F, int NT, int ROWS, int G = 1>
struct Stage {
  static constexpr int WEIGHTS = F::UNIT_BYTES * (ROWS / PACK_ROWS);
  static constexpr int ROWS_BYTES = PackedInput<F>::ROWS * NT;  // of a group of rows, in memory
  static constexpr int BLOCKS = F::UNIT / 64, HALVES = TILE_BYTES * BLOCKS;    // HALVES: of a tile
  static constexpr int GROUP_SUM_BYTES = format_sum_bytes<F>() * NT * BLOCKS;  // of a group
  static constexpr int COPIED = G > 1 ? HALVES * NT + GROUP_SUM_BYTES : ROWS_BYTES;  // of a group
  static constexpr int WEIGHTS_AT = G > 1 ? HALVES * NT * G : 0;
  static constexpr int SUMS_AT = WEIGHTS_AT + WEIGHTS;
  static constexpr int FILL = WEIGHTS + COPIED * G, ALIGN = G > 1 ? 1024 : 128;
  static constexpr int BYTES =
      ((FILL > PARTIAL_BYTES<NT, ROWS> ? FILL : PARTIAL_BYTES<NT, ROWS>)+ALIGN - 1) / ALIGN * ALIGN;
  static_assert(FILL % 16 == 0 && WEIGHTS % 16 == 0, "bulk copies need multiples of 16 bytes");
  static constexpr int TEAMS = GEMM_CONSUMERS * 32 / ROWS;
  static_assert(TEAMS == 1 || TEAMS == 2, "reduce_teams adds two teams");
  // Scratch per warp: factors of a unit, a team's sums, or the epilogue's values.
  static constexpr int EXCHANGE_BYTES = TEAMS > 1 ? 1024 * NT : 512 * NT;
  static constexpr int SCRATCH = F::SCRATCH > EXCHANGE_BYTES ? F::SCRATCH : EXCHANGE_BYTES;
};

// Last CTA whose partial sum this CTA has to add to row group `group`, the last one of its range.
// Returns its own index if there is none: the range does not hold the group's first unit, or ends
// with its last.
DEVICE int last_contributor(const GemmWork& w, const UnitRange& run, int group) {
  const int from = group * w.units, to = from + w.units;
  if (w.slices || run.end == to || from < run.begin) return run.cta;
  return (to - 1) / w.run;
}

template <int NT, int ROWS, int G>
DEVICE void publish_partial(const GemmWork& w, const Acc<NT * G>& acc, int group, int cta,
                            bool owner, int thread) {
  if (owner) {
    float* to = w.partial + (i64)cta * ROWS * 8 * NT * G + thread;
#pragma unroll
    for (int g = 0; g < G; ++g)
#pragma unroll
      for (int i = 0; i < 8 * NT; ++i)
        __stcg(to + (g * 8 * NT + i) * ROWS, acc[i / (4 * NT)][g * NT + i / 4 % NT][i % 4]);
  }
  fence_proxy_async();
  consumers_sync();
  if (threadIdx.x == 0) atomic_add_release(w.arrived + group, 1);
}

// Ring of STAGES slots of SLOT bytes. Unit n is for team n % TEAMS, in slot n % STAGES. Its
// mbarrier is number n % COUNT, so that only one team waits on each: with a barrier per slot, a
// team could not tell from the parity whether the slot holds its own unit or the other team's.
template <int STAGES, int SLOT, int TEAMS>
struct Ring {
  static constexpr int COUNT = STAGES * TEAMS;
  const u8* slots;
  u64* full;  // [COUNT] full barriers, then [COUNT] empty barriers
  const u8* slot;
  int at;
  u32 phase;

  DEVICE void seek(int n) {
    at = n % COUNT, phase = n / COUNT & 1;
    slot = slots + n % STAGES * SLOT;
  }
  DEVICE void wait() const { mbarrier_wait(full + at, phase); }
  DEVICE void release() const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(full + COUNT + at);
  }
  DEVICE void next() {  // to the team's next unit
    at += TEAMS;
    if (at >= COUNT) at -= COUNT, phase ^= 1;
    slot = slots + (TEAMS > 1 && at >= STAGES ? at - STAGES : at) * SLOT;
  }
};

template <class F, int NT, int ROWS, int STAGES, int G = 1>
using RingOf = Ring<STAGES, Stage<F, NT, ROWS, G>::BYTES, Stage<F, NT, ROWS, G>::TEAMS>;

// acc of token group `g` of team 0 += that of team 1, through scratch. `mine`: this warp's scratch, SCRATCH bytes
// before the next warp's. Called by all consumer warps.
template <int NT, int WARPS, int SCRATCH, int N>
DEVICE void reduce_teams(Acc<N>& acc, int g, u8* mine, int team, int lane) {
  float* slot = (float*)mine + lane;
  if (team) {
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 8 * NT; ++j) slot[j * 32] = acc[j / (4 * NT)][g * NT + j / 4 % NT][j % 4];
  }
  consumers_sync();
  if (team == 0) {
#pragma unroll
    for (int j = 0; j < 8 * NT; ++j)
      acc[j / (4 * NT)][g * NT + j / 4 % NT][j % 4] += slot[WARPS * SCRATCH / 4 + j * 32];
  }
}

// Bytes of a format's table in shared memory, after the barriers.
template <class F, class = void>
constexpr int TABLE_BYTES = 0;
template <class F>
constexpr int TABLE_BYTES<F, decltype(void(F::TABLE_BYTES))> = F::TABLE_BYTES;

template <class F, int NT>
DEVICE auto lane_of(u8* mine, int part, int lane, const u8* table) {
  if constexpr (TABLE_BYTES<F> > 0)
    return typename F::template Lane<NT>(mine, part, lane, table);
  else
    return typename F::template Lane<NT>(mine, part, lane);
}

// Main loop of the consumer warps. `mine`: this warp's scratch.
template <class F, int NT, int ROWS, int STAGES, int SCRATCH, int G = 1, bool WGMMA = false,
          class Out>
DEVICE void run_consumer(const GemmWork& w, const Out& out, RingOf<F, NT, ROWS, STAGES, G> ring,
                         u8* mine, float* sums, const UnitRange& run) {
  using S = Stage<F, NT, ROWS, G>;
  constexpr int WARPS = ROWS / 32, TEAMS = S::TEAMS;
  const int warp = uniform<WGMMA>(threadIdx.x / 32), lane = threadIdx.x % 32;
  const int team = TEAMS > 1 ? warp / WARPS : 0, part = TEAMS > 1 ? warp % WARPS : warp;
  const RowScales<NT> scales(w.row_scale, out.tokens, lane);  // of the first group of rows
  const auto of = lane_of<F, NT>(mine, part, lane, (const u8*)(ring.full + 2 * ring.COUNT));
  ring.seek(team);
  int own = run.begin + team;  // next unit of this team
  for (int u = run.begin, group = run.group; u < run.end; ++group) {
    const bool first = u == group * w.units;
    const int until = min((group + 1) * w.units, run.end);
    Acc<NT * G> acc = {};
    for (; own < until; own += TEAMS) {
      ring.wait();
      if constexpr (G == 1)
        of.multiply(acc, ring.slot, ring.slot + S::WEIGHTS);
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
      else if constexpr (WGMMA)
        of.template multiply_wgmma<G>(acc, ring.slot + S::WEIGHTS_AT,
                                      {ring.slot, ring.slot + S::SUMS_AT});
#endif
      else
        of.template multiply_row_groups<G>(acc, ring.slot + S::WEIGHTS_AT,
                                           {ring.slot, ring.slot + S::SUMS_AT});
      ring.release();
      ring.next();
    }
    u = until;
    if constexpr (TEAMS > 1) {
#pragma unroll
      for (int g = 0; g < G; ++g) {
        if (g) consumers_sync();  // scratch of the group before has been read
        reduce_teams<NT, WARPS, SCRATCH>(acc, g, mine, team, lane);
      }
    }
    const bool owner = team == 0;
    if (!first && !w.slices) {
      publish_partial<NT, ROWS, G>(w, acc, group, run.cta, owner, part * 32 + lane);
      continue;
    }
    if (owner && u == run.end) {  // add partial sums of the following CTAs, in order of K
      const int last = last_contributor(w, run, group) - run.cta;
      for (int c = 0; c < last; ++c)
#pragma unroll
        for (int g = 0; g < G; ++g) {
          ring.seek(run.end - run.begin + c * G + g);
          ring.wait();
          const float* from = (const float*)ring.slot + part * 32 + lane;
#pragma unroll
          for (int j = 0; j < 8 * NT; ++j)
            acc[j / (4 * NT)][g * NT + j / 4 % NT][j % 4] += from[j * ROWS];
          ring.release();
        }
    }
#pragma unroll
    for (int g = 0; g < G; ++g) {
      const Out to = G == 1 ? out : out.of(g);
      Acc<NT> own_acc;
#pragma unroll
      for (int i = 0; i < 8 * NT; ++i)
        own_acc[i / (4 * NT)][i / 4 % NT][i % 4] = acc[i / (4 * NT)][g * NT + i / 4 % NT][i % 4];
      if (owner) {
        if constexpr (G == 1)
          to.template write<NT, ROWS>(own_acc, group, scales, mine, sums, part, lane);
        else
          to.template write<NT, ROWS>(
              own_acc, group,
              RowScales<NT>(w.row_scale ? w.row_scale + 16 * g : nullptr, to.tokens, lane), mine,
              sums, part, lane);
      }
      if (TEAMS > 1 || Out::SUMS) consumers_sync();  // scratch has been read
      if constexpr (Out::SUMS) {
        if (owner) to.template write_sums<NT, ROWS>(group, sums, part, lane);
        consumers_sync();
      }
    }
  }
}
