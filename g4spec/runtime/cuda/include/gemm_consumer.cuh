// A run of units multiplied by the eight warps of a CTA, and where the results go.
//
// The work of a product is a list of units, [group of ROWS weights][unit of K], cut into runs, one a
// CTA. Either each group is cut into `slices` and whoever reads the result adds their sums; or all
// is cut into equal runs, and a run that ends or begins inside a group leaves a partial sum: the CTA
// with the group's first unit adds those that follow, in order of K, and writes the result; the copy
// warp brings them like further stages. Which CTA does what depends on the matrix alone, never on
// the number of rows, so a row's bits do not depend on the rows beside it.
//
// With G > 1 a CTA multiplies G groups of 16 rows with the same weights, each as if it were alone: what
// is left of a sum, and what teams exchange, goes group by group. WG: warp groups multiply
// (`multiply_wgmma`), with so many products for each step of K where the format has a choice.
#pragma once
#include "gemm_tile.cuh"

constexpr int CONSUMERS = 8;  // warps: teams of ROWS / 32, which take turns with units
constexpr int THREADS = 32 * (CONSUMERS + 1);

// The same number in all lanes; with IT the compiler knows that.
template <bool IT>
DEVICE int uniform(int x) {
  return IT ? __shfl_sync(FULL_MASK, x, 0) : x;
}

DEVICE void consumers_sync() { named_barrier_sync<1, 32 * CONSUMERS>(); }

struct GemmWork {
  const u8* weights;       // [groups of 128][units][In<F>::WHOLE]
  const u8* rows;          // [G][units][In<F>::ROWS * NT]
  const float* row_scale;  // [16 G] or null
  float* partial;          // [CTAs][G][2 * NT * 4][threads of a group]
  u32* arrived;            // [groups], zero before and after
  int units, groups, run;  // units of K, groups of ROWS, units a CTA
  int slices;              // of each group, or 0: equal runs
  int row_groups = 1;      // that there are, at most G
};

// Units of a CTA, computed before it waits for other kernels: divisions take long.
struct UnitRange {
  int cta, begin, end, group;  // group: of the first unit

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

// What a lane's tokens 8 nt + 2 t and + 1 are multiplied with at the end. Read at the start.
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

// Results leave through one of these: value of weight row n for tokens m and m + 1.
struct StoreFloat {
  static constexpr bool SUMS = false;
  float* y;  // [T, N], rows of y `stride` apart
  int n_rows, stride, tokens;

  DEVICE StoreFloat of(int g) const { return {y + (i64)g * 16 * stride, n_rows, stride, tokens - 16 * g}; }

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

// gelu(gate) or silu(gate), times up, where tile 0 of a warp holds gates and tile 1 the rows of up
// beside them. The result is what the next product reads: see "Rows" in g4spec/runtime/cuda/step/packed_rows.py.
struct StoreGated {
  static constexpr bool SUMS = true;
  static constexpr float GATED_SCALE = 1.0f / 64;  // of the value, as half; the row scale is 64
  u8* y;  // [G][channels / 64][ACT_BYTES * NT]
  int channels, tokens;
  bool silu, swizzled;  // tiled: rows of several groups

  DEVICE StoreGated of(int g) const {
    return {y + (i64)g * (channels / 64) * (2 * ACT_BYTES), channels, tokens - 16 * g, silu, swizzled};
  }

  DEVICE float activated(float x) const { return times_sigmoid(x, silu ? x : gelu_sigmoid_arg(x)); }

  // A warp's 16 channels are one k16 of the result. `sums`: [warp][token], for `write_sums`.
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
            to_half(m < tokens ? h * GATED_SCALE : 0.0f);
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

