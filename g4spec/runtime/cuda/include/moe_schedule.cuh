// Work list of an MoE layer's step, the configuration of a kernel instance, and the ring of
// shared-memory slots that operands pass through. Used by experts.cu.
#pragma once
#include "gemm_tile.cuh"
#include "mbarrier.cuh"
#include "moe_routing.cuh"

// Arguments of a step. Matrices are packed in groups of 128 rows, each expert separately; gate and
// up matrices are interleaved in blocks of 16 rows.
struct MoeStep {
  const u8 *dense_rows, *rows;  // packed activations in groups of 8 rows: dense branch, experts
  const float *x, *gate, *norm, *gains;
  const u8 *dense_up, *dense_down, *up, *down;
  u8 *dense_hidden, *hidden;  // [tile or visit][channels / 64][ACT_BYTES]
  float* scores;
  u32* arrived;  // counters: router jobs done (with more than 16 rows: groups of four rows whose
                 // experts are chosen) [1], finished GEMM tiles of each row tile of
                 // `dense_hidden`, router jobs done of each group of four rows, products taken
                 // [1], finished GEMM tiles of each visit
  float *y, *dense_y;  // [tokens, K, width] weighted, and [tokens, width]
  i32* chosen;         // [tokens, K], and their weights
  float* weights;
  int tokens, width, dense_channels, channels;
  float eps;

  DEVICE int dense_groups() const { return dense_channels / 64; }
  DEVICE int groups() const { return channels / 64; }
  DEVICE int out_groups() const { return (width + PACK_ROWS - 1) / PACK_ROWS; }
  DEVICE u32* tile_arrived(int tile) const { return arrived + 1 + tile; }
  DEVICE u32* scored(int row_group) const {
    return arrived + 1 + MOE_MAX_ROWS / TILE_ROWS + row_group;
  }
  DEVICE u32* taken() const { return arrived + MOE_COUNTERS - 1; }
  DEVICE u32* visit_arrived(int visit) const { return arrived + MOE_COUNTERS + visit; }
};

// ROWS: maximum rows of a step: 8, 16, or up to MOE_MAX_ROWS.
template <class Up_, class Down_, class DenseUp_, class DenseDown_, int EXPERTS_, int K_, int ROWS_,
          int TEAMS_, int LOADS>
struct MoeConfig {
  using Up = Up_;
  using Down = Down_;
  using DenseUp = DenseUp_;
  using DenseDown = DenseDown_;
  static constexpr int EXPERTS = EXPERTS_, K = K_, ROWS = ROWS_, TEAMS = TEAMS_;
  static constexpr bool MANY = ROWS > GROUP_ROWS;  // several groups of rows
  static_assert(ROWS <= MOE_MAX_ROWS, "counters and buffers are for at most so many rows");
  static constexpr int CONSUMERS = MOE_TEAM_WARPS * TEAMS,
                       THREADS = 32 * (CONSUMERS + MOE_COPY_WARPS);
  using Router = RouterScores<EXPERTS, CONSUMERS, LOADS>;
  using Visits = Routing<EXPERTS, K, ROWS>;
  // Row tiles of the dense branch.
  static DEVICE int tiles(int tokens) { return (tokens + TILE_ROWS - 1) / TILE_ROWS; }

  template <class F>
  static constexpr int BLOCKS = F::UNIT / 64 * ACT_BYTES;  // bytes of a unit's rows x
  static constexpr int max_of(int a, int b) { return a > b ? a : b; }
  template <class F>
  static constexpr int UNIT_AND_ROWS = F::UNIT_BYTES + BLOCKS<F>;
  static constexpr int SLOT = max_of(max_of(UNIT_AND_ROWS<Up>, UNIT_AND_ROWS<Down>),
                                     max_of(UNIT_AND_ROWS<DenseUp>, UNIT_AND_ROWS<DenseDown>));
  template <class F>
  static constexpr int UNITS =
      SLOT / UNIT_AND_ROWS<F>;  // in a slot: their weights, then their rows
  // Maximum tiles of 8 rows that are multiplied by the weights of one slot. Two have a slot of their own.
  static constexpr int TILES = MANY ? 2 : 1;
  template <class F>
  static constexpr bool TWO_FIT = 2 * UNITS<F> * BLOCKS<F> <= SLOT;
  static_assert(TWO_FIT<Up> && TWO_FIT<Down> && TWO_FIT<DenseUp> && TWO_FIT<DenseDown>);
  static constexpr int SCRATCH = max_of(max_of(max_of(Up::SCRATCH, Down::SCRATCH), 256),
                                        max_of(DenseUp::SCRATCH, DenseDown::SCRATCH));
};

// Indices of the products that a CTA takes from the list after its first. The weight producer pushes them,
// all other warps read them.
struct ProductQueue {
  static constexpr u32 SIZE = 4;
  int index[SIZE];
  u64 full[SIZE], empty[SIZE];

