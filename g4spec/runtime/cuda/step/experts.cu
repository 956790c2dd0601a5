// MoE feed-forward of a layer for 1 to 128 rows in one persistent kernel: router, dense branch, and
// the experts that the rows use. Rows are grouped by expert over the whole step, in tiles of 8, and
// two tiles of an expert share its dequantized weights.
//
// The work is a list of products: 128 rows of a matrix times tiles of 8 rows x, over all of K, computed
// by one CTA (no sum crosses CTAs). The list depends on the routing only; a CTA takes every gridDim-th
// product, or with more than 16 rows, whose products take longer, the next one when it has room for
// it. Three warp roles walk through a CTA's products independently:
//   WeightProducer      one warp takes products and copies their weights into a ring of slots as soon as
//                       slots are free
//   ActivationProducer  two warps copy the rows x of each tile, gathered by expert, once they exist:
//                       one to slots of even index, one to the others
//   MathWarps           teams of four warps multiply, taking turns with slots, and add their sums
//
// Dependencies between products (up before down) are counters in global memory on which the producers
// spin. The whole grid must therefore be resident, so no second process may share the GPU through
// MPS. The list is ordered so that a product needs earlier ones only. Counters are zero at the start;
// experts_finish.cu zeroes them again.
#include "activations.cuh"
#include "formats.cuh"
#include "moe_producers.cuh"

template <class S>
struct MathWarps {
  using C = typename S::Base;
  const MoeStep& w;
  RingCursor<S> at;
  int warp, lane, turn = 0;

  DEVICE int next(int i) { return at.next_product(i, lane); }
  static DEVICE void sync() { named_barrier_sync<1, 32 * C::CONSUMERS>(); }
  static DEVICE void team_sync() { named_barrier_sync<2, 32 * MOE_TEAM_WARPS>(); }
  // Whether this warp stores results. The last team does, which never has more units than the others.
  DEVICE bool owner() const { return warp >= C::CONSUMERS - MOE_TEAM_WARPS; }
  DEVICE int part() const { return warp % MOE_TEAM_WARPS; }  // of the product's 128 rows

  // Accumulate over all units of a product of n tiles, and add the sums of all teams.
  template <class F>
  DEVICE void multiply(Acc<1> (&acc)[S::TILES], int k, int n) {
    const int team = warp / MOE_TEAM_WARPS;
    if (S::TILES > 1 && n > 1) {
      Acc<2> both = {};
      multiply_two_tiles<F>(both, k / F::UNIT, team);
#pragma unroll
      for (int i = 0; i < 8 * S::TILES; ++i)
        acc[i / 8][i / 4 % 2][0][i % 4] = both[i / 4 % 2][i / 8][i % 4];
    } else {
      multiply_tile<F>(acc[0], k / F::UNIT, team);
    }
#pragma unroll
    for (int tile = 0; tile < S::TILES; ++tile)
      if (tile < n) add_teams(acc[tile]);
  }

  // Two tiles, with the same dequantized weights: in each turn, a team takes a slot of weights and, TEAMS
  // slots later, one with the rows of both. The units of a tile are added in the order of
  // `multiply_tile`. A team without units left in the last turn takes empty slots.
  template <class F>
  DEVICE void multiply_two_tiles(Acc<2>& acc, int units, int team) {
    constexpr int UNITS = C::template UNITS<F>, BLOCKS = C::template BLOCKS<F>;
    const typename F::template Lane<2> of(at.s.scratch[warp], part(), lane);
    for (int turn = 0; turn < units; turn += UNITS * C::TEAMS) {
      int stages[2];
#pragma unroll
      for (int slot = 0; slot < 2; ++slot)
#pragma unroll
        for (int i = 0; i < C::TEAMS; ++i, at.next()) {
          if (i != team) continue;
          stages[slot] = at.stage;
          mbarrier_wait(at.full(), at.phase);
        }
      const u8 *weights = at.s.slots[stages[0]], *rows = at.s.slots[stages[1]];
#pragma unroll
      for (int i = 0; i < UNITS; ++i)
        if (turn + team * UNITS + i < units) {
          of.multiply(acc, weights + i * F::UNIT_BYTES, rows + i * (2 * BLOCKS));
          __syncwarp();
        }
      if (lane) continue;
      mbarrier_arrive(at.s.empty + stages[0]);
      mbarrier_arrive(at.s.empty + stages[1]);
    }
  }

