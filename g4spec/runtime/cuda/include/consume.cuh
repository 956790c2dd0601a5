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
// is left of a sum, and what teams exchange, goes group by group.
#pragma once
#include "product.cuh"

constexpr int CONSUMERS = 8;  // warps: teams of ROWS / 32, which take turns with units
constexpr int THREADS = 32 * (CONSUMERS + 1);

DEVICE void consumers_sync() { meet<1, 32 * CONSUMERS>(); }

struct Work {
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
struct Run {
  int cta, begin, end, group;  // group: of the first unit

  DEVICE Run(const Work& w, int cta) : cta(cta) {
    if (w.slices) {
      const int of = cta / w.slices, slice = cta - of * w.slices;
      begin = of * w.units + slice * w.units / w.slices;
      end = of * w.units + (slice + 1) * w.units / w.slices;
      group = of;
    } else {
      begin = cta * w.run, end = min(begin + w.run, w.units * w.groups);
      group = begin / w.units;
    }
    begin = now(begin), end = now(end), group = now(group);
  }
};

// What a lane's tokens 8 nt + 2 t and + 1 are multiplied with at the end. Read at the start.
template <int NT>
struct Scales {
  float of[NT][2];

  DEVICE Scales(const float* row_scale, int tokens, int lane) {
#pragma unroll
    for (int i = 0; i < 2 * NT; ++i) {
      const int m = i / 2 * 8 + lane % 4 * 2 + i % 2;
      of[i / 2][i % 2] = row_scale && m < tokens ? __ldcg(row_scale + m) : 1.0f;
    }
  }
};

// Results leave through one of these: value of weight row n for tokens m and m + 1.
struct Plain {
  static constexpr bool SUMS = false;
  float* y;  // [T, N], rows of y `stride` apart
  int n_rows, stride, tokens;

  DEVICE Plain of(int g) const { return {y + (i64)g * 16 * stride, n_rows, stride, tokens - 16 * g}; }

