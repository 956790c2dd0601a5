// What a step of a layer with experts does, as a list of products, and the ring of slots in shared
// memory that their operands pass through. See experts.cu.
#pragma once
#include "gemm_tile.cuh"
#include "moe_routing.cuh"

constexpr int TEAM_WARPS = 4;  // warps: 128 rows of weights

// What one step does. Matrices are packed in groups of 128 rows, each expert apart; gates and ups
// in turns of 16 rows.
struct MoeStep {
  const u8 *dense_rows, *rows;  // input of both branches: Rows of 8 NT
  const float *x, *gate, *norm, *gains;
  const u8 *dense_up, *dense_down, *up, *down;
  u8 *dense_hidden, *hidden;  // [tile or visit][channels / 64][ACT_BYTES]
  float* scores;
  u32* arrived;        // jobs of the router, then products of each tile of `dense_hidden` (2), then
                       // of each visit
  float *y, *dense_y;  // [tokens, K, width] weighted, and [tokens, width]
  i32* chosen;         // [tokens, K], and their weights
  float* weights;
  int tokens, width, dense_channels, channels;
  float eps;

  DEVICE int dense_groups() const { return dense_channels / 64; }
  DEVICE int groups() const { return channels / 64; }
  DEVICE int out_groups() const { return (width + PACK_ROWS - 1) / PACK_ROWS; }
  DEVICE u32* tile_arrived(int tile) const { return arrived + 1 + tile; }
  DEVICE u32* visit_arrived(int visit) const { return arrived + 3 + visit; }
};

template <class Up_, class Down_, class DenseUp_, class DenseDown_, int EXPERTS_, int K_, int NT_,
          int TEAMS_, int LOADS>
struct MoeConfig {
  using Up = Up_;
  using Down = Down_;
  using DenseUp = DenseUp_;
  using DenseDown = DenseDown_;
  static constexpr int EXPERTS = EXPERTS_, K = K_, NT = NT_, TEAMS = TEAMS_;
  static constexpr int CONSUMERS = TEAM_WARPS * TEAMS, THREADS = 32 * (CONSUMERS + 2);
  using Router = RouterScores<EXPERTS, CONSUMERS, LOADS>;
  using Visits = Routing<EXPERTS, K>;

  template <class F>
  static constexpr int BLOCKS = F::UNIT / 64 * ACT_BYTES;  // bytes of a unit's rows x
  static constexpr int max_of(int a, int b) { return a > b ? a : b; }
  template <class F>
  static constexpr int UNIT_AND_ROWS = F::UNIT_BYTES + BLOCKS<F>;
  static constexpr int SLOT =
      max_of(max_of(UNIT_AND_ROWS<Up>, UNIT_AND_ROWS<Down>), max_of(UNIT_AND_ROWS<DenseUp>, UNIT_AND_ROWS<DenseDown>));
  template <class F>
  static constexpr int UNITS = SLOT / UNIT_AND_ROWS<F>;  // in a slot: their weights, then their rows
  static constexpr int SCRATCH = max_of(max_of(max_of(Up::SCRATCH, Down::SCRATCH), 256),
                                        max_of(DenseUp::SCRATCH, DenseDown::SCRATCH));
};

// Shared memory beside the ring.
template <class C>
struct MoeFixedStorage {
  u8 scratch[C::CONSUMERS][C::SCRATCH];
  float sums[2][C::TEAMS - 1][TEAM_WARPS][8][32];  // of teams, twice so that one may be read meanwhile
  float channel_sums[TEAM_WARPS][8];
  float scores[C::CONSUMERS * 20];
  typename C::Visits visits;
  u64 routed;
};

// BYTES in all, with as many slots as fit that teams can share: within a product a slot is always the
// same team's, for of its barrier a team would not see whether what it finds there is the other's.
template <class C, int BYTES>
struct MoeStorage : MoeFixedStorage<C> {
  using Base = C;
  static constexpr int FIT = (BYTES - (int)sizeof(MoeFixedStorage<C>)) / (C::SLOT + 16);
  static constexpr int STAGES = FIT / C::TEAMS * C::TEAMS;
  static_assert(STAGES > 0, "too little shared memory");
  alignas(16) u8 slots[STAGES][C::SLOT];
  u64 full[STAGES], empty[STAGES];
};

// A place in the ring.
template <class S>
struct RingCursor {
  S& s;
  int stage = 0;
  u32 phase = 0;

  DEVICE u8* slot() const { return s.slots[stage]; }
  DEVICE u64* full() const { return s.full + stage; }
  DEVICE u64* empty() const { return s.empty + stage; }
  DEVICE void next() {
    if (++stage == S::STAGES) stage = 0, phase ^= 1;
  }
};

// Calls the role for each product of this CTA, in order.
template <class S, class Role>
DEVICE void for_each_product(const MoeStep& w, const S& s, Role& role) {
  using C = typename S::Base;
  const int grid = gridDim.x, dense = w.dense_groups() * C::NT;
  int i = blockIdx.x;
  for (; i < dense; i += grid) role.dense_up(i % C::NT, i / C::NT);
  role.route();
  const int visits = s.visits.count, outs = w.out_groups();
  const int ups = dense + visits * w.groups(), dense_downs = ups + outs * C::NT;
  for (; i < ups; i += grid) role.up((i - dense) / w.groups(), (i - dense) % w.groups());
  for (; i < dense_downs; i += grid) role.dense_down((i - ups) % C::NT, (i - ups) / C::NT);
  for (i -= dense_downs; i < visits * outs; i += grid) role.down(i / outs, i % outs);
}