  // One tile: each team takes every TEAMS-th slot.
  template <class F>
  DEVICE void multiply_tile(Acc<1>& acc, int units, int team) {
    constexpr int UNITS = C::template UNITS<F>, BLOCKS = C::template BLOCKS<F>;
    const typename F::template Lane<1> of(at.s.scratch[warp], part(), lane);
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
  }

  DEVICE void add_teams(Acc<1>& acc) {
    static_assert(C::TEAMS <= 2, "the order in which more are added would depend on the owner");
    if constexpr (C::TEAMS > 1) {
      auto& sums = at.s.sums[turn][part()];
      turn ^= 1;
      if (!owner())
#pragma unroll
        for (int i = 0; i < 8; ++i) sums[i][lane] = acc[i / 4][0][i % 4];
      sync();
      if (!owner()) return;
#pragma unroll
      for (int i = 0; i < 8; ++i) acc[i / 4][0][i % 4] += sums[i][lane];
    }
  }

  // Up product of n tiles with count(tile) rows: store gelu(gate) * up of 64 channels as block
  // `group` of each tile of `hidden`, whose tiles have `groups` blocks. Weight tile 0 of a warp holds
  // gates, tile 1 ups; a warp's 16 channels are one k16 step of the block.
  template <class F, class Count>
  DEVICE void gated(u8* hidden, int groups, int group, int n, Count count, u32* arrived) {
    Acc<1> acc[S::TILES] = {};
    multiply<F>(acc, w.width, n);
    if (!owner()) return;
#pragma unroll
    for (int tile = 0; tile < S::TILES; ++tile)
      if (tile < n)
        store_gated(acc[tile], hidden + (tile * groups + group) * ACT_BYTES, count(tile));
    if (part() == 0 && lane == 0)
      for (int tile = 0; tile < n; ++tile) atomic_add_release(arrived + tile, 1);
  }

  DEVICE void store_gated(const Acc<1>& acc, u8* block, int count) {
    const int g = lane / 4, t = lane % 4, k16 = part();
    u16* halves = (u16*)at.s.scratch[warp];  // [column][channel]
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
    ((uint2*)block)[(k16 / 2 * 32 + lane) * 2 + k16 % 2] = v;
    auto& of = at.s.channel_sums;
    if (t == 0) of[k16][g] = sum;
    team_sync();
    if (k16 < 2 && lane < 8)
      SumOffsets(1, lane, k16).store32(block, of[k16 * 2][lane], of[k16 * 2 + 1][lane]);
    if (k16 == 2 && lane < 8)
      SumOffsets(1, lane, 0).store64(block, of[0][lane] + of[1][lane], of[2][lane] + of[3][lane]);
    team_sync();
  }

  // Down product of n tiles with count(tile) rows: store column m of a tile times factor(tile, m) to
  // row place(tile, m) of y [.., width].
  template <class F, class Count, class Place, class Factor>
  DEVICE void plain(int k, int group, int n, Count count, float* y, Place place, Factor factor) {
    Acc<1> acc[S::TILES] = {};
    multiply<F>(acc, k, n);
    if (!owner()) return;
#pragma unroll
    for (int tile = 0; tile < S::TILES; ++tile) {
      if (tile >= n) continue;
      const int rows = count(tile);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int m = lane % 4 * 2 + j;
        if (m >= rows) continue;
        const float s = factor(tile, m) * GATED_SCALE;
        float* to = y + (i64)place(tile, m) * w.width;
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          const int n = group * PACK_ROWS + part() * 32 + q * 8 + lane / 4;
          if (n < w.width) to[n] = s * acc[tile][q / 2][0][q % 2 * 2 + j];
        }
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
    static_assert(sizeof at.s.sums >= C::CONSUMERS * Router::PARTS * 4, "no sums are added yet");
    float* parts = (float*)at.s.sums;
    for (int first = begin; first < stride; first += grid) {
      if (first != begin) router.load(first);
      for (int job = first; job < Router::jobs(w.tokens); job += C::CONSUMERS * stride) {
        int n = 0;  // jobs at once, each finished by a warp of its own
        for (; n < C::CONSUMERS && job + n * stride < Router::jobs(w.tokens); ++n)
          router.run(job + n * stride, parts + n * Router::PARTS);
        sync();
        if (warp < n) finish_scores(router, job + warp * stride, parts + warp * Router::PARTS);
        sync();
        if (C::MANY) choose_complete(n, job, stride);
      }
    }
  }