  // Sums of 32 and 64 channels: four warps'.
  template <int NT, int ROWS>
  DEVICE void write_sums(int group, const float* sums, int warp, int lane) const {
    const int k16 = group * (ROWS / 32) + warp;
    if (warp % 4 || lane >= 8 * NT || k16 * 16 >= channels || tokens <= 0) return;
    u8* to = swizzled ? y : y + (i64)(k16 / 4) * ACT_BYTES * NT;
    const float* of = sums + warp * 8 * NT + lane;
    const float a = of[0], b = of[8 * NT], c = of[16 * NT], d = of[24 * NT];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const SumOffsets at = swizzled ? SumOffsets(channels / 64, k16 / 4, lane, half) : SumOffsets(NT, lane, half);
      at.store32(to, half ? c : a, half ? d : b);
      if (half == 0) at.store64(to, a + b, c + d);
    }
  }
};

// Bytes of a format's sums of 8 rows and 64 k; of one that G > 1 does not take, none.
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

// Bytes a CTA leaves of a group that it does not finish, for each group of rows.
template <int NT, int ROWS>
constexpr int PARTIAL_BYTES = ROWS * 8 * NT * 4;

// Stages in shared memory: weights, then activations; for several groups halves of activations, [tiles
// of all groups][blocks of 64 k], weights, and the sums that the format needs, [G][blocks].
template <class F, int NT, int ROWS, int G = 1>
struct Stage {
  static constexpr int WEIGHTS = F::UNIT_BYTES * (ROWS / PACK_ROWS);
  static constexpr int ROWS_BYTES = PackedInput<F>::ROWS * NT;  // of a group of rows, in memory
  static constexpr int BLOCKS = F::UNIT / 64, HALVES = TILE_BYTES * BLOCKS;  // HALVES: of a tile
  static constexpr int GROUP_SUM_BYTES = format_sum_bytes<F>() * NT * BLOCKS;                 // of a group
  static constexpr int COPIED = G > 1 ? HALVES * NT + GROUP_SUM_BYTES : ROWS_BYTES;  // of a group
  static constexpr int WEIGHTS_AT = G > 1 ? HALVES * NT * G : 0;
  static constexpr int SUMS_AT = WEIGHTS_AT + WEIGHTS;
  static constexpr int FILL = WEIGHTS + COPIED * G, ALIGN = G > 1 ? 1024 : 16;
  static constexpr int BYTES =
      ((FILL > PARTIAL_BYTES<NT, ROWS> ? FILL : PARTIAL_BYTES<NT, ROWS>) + ALIGN - 1) / ALIGN * ALIGN;
  static constexpr int TEAMS = CONSUMERS * 32 / ROWS;
  // of a warp: factors of a unit, the sums of a team, or an epilogue's
  static constexpr int EXCHANGE_BYTES = TEAMS > 1 ? 1024 * NT : 512 * NT;
  static constexpr int SCRATCH = F::SCRATCH > EXCHANGE_BYTES ? F::SCRATCH : EXCHANGE_BYTES;
};
constexpr int sum_bytes(int nt) { return CONSUMERS * 8 * nt * 4; }

// The CTAs that add to the last group of a run, `group`, beyond its own: those up to the returned
// one. None if the run does not hold the group's first unit, or ends with its last.
DEVICE int last_contributor(const GemmWork& w, const UnitRange& run, int group) {
  const int from = group * w.units, to = from + w.units;
  if (w.slices || run.end == to || from < run.begin) return run.cta;
  return (to - 1) / w.run;
}

template <int NT, int ROWS, int G>
DEVICE void publish_partial(const GemmWork& w, const Acc<NT> (&acc)[G], int group, int cta, bool owner,
                  int thread) {
  if (owner) {
    float* to = w.partial + (i64)cta * ROWS * 8 * NT * G + thread;
#pragma unroll
    for (int g = 0; g < G; ++g)
#pragma unroll
      for (int i = 0; i < 8 * NT; ++i)
        __stcg(to + (g * 8 * NT + i) * ROWS, acc[g][i / (4 * NT)][i / 4 % NT][i % 4]);
  }
  fence_proxy_async();
  consumers_sync();
  if (threadIdx.x == 0) atomic_add_release(w.arrived + group, 1);
}

// Slots of SLOT bytes. What comes n-th, for team n % TEAMS, is in slot n % STAGES. It has a barrier
// n % COUNT, which only its team waits for: of a slot's barrier that teams share, a team would not see
// whether what it finds there is the other's.
template <int STAGES, int SLOT, int TEAMS>
struct Ring {
  static constexpr int COUNT = STAGES * TEAMS;
  const u8* slots;
  u64* full;  // [COUNT], then as many of slots that are empty again
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
  DEVICE void next() {  // of the same team
    at += TEAMS;
    if (at >= COUNT) at -= COUNT, phase ^= 1;
    slot = slots + (TEAMS > 1 && at >= STAGES ? at - STAGES : at) * SLOT;
  }
};

template <class F, int NT, int ROWS, int STAGES, int G = 1>
using RingOf = Ring<STAGES, Stage<F, NT, ROWS, G>::BYTES, Stage<F, NT, ROWS, G>::TEAMS>;

// acc of the first team += that of the second, by way of `mine`: scratch of this warp, SCRATCH bytes
// from that of the next one. All consumers come here.
template <int NT, int WARPS, int SCRATCH>
DEVICE void reduce_teams(Acc<NT>& acc, u8* mine, int team, int lane) {
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
      acc[j / (4 * NT)][j / 4 % NT][j % 4] += slot[WARPS * SCRATCH / 4 + j * 32];
  }
}

