// MoE feed-forward of a layer for 1 to 128 rows in one persistent kernel: router, dense branch, and
// the experts that the rows use. Rows are grouped by expert over the whole step, so an expert's
// weights are read once for each 8 of its rows, and from the L2 but for the first 8.
//
// The work is a list of GEMM tiles: 128 rows of a matrix times at most 8 rows x, over all of K, computed
// by one CTA (no sum crosses CTAs). The list depends on the routing only; each CTA takes every
// gridDim-th tile. Three warp roles walk through a CTA's list independently:
//   WeightProducer      one warp copies weights into a ring of slots as soon as slots are free
//   ActivationProducer  one warp copies the rows x of each tile, gathered by expert, once they exist
//   MathWarps           teams of four warps multiply, taking turns with slots, and add their sums
//
// Dependencies between tiles (up before down) are counters in global memory on which the producers
// spin. The whole grid must therefore be resident, so no second process may share the GPU through
// MPS. The list is ordered so that a tile needs earlier ones only. Counters are zero at the start;
// experts_finish.cu zeroes them again.
#include "formats.cuh"
#include "moe_schedule.cuh"

DEVICE float gelu(float x) {
  const float inner = 0.7978845608028654f * (x + 0.044715f * (x * x * x));
  return 0.5f * x * (1.0f + tanhf(inner));
}

template <class S>
struct WeightProducer {
  using C = typename S::Base;
  const MoeStep& w;
  RingCursor<S> at;
  int lane;

  template <class F>
  DEVICE void stream(const u8* matrix, i64 group, int k) {
    const int units = k / F::UNIT;
    matrix += group * units * F::UNIT_BYTES;
    for (int u = 0; u < units; u += C::template UNITS<F>, at.next()) {
      const u8* from = matrix + u * F::UNIT_BYTES;
      const int bytes = min(C::template UNITS<F>, units - u) * F::UNIT_BYTES;
      mbarrier_wait(at.empty(), at.phase ^ 1);
#if ARCH >= 900
      fence_proxy_async_shared();  // the slot may hold activations written by cp.async: order them before the bulk copy
      cp_async_bulk_evict_first(at.slot(), from, bytes, at.full());
      mbarrier_arrive_expect_tx(at.full(), bytes);
#else
      for (int b = lane * 16; b < bytes; b += 512) cp_async16(at.slot() + b, from + b);
      cp_async_mbarrier_arrive(at.full());
#endif
    }
  }

  DEVICE int expert(int visit) const { return at.s.visits.visits[visit].expert; }
  DEVICE void route() { mbarrier_wait(&at.s.routed, 0); }
  DEVICE void dense_up(int, int group) {
    stream<typename C::DenseUp>(w.dense_up, group, w.width);
  }
  DEVICE void up(int visit, int group) {
    stream<typename C::Up>(w.up, expert(visit) * w.groups() + group, w.width);
  }
  DEVICE void dense_down(int, int group) {
    stream<typename C::DenseDown>(w.dense_down, group, w.dense_channels);
  }
  DEVICE void down(int visit, int group) {
    stream<typename C::Down>(w.down, expert(visit) * w.out_groups() + group, w.channels);
  }
};

template <class S>
struct ActivationProducer {
  using C = typename S::Base;
  const MoeStep& w;
  RingCursor<S> at;
  int lane;

  // Copy packed rows unchanged, once `needed` GEMM tiles have produced them.
  template <class F>
  DEVICE void copy(const u8* rows, const u32* arrived, u32 needed, int k) {
    constexpr int UNITS = C::template UNITS<F>, BLOCKS = C::template BLOCKS<F>;
    if (lane == 0)
      while (load_acquire(arrived) < needed) {
      }
    __syncwarp();
    for (int u = 0; u < k / F::UNIT; u += UNITS, at.next()) {
      const int bytes = min(UNITS, k / F::UNIT - u) * BLOCKS;
      u8* to = at.slot() + UNITS * F::UNIT_BYTES;
      mbarrier_wait(at.empty(), at.phase ^ 1);
      for (int b = lane * 16; b < bytes; b += 512) cp_async16(to + b, rows + u * BLOCKS + b);
      cp_async_mbarrier_arrive(at.full());
    }
  }