  DEVICE void init(int readers) {
    for (u32 i = 0; i < SIZE; ++i) mbarrier_init(full + i, 1), mbarrier_init(empty + i, readers);
  }
  DEVICE void push(u32 n, int i) {  // n: the number of entries before this one
    mbarrier_wait(empty + n % SIZE, n / SIZE % 2 ^ 1);
    index[n % SIZE] = i;
    mbarrier_arrive(full + n % SIZE);
  }
  DEVICE int get(u32 n, int lane) {  // called by a warp
    int i = 0;
    if (lane == 0) {
      mbarrier_wait(full + n % SIZE, n / SIZE % 2);
      i = index[n % SIZE];
      mbarrier_arrive(empty + n % SIZE);
    }
    return __shfl_sync(FULL_MASK, i, 0);
  }
};

// Shared memory other than the ring.
template <class C>
struct MoeFixedStorage {
  u8 scratch[C::CONSUMERS][C::SCRATCH];
  float sums[2][MOE_TEAM_WARPS][8][32];  // partial sums of the other team, double-buffered
  float channel_sums[MOE_TEAM_WARPS][8];
  typename C::Visits visits;
  u32 scored[C::CONSUMERS];  // jobs done before each of the latest router jobs, for the same rows
  u64 routed;
  ProductQueue queue;
};

// Shared memory of BYTES bytes, with as many slots as fit, rounded down to a multiple of TEAMS:
// within a GEMM tile a slot always belongs to the same team. Otherwise a team could not tell from
// the barrier's parity whether the slot holds its own unit or another team's.
template <class C, int BYTES>
struct MoeStorage : MoeFixedStorage<C> {
  using Base = C;
  static constexpr int FIT = (BYTES - (int)sizeof(MoeFixedStorage<C>)) / (C::SLOT + 16);
  static constexpr int STAGES = FIT / C::TEAMS * C::TEAMS;
  static_assert(STAGES > 0, "too little shared memory");
  // Maximum tiles of a product: a team holds two slots when there are several.
  static constexpr int TILES = STAGES >= 2 * C::TEAMS ? C::TILES : 1;
  static_assert(C::SLOT % 16 == 0, "bulk copies need 16-byte aligned slots");
  alignas(128) u8 slots[STAGES][C::SLOT];  // bulk copies to other addresses are slower
  u64 full[STAGES], empty[STAGES];
};

// Position in the ring and in the list of products.
template <class S>
struct RingCursor {
  S& s;
  int stage = 0;
  u32 phase = 0;
  u32 taken = 0;  // products after the first one

  DEVICE u8* slot() const { return s.slots[stage]; }
  DEVICE u64* full() const { return s.full + stage; }
  DEVICE u64* empty() const { return s.empty + stage; }
  DEVICE void next() {
    if (++stage == S::STAGES) stage = 0, phase ^= 1;
  }
  // Index of the product after product `i`, for all warps but the weight producer.
  DEVICE int next_product(int i, int lane) {
    return S::Base::MANY ? s.queue.get(taken++, lane) : i + (int)gridDim.x;
  }
};

// Call `role` for each product of this CTA, in order: entry blockIdx.x of the list dense up, (routing),
// expert up, dense down, expert down, then those that `role.next` returns. A product is 128 rows of a
// matrix times 1 to TILES tiles of rows x: (first row tile or visit, their number, group of 128 rows).
template <class S, class Role>
DEVICE void for_each_product(const MoeStep& w, const S& s, Role& role) {
  using C = typename S::Base;
  const int tiles = C::tiles(w.tokens), outs = w.out_groups();
  const int parts = (tiles + S::TILES - 1) / S::TILES;  // of the dense branch's rows
  const auto dense_product = [&](auto call, int i) {
    const int first = i % parts * S::TILES;
    call(first, min(S::TILES, tiles - first), i / parts);
  };
  const int dense = parts * w.dense_groups();
  int i = blockIdx.x;
  for (; i < dense; i = role.next(i))
    dense_product([&](int first, int n, int group) { role.dense_up(first, n, group); }, i);
  role.route();
  const int runs = S::TILES > 1 ? s.visits.n_runs : s.visits.count;
  const auto run = [&](int i) {
    return S::TILES > 1 ? s.visits.runs[i] : VisitRun{(u16)i, 1};
  };
  const int ups = dense + runs * w.groups(), dense_downs = ups + parts * outs;
  for (; i < ups; i = role.next(i)) {
    const VisitRun r = run((i - dense) / w.groups());
    role.up(r.first, r.count, (i - dense) % w.groups());
  }
  for (; i < dense_downs; i = role.next(i))
    dense_product([&](int first, int n, int group) { role.dense_down(first, n, group); }, i - ups);
  for (; i < dense_downs + runs * outs; i = role.next(i)) {
    const VisitRun r = run((i - dense_downs) / outs);
    role.down(r.first, r.count, (i - dense_downs) % outs);
  }
}