// The consumers' side. `mine`: as of `reduce_teams`.
template <class F, int NT, int ROWS, int STAGES, int SCRATCH, int G = 1, int WG = 0, class Out>
DEVICE void run_consumer(const GemmWork& w, const Out& out, RingOf<F, NT, ROWS, STAGES, G> ring,
                    u8* mine, float* sums, const UnitRange& run) {
  using S = Stage<F, NT, ROWS, G>;
  constexpr int WARPS = ROWS / 32, TEAMS = S::TEAMS;
  const int warp = uniform<(WG > 0)>(threadIdx.x / 32), lane = threadIdx.x % 32;
  const int team = TEAMS > 1 ? warp / WARPS : 0, part = TEAMS > 1 ? warp % WARPS : warp;
  const RowScales<NT> scales(w.row_scale, out.tokens, lane);  // of the first group of rows
  const typename F::template Lane<NT> of(mine, part, lane);
  ring.seek(team);
  int own = run.begin + team;  // the team's next unit
  for (int u = run.begin, group = run.group; u < run.end; ++group) {
    const bool first = u == group * w.units;
    const int until = min((group + 1) * w.units, run.end);
    Acc<NT> acc[G] = {};
    for (; own < until; own += TEAMS) {
      ring.wait();
      if constexpr (G == 1)
        of.multiply(acc[0], ring.slot, ring.slot + S::WEIGHTS);
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
      else if constexpr (WG > 0)
        of.template multiply_wgmma<G, G % (2 * WG) ? 1 : WG>(acc, ring.slot + S::WEIGHTS_AT,
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
        if (g) consumers_sync();  // what came before has been read
        reduce_teams<NT, WARPS, SCRATCH>(acc[g], mine, team, lane);
      }
    }
    const bool owner = team == 0;
    if (!first && !w.slices) {
      publish_partial<NT, ROWS, G>(w, acc, group, run.cta, owner, part * 32 + lane);
      continue;
    }
    if (owner && u == run.end) {  // what the CTAs after this one have left, in order of K
      const int last = last_contributor(w, run, group) - run.cta;
      for (int c = 0; c < last; ++c)
#pragma unroll
        for (int g = 0; g < G; ++g) {
          ring.seek(run.end - run.begin + c * G + g);
          ring.wait();
          const float* from = (const float*)ring.slot + part * 32 + lane;
#pragma unroll
          for (int j = 0; j < 8 * NT; ++j) acc[g][j / (4 * NT)][j / 4 % NT][j % 4] += from[j * ROWS];
          ring.release();
        }
    }
#pragma unroll
    for (int g = 0; g < G; ++g) {
      const Out to = G == 1 ? out : out.of(g);
      if (owner) {
        if constexpr (G == 1)
          to.template write<NT, ROWS>(acc[g], group, scales, mine, sums, part, lane);
        else
          to.template write<NT, ROWS>(
              acc[g], group, RowScales<NT>(w.row_scale ? w.row_scale + 16 * g : nullptr, to.tokens, lane),
              mine, sums, part, lane);
      }
      if (TEAMS > 1 || Out::SUMS) consumers_sync();  // what the teams exchanged has been read
      if constexpr (Out::SUMS) {
        if (owner) to.template write_sums<NT, ROWS>(group, sums, part, lane);
        consumers_sync();
      }
    }
  }
}