  // Gather rows row(0) .. row(count - 1) of an input in groups of 8 NT rows into a tile of 8. The
  // tile's other rows keep old data; their results are not used.
  template <class F, class Row>
  DEVICE void gather(const u8* rows, int count, Row row) {
    constexpr int UNITS = C::template UNITS<F>, NT = C::NT, BLOCKS = UNITS * F::UNIT / 64;
    constexpr int HALVES = (BLOCKS * 8 * NT + 31) / 32, SUMS = (BLOCKS * 8 + 31) / 32;
    int from[HALVES], to[HALVES], sum_from[SUMS], sum_to[SUMS];  // offsets for row and column 0
    const int word = lane % 8;                                   // which word of a row's sums
    const int pitch = sum_word_offset(1, 1, word) - sum_word_offset(1, 0, word);
#pragma unroll
    for (int j = 0; j < HALVES; ++j) {  // halves: 16 or 8 bytes of a row
      const int i = j * 32 + lane, block = i / (8 * NT), k16 = i / 4 % 4, t = i % 4;
      const int pair = NT == 1 ? i / 4 % 2 : k16 / 2;
      from[j] = block * ACT_BYTES * NT + ((NT == 1 ? pair : k16) * 32 + t) * 16;
      to[j] = block * ACT_BYTES + (pair * 32 + t) * 16 + (NT == 1 ? 0 : k16 % 2 * 8);
    }
#pragma unroll
    for (int j = 0; j < SUMS; ++j) {  // sums of 16 and of 32
      const int block = j * 4 + lane / 8;
      sum_from[j] = block * ACT_BYTES * NT + sum_word_offset(NT, 0, word);
      sum_to[j] = block * ACT_BYTES + sum_word_offset(1, 0, word);
    }
    const int all = w.width / 64;
    for (int first = 0; first < all; first += BLOCKS, at.next()) {
      const u8* x = rows + first * ACT_BYTES * NT;
      u8* tile = at.slot() + UNITS * F::UNIT_BYTES;
      mbarrier_wait(at.empty(), at.phase ^ 1);
      for (int column = 0; column < count; ++column) {
        int m = row(column);
        const u8* from_group = x;
        if constexpr (C::MANY) {
          from_group += m / GROUP_ROWS * (all * ACT_BYTES * NT);
          m %= GROUP_ROWS;
        }
        const int m_at = m % 8 * 64 + m / 8 * 8;
#pragma unroll
        for (int j = 0; j < HALVES; ++j)
          if (first + (j * 32 + lane) / (8 * NT) < all && j * 32 + lane < BLOCKS * 8 * NT)
            cp_async<16 / NT>(tile + to[j] + column * 64, from_group + from[j] + m_at);
#pragma unroll
        for (int j = 0; j < SUMS; ++j)
          if (first + j * 4 + lane / 8 < all && j * 4 + lane / 8 < BLOCKS)
            cp_async<4>(tile + sum_to[j] + column * pitch, from_group + sum_from[j] + m * pitch);
      }
      cp_async_mbarrier_arrive(at.full());
    }
  }

  DEVICE void route() { mbarrier_wait(&at.s.routed, 0); }
  DEVICE void dense_up(int tile, int) {
    gather<typename C::DenseUp>(w.dense_rows, min(w.tokens - tile * TILE_ROWS, TILE_ROWS),
                                [=](int i) { return tile * TILE_ROWS + i; });
  }
  DEVICE void up(int visit, int) {
    const Visit& v = at.s.visits.visits[visit];
    gather<typename C::Up>(w.rows, v.count, [&](int i) { return v.pair[i] / C::K; });
  }
  DEVICE void dense_down(int tile, int) {
    copy<typename C::DenseDown>(w.dense_hidden + tile * w.dense_groups() * ACT_BYTES,
                                w.tile_arrived(tile), w.dense_groups(), w.dense_channels);
  }
  DEVICE void down(int visit, int) {
    copy<typename C::Down>(w.hidden + visit * w.groups() * ACT_BYTES, w.visit_arrived(visit),
                           w.groups(), w.channels);
  }
};