  DEVICE void finish_scores(const typename C::Router& router, int job, const float* parts) {
    router.finish(job, parts, lane);
    if (lane) return;
    if constexpr (C::MANY)
      at.s.scored[warp] = atomic_add_acq_rel(w.scored(job / C::Router::BLOCKS), 1);
    else
      atomic_add_release(w.arrived, 1);
  }

  // Choose the experts of the rows of `n` jobs, job, job + stride .., whose scores are all computed.
  DEVICE void choose_complete(int n, int job, int stride) {
    const auto complete = [&](int i) { return at.s.scored[i] == C::Router::BLOCKS - 1; };
    for (int i = warp; i < n * ROUTER_ROWS; i += C::CONSUMERS) {
      const int of = i / ROUTER_ROWS, group = (job + of * stride) / C::Router::BLOCKS;
      const int row = group * ROUTER_ROWS + i % ROUTER_ROWS;
      if (!complete(of) || row >= w.tokens) continue;
      int expert = 0;
      float weight;
      choose(row, expert, weight);
      if (lane < C::K) publish(row * C::K + lane, expert, weight);
    }
    sync();
    if (threadIdx.x < n && complete(threadIdx.x)) atomic_add_release(w.arrived, 1);
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
    if (warp == 0) count_visits<S::TILES>(at.s.visits, lane);
    sync();
    for (int pair = threadIdx.x; pair < pairs; pair += 32 * C::CONSUMERS)
      place_pair(at.s.visits, pair);
    mbarrier_arrive(&at.s.routed);  // each lane arrives for its own writes
    sync();
  }
  DEVICE void dense_up(int first, int n, int group) {
    gated<typename C::DenseUp>(
        w.dense_hidden + first * w.dense_groups() * ACT_BYTES, w.dense_groups(), group, n,
        [=](int tile) { return w.tokens - (first + tile) * TILE_ROWS; }, w.tile_arrived(first));
  }
  DEVICE void up(int visit, int n, int group) {
    const Visit* v = at.s.visits.visits + visit;
    gated<typename C::Up>(
        w.hidden + visit * w.groups() * ACT_BYTES, w.groups(), group, n,
        [=](int tile) { return v[tile].count; }, w.visit_arrived(visit));
  }
  DEVICE void dense_down(int first, int n, int group) {
    plain<typename C::DenseDown>(
        w.dense_channels, group, n,
        [=](int tile) { return w.tokens - (first + tile) * TILE_ROWS; }, w.dense_y,
        [=](int tile, int m) { return (first + tile) * TILE_ROWS + m; },
        [](int, int) { return 1.0f; });
  }
  DEVICE void down(int visit, int n, int group) {
    const Visit* v = at.s.visits.visits + visit;
    plain<typename C::Down>(
        w.channels, group, n, [=](int tile) { return v[tile].count; }, w.y,
        [=](int tile, int m) { return v[tile].pair[m]; },
        [=](int tile, int m) { return at.s.visits.weight[v[tile].pair[m]]; });
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
    s.queue.init(C::CONSUMERS + MOE_COPY_WARPS - 1);
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
    ActivationProducer<S> role = {w, {s}, lane, (warp - C::CONSUMERS) % 2};
    for_each_product(w, s, role);
  } else {
    MathWarps<S> role = {w, {s}, warp, lane};
    role.scores();
    for_each_product(w, s, role);
  }
}