  template <int NT, int ROWS>
  DEVICE void write(const Acc<NT>& acc, int group, const Scales<NT>& scales, u8*, float*,
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
struct Gated {
  static constexpr bool SUMS = true;
  static constexpr float STORED = 1.0f / 64;  // of the value, as half; the row scale is 64
  u8* y;  // [G][channels / 64][ACT_BYTES * NT]
  int channels, tokens;
  bool silu;

  DEVICE Gated of(int g) const {
    return {y + (i64)g * (channels / 64) * (2 * ACT_BYTES), channels, tokens - 16 * g, silu};
  }

  DEVICE float activated(float x) const { return times_sigmoid(x, silu ? x : gelu_inner(x)); }

  // A warp's 16 channels are one k16 of the result. `sums`: [warp][token], for `write_sums`.
  template <int NT, int ROWS>
  DEVICE void write(const Acc<NT>& acc, int group, const Scales<NT>& scales, u8* scratch,
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
      if (t == 0) sums[warp * 8 * NT + nt * 8 + g] = sum;
      if (k16 * 16 >= channels || tokens <= 0) continue;
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
    u8* block = y + (i64)(k16 / 4) * ACT_BYTES * NT;
    const float* of = sums + warp * 8 * NT + lane;
    const float a = of[0], b = of[8 * NT], c = of[16 * NT], d = of[24 * NT];
    SumPlace(NT, lane, 0).store32(block, a, b);
    SumPlace(NT, lane, 1).store32(block, c, d);
    SumPlace(NT, lane, 0).store64(block, a + b, c + d);
  }
};

// Bytes a CTA leaves of a group that it does not finish, for each group of rows.
template <int NT, int ROWS>
constexpr int LEFT = ROWS * 8 * NT * 4;

// Stages in shared memory: weights, then activations.
template <class F, int NT, int ROWS, int G = 1>
struct Stage {
  static constexpr int WEIGHTS = F::UNIT_BYTES * (ROWS / GROUP);
  static constexpr int ROWS_BYTES = In<F>::ROWS * NT;  // of a group of rows
  static constexpr int FILL = WEIGHTS + ROWS_BYTES * G;
  static constexpr int BYTES = FILL > LEFT<NT, ROWS> ? FILL : LEFT<NT, ROWS>;
  static constexpr int TEAMS = CONSUMERS * 32 / ROWS;
  // of a warp: factors of a unit, the sums of a team, or an epilogue's
  static constexpr int OTHER = TEAMS > 1 ? 1024 * NT : 512 * NT;
  static constexpr int SCRATCH = F::SCRATCH > OTHER ? F::SCRATCH : OTHER;
};
constexpr int sum_bytes(int nt) { return CONSUMERS * 8 * nt * 4; }

// The CTAs that add to the last group of a run, `group`, beyond its own: those up to the returned
// one. None if the run does not hold the group's first unit, or ends with its last.
DEVICE int last_contributor(const Work& w, const Run& run, int group) {
  const int from = group * w.units, to = from + w.units;
  if (w.slices || run.end == to || from < run.begin) return run.cta;
  return (to - 1) / w.run;
}

template <int NT, int ROWS, int G>
DEVICE void leave(const Work& w, const Acc<NT> (&acc)[G], int group, int cta, bool owner,
                  int thread) {
  if (owner) {
    float* to = w.partial + (i64)cta * ROWS * 8 * NT * G + thread;
#pragma unroll
    for (int g = 0; g < G; ++g)
#pragma unroll
      for (int i = 0; i < 8 * NT; ++i)
        __stcg(to + (g * 8 * NT + i) * ROWS, acc[g][i / (4 * NT)][i / 4 % NT][i % 4]);
  }
  copy_engine_fence();
  consumers_sync();
  if (threadIdx.x == 0) add_release(w.arrived + group, 1);
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

  DEVICE void to(int n) {
    at = n % COUNT, phase = n / COUNT & 1;
    slot = slots + n % STAGES * SLOT;
  }
  DEVICE void wait() const { barrier_wait(full + at, phase); }
  DEVICE void leave() const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(full + COUNT + at);
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
DEVICE void join_teams(Acc<NT>& acc, u8* mine, int team, int lane) {
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

// The consumers' side. `mine`: as of `join_teams`.
template <class F, int NT, int ROWS, int STAGES, int SCRATCH, int G = 1, class Out>
DEVICE void consume(const Work& w, const Out& out, RingOf<F, NT, ROWS, STAGES, G> ring,
                    u8* mine, float* sums, const Run& run) {
  using S = Stage<F, NT, ROWS, G>;
  constexpr int WARPS = ROWS / 32, TEAMS = S::TEAMS;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int team = TEAMS > 1 ? warp / WARPS : 0, part = TEAMS > 1 ? warp % WARPS : warp;
  const Scales<NT> scales(w.row_scale, out.tokens, lane);  // of the first group of rows
  const typename F::template Lane<NT> of(mine, part, lane);
  ring.to(team);
  int own = run.begin + team;  // the team's next unit
  for (int u = run.begin, group = run.group; u < run.end; ++group) {
    const bool first = u == group * w.units;
    const int until = min((group + 1) * w.units, run.end);
    Acc<NT> acc[G] = {};
    for (; own < until; own += TEAMS) {
      ring.wait();
      if constexpr (G == 1)
        of.multiply(acc[0], ring.slot, ring.slot + S::WEIGHTS);
      else
        of.template multiply_groups<G>(acc, ring.slot, ring.slot + S::WEIGHTS);
      ring.leave();
      ring.next();
    }
    u = until;
    if constexpr (TEAMS > 1) {
#pragma unroll
      for (int g = 0; g < G; ++g) {
        if (g) consumers_sync();  // what came before has been read
        join_teams<NT, WARPS, SCRATCH>(acc[g], mine, team, lane);
      }
    }
    const bool owner = team == 0;
    if (!first && !w.slices) {
      leave<NT, ROWS, G>(w, acc, group, run.cta, owner, part * 32 + lane);
      continue;
    }
    if (owner && u == run.end) {  // what the CTAs after this one have left, in order of K
      const int last = last_contributor(w, run, group) - run.cta;
      for (int c = 0; c < last; ++c)
#pragma unroll
        for (int g = 0; g < G; ++g) {
          ring.to(run.end - run.begin + c * G + g);
          ring.wait();
          const float* from = (const float*)ring.slot + part * 32 + lane;
#pragma unroll
          for (int j = 0; j < 8 * NT; ++j) acc[g][j / (4 * NT)][j / 4 % NT][j % 4] += from[j * ROWS];
          ring.leave();
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
              acc[g], group, Scales<NT>(w.row_scale ? w.row_scale + 16 * g : nullptr, to.tokens, lane),
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