template <class S>
struct MathWarps {
  using C = typename S::Base;
  const MoeStep& w;
  RingCursor<S> at;
  int warp, lane, turn = 0;

  static DEVICE void sync() { named_barrier_sync<1, 32 * C::CONSUMERS>(); }
  static DEVICE void team_sync() { named_barrier_sync<2, 32 * MOE_TEAM_WARPS>(); }
  DEVICE bool owner() const { return warp < MOE_TEAM_WARPS; }

  // Accumulate over all units of a GEMM tile: each team takes every TEAMS-th slot.
  template <class F>
  DEVICE void multiply(Acc<1>& acc, int k) {
    constexpr int UNITS = C::template UNITS<F>, BLOCKS = C::template BLOCKS<F>;
    const int team = warp / MOE_TEAM_WARPS, part = warp % MOE_TEAM_WARPS, units = k / F::UNIT;
    const typename F::template Lane<1> of(at.s.scratch[warp], part, lane);
    int next = 0;
    for (int u = 0; u < units; u += UNITS, at.next()) {
      const bool mine = next == team;
      next = next + 1 == C::TEAMS ? 0 : next + 1;
      if (!mine) continue;
      mbarrier_wait(at.full(), at.phase);
      const u8 *weights = at.slot(), *rows = weights + UNITS * F::UNIT_BYTES;
#pragma unroll
      for (int i = 0; i < UNITS; ++i)
        if (u + i < units) {
          of.multiply(acc, weights + i * F::UNIT_BYTES, rows + i * BLOCKS);
          __syncwarp();
        }
      if (lane == 0) mbarrier_arrive(at.empty());
    }
    add_teams(acc, team, part);
  }

  DEVICE void add_teams(Acc<1>& acc, int team, int part) {
    if constexpr (C::TEAMS > 1) {
      auto& sums = at.s.sums[turn];
      turn ^= 1;
      if (team)
#pragma unroll
        for (int i = 0; i < 8; ++i) sums[team - 1][part][i][lane] = acc[i / 4][0][i % 4];
      sync();
      if (team) return;
#pragma unroll
      for (int other = 0; other < C::TEAMS - 1; ++other)
#pragma unroll
        for (int i = 0; i < 8; ++i) acc[i / 4][0][i % 4] += sums[other][part][i][lane];
    }
  }

  // Up tile: store gelu(gate) * up of 64 channels as block `group` of `hidden`. Weight tile 0 of a
  // warp holds gates, tile 1 ups; a warp's 16 channels are one k16 step of the block.
  template <class F>
  DEVICE void gated(u8* hidden, int group, int count, u32* arrived) {
    Acc<1> acc = {};
    multiply<F>(acc, w.width);
    if (!owner()) return;
    const int g = lane / 4, t = lane % 4;
    u16* halves = (u16*)at.s.scratch[warp];  // [column][channel]
    u8* block = hidden + group * ACT_BYTES;
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int m = 2 * t + j % 2;
      const float h = gelu(acc[0][0][j]) * acc[1][0][j] * (1.0f / GATED_SCALE);
      halves[m * 16 + g + j / 2 * 8] = to_half(m < count ? h : 0.0f);
    }
    __syncwarp();
    const uint2 v = ((const uint2*)halves)[lane];
    float sum = from_half(v.x) + from_half(v.x >> 16) + from_half(v.y) + from_half(v.y >> 16);
    sum += __shfl_xor_sync(FULL_MASK, sum, 1);
    sum += __shfl_xor_sync(FULL_MASK, sum, 2);
    ((uint2*)block)[(warp / 2 * 32 + lane) * 2 + warp % 2] = v;
    auto& of = at.s.channel_sums;
    if (t == 0) of[warp][g] = sum;
    team_sync();
    if (warp < 2 && lane < 8)
      SumOffsets(1, lane, warp).store32(block, of[warp * 2][lane], of[warp * 2 + 1][lane]);
    if (warp == 2 && lane < 8)
      SumOffsets(1, lane, 0).store64(block, of[0][lane] + of[1][lane], of[2][lane] + of[3][lane]);
    team_sync();
    if (threadIdx.x == 0) atomic_add_release(arrived, 1);
  }

  // Down tile: store column m times factor(m) to row place(m) of y [.., width].
  template <class F, class Place, class Factor>
  DEVICE void plain(int k, int group, int count, float* y, Place place, Factor factor) {
    Acc<1> acc = {};
    multiply<F>(acc, k);
    if (!owner()) return;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int m = lane % 4 * 2 + j;
      if (m >= count) continue;
      const float s = factor(m) * GATED_SCALE;
      float* to = y + (i64)place(m) * w.width;
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const int n = group * PACK_ROWS + warp * 32 + q * 8 + lane / 4;
        if (n < w.width) to[n] = s * acc[q / 2][0][q % 2 * 2 + j];
      }
    }
  }

  DEVICE void scores() {
    using Router = typename C::Router;
    Router router = {w.x, w.gate, w.norm, w.scores, w.eps, w.tokens, w.width};
    const int grid = gridDim.x, groups = Router::row_groups(w.tokens);
    // A CTA computes every `stride`-th job: the same experts, whose weights it loads once.
    const int stride = Router::BLOCKS * max(min(grid / Router::BLOCKS, groups), 1);
    // Last CTAs first: the first CTAs have tiles of the dense branch.
    const int begin = grid - 1 - blockIdx.x;
    if (begin < stride) router.load(begin);
    griddep_wait();
    for (int first = begin; first < stride; first += grid) {
      if (first != begin) router.load(first);
      for (int job = first; job < Router::jobs(w.tokens); job += stride) {
        router.run(job, at.s.scores);
        sync();
        if (warp == 0) finish_scores(router, job);
        sync();
        if (C::MANY && at.s.scored == Router::BLOCKS - 1) choose_group(job / Router::BLOCKS);
      }
    }
  }

  DEVICE void finish_scores(const typename C::Router& router, int job) {
    router.finish(job, at.s.scores);
    if (lane) return;
    if constexpr (C::MANY)
      at.s.scored = atomic_add_acq_rel(w.scored(job / C::Router::BLOCKS), 1);
    else
      atomic_add_release(w.arrived, 1);
  }

  // Choose the experts of four rows, all of whose scores are computed.
  DEVICE void choose_group(int row_group) {
    const int row = row_group * ROUTER_ROWS + warp;
    if (warp < ROUTER_ROWS && row < w.tokens) {
      int expert = 0;
      float weight;
      choose(row, expert, weight);
      if (lane < C::K) publish(row * C::K + lane, expert, weight);
    }
    sync();
    if (threadIdx.x == 0) atomic_add_release(w.arrived, 1);
  }

  DEVICE void choose(int row, int& expert, float& weight) const {
    choose_experts<C::EXPERTS, C::K>(w.scores + row * C::EXPERTS, w.gains, lane, expert, weight);
  }
  DEVICE void publish(int pair, int expert, float weight) const {
    w.chosen[pair] = expert;
    w.weights[pair] = weight;
  }
  // Note the expert of a pair in shared memory.
  DEVICE void note(int pair, int expert, float weight) {
    auto& r = at.s.visits;
    const int row = pair / C::K;
    atomicOr(&r.rows[expert][row / 32], 1u << row % 32);
    r.expert[pair] = expert;
    r.weight[pair] = weight;
  }

  DEVICE void route() {
    const int pairs = w.tokens * C::K;
    const u32 needed = C::MANY ? C::Router::row_groups(w.tokens) : C::Router::jobs(w.tokens);
    if (threadIdx.x == 0)
      while (load_acquire(w.arrived) < needed) {
      }
    sync();
    if constexpr (C::MANY) {
      for (int pair = threadIdx.x; pair < pairs; pair += 32 * C::CONSUMERS)
        note(pair, __ldcg(w.chosen + pair), __ldcg(w.weights + pair));
    } else {
      for (int row = warp; row < w.tokens; row += C::CONSUMERS) {
        int expert = 0;
        float weight;
        choose(row, expert, weight);
        if (lane >= C::K) continue;
        note(row * C::K + lane, expert, weight);
        if (blockIdx.x == 0) publish(row * C::K + lane, expert, weight);
      }
    }
    sync();
    if (warp == 0) count_visits(at.s.visits, lane);
    sync();
    for (int pair = threadIdx.x; pair < pairs; pair += 32 * C::CONSUMERS)
      place_pair(at.s.visits, pair);
    mbarrier_arrive(&at.s.routed);  // each lane arrives for its own writes
    sync();
  }
  DEVICE void dense_up(int tile, int group) {
    gated<typename C::DenseUp>(w.dense_hidden + tile * w.dense_groups() * ACT_BYTES, group,
                               w.tokens - tile * TILE_ROWS, w.tile_arrived(tile));
  }
  DEVICE void up(int visit, int group) {
    gated<typename C::Up>(w.hidden + visit * w.groups() * ACT_BYTES, group,
                          at.s.visits.visits[visit].count, w.visit_arrived(visit));
  }
  DEVICE void dense_down(int tile, int group) {
    plain<typename C::DenseDown>(
        w.dense_channels, group, w.tokens - tile * TILE_ROWS, w.dense_y,
        [=](int m) { return tile * TILE_ROWS + m; }, [](int) { return 1.0f; });
  }
  DEVICE void down(int visit, int group) {
    const Visit& v = at.s.visits.visits[visit];
    plain<typename C::Down>(
        w.channels, group, v.count, w.y, [&](int m) { return v.pair[m]; },
        [&](int m) { return at.s.visits.weight[v.pair[m]]; });
  }
};

// Writes y [tokens, K, width]: output of each row's K experts times the router weight; dense_y
// [tokens, width]: output of the dense branch.
template <class Up, class Down, class DenseUp, class DenseDown, int EXPERTS, int K, int ROWS,
          int TEAMS, int BYTES, int LOADS>
__global__ __launch_bounds__(32 * (MOE_TEAM_WARPS * TEAMS + MOE_COPY_WARPS)) void experts(
    const u8* dense_rows, const u8* rows, const float* x, const float* gate, const float* norm,
    const float* gains, const u8* dense_up, const u8* dense_down, const u8* up, const u8* down,
    u8* dense_hidden, u8* hidden, float* scores, u32* arrived, float* y, float* dense_y,
    i32* chosen, float* weights, int tokens, int width, int dense_channels, int channels,
    float eps) {
  using C = MoeConfig<Up, Down, DenseUp, DenseDown, EXPERTS, K, ROWS, TEAMS, LOADS>;
  using S = MoeStorage<C, BYTES>;
  static_assert(sizeof(S) <= BYTES, "the launch provides BYTES of dynamic shared memory");
  extern __shared__ __align__(128) u8 bytes[];
  S& s = *(S*)bytes;
  const MoeStep w = {dense_rows, rows,    x,      gate,         norm,   gains,  dense_up,
                     dense_down, up,      down,   dense_hidden, hidden, scores, arrived,
                     y,          dense_y, chosen, weights,      tokens, width,  dense_channels,
                     channels,   eps};
  griddep_launch_dependents();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::STAGES; ++i) {
      mbarrier_init(s.full + i, ARCH >= 900 ? 33 : 64);
      mbarrier_init(s.empty + i, MOE_TEAM_WARPS);
    }
    mbarrier_init(&s.routed, 32 * C::CONSUMERS);
    mbarrier_init_fence();
  }
  constexpr int WORDS = C::Visits::WORDS;
  for (int i = threadIdx.x; i < EXPERTS * WORDS; i += C::THREADS)
    s.visits.rows[i / WORDS][i % WORDS] = 0;
  __syncthreads();
  if (warp == C::CONSUMERS) {
    WeightProducer<S> role = {w, {s}, lane};
    if (ARCH < 900 || lane == 0) for_each_product(w, s, role);
  } else if (warp > C::CONSUMERS) {
    griddep_wait();
    ActivationProducer<S> role = {w, {s}, lane};
    for_each_product(w, s, role);
  } else {
    MathWarps<S> role = {w, {s}, warp, lane};
    role.scores();
    for_each_product(w, s, role);
  }
}
