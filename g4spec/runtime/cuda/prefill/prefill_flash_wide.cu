// Prefill attention for heads of 512 on sm_90a, for layers whose keys are their values before norm
// weight and rotation. A tile holds 64 values and only the rotated columns of the keys; the queries
// carry the norm weights (prefill_kv_layout.cuh, SharedKvTiles). So two tiles fit into shared
// memory together with 64 queries.
//
// Two consumer warp groups each accumulate half of the 512 output columns. The softmax, which both
// need, is computed alternately: group j % 2 computes the scores and weights of tile j, continues
// the maximum of tile j - 1, and stores the weights to shared memory over the tile's keys. Tiles go
// from the last visible to the first; both groups accumulate in that order. A third warp group has
// the producer thread.
#include "online_softmax.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr int BLOCK = KV_TILE * 64 * 2;  // KV_TILE rows of 64 halves
constexpr int VALUES = 8 * BLOCK, TILE = VALUES + 2 * BLOCK;
static_assert(BLOCK % 1024 == 0,
              "wgmma operands with the 128-byte swizzle start at multiples of 1024 bytes");

struct Storage {
  u8 queries[VALUES];
  u8 tiles[2][TILE];
  float row_max[2][64], rescale[2][64], sums[2][64];  // [group][row]
  u64 have_queries, loaded[2], weighed[2], used[2];
};
static_assert(sizeof(Storage) <= FLASH_WIDE_SHARED,
              "the launch reserves FLASH_WIDE_SHARED bytes");

// Scores of 64 keys. Key columns 0 .. 63 and 256 .. 319 are blocks 8 and 9 of the tile, after the
// values.
DEVICE void issue_scores(float (&s)[32], u64 queries, u64 tile) {
#pragma unroll
  for (int k = 0; k < 32; ++k) {
    const int block = k / 4, from = block == 0 ? 8 : block == 4 ? 9 : block;
    wgmma_m64n64_ss(s, queries + block * (BLOCK >> 4) + k % 4 * 2,
                    tile + from * (BLOCK >> 4) + k % 4 * 2, k != 0);
  }
  wgmma_commit();
}

struct Group {
  Storage& sh;
  int mine, lane, warp;

  DEVICE int row(int i) const { return warp * 16 + i * 8 + lane / 4; }

  // P V of tile j, for the group's half of the columns.
  DEVICE void issue_values(float (&o)[128], int j) const {
    const u8* tile = sh.tiles[j % 2];
    const u64 weights = smem_descriptor(tile + VALUES, 0),
              values = smem_descriptor(tile + mine * 4 * BLOCK, BLOCK);
    warpgroup_fence_operand(o);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k)
      wgmma_m64n256_ss_mn(o, weights + k * 2, values + k * (2048 >> 4), k ? 1 : j != 0);
    wgmma_commit();
  }
  // Accumulate a tile whose weights the other group computed.
  DEVICE void issue_other(float (&o)[128], OnlineSoftmax& rows, int j) const {
    mbarrier_wait(&sh.weighed[j % 2], j / 2 % 2);
    float by[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      rows.row_max[i] = sh.row_max[1 - mine][row(i)];
      by[i] = sh.rescale[1 - mine][row(i)];
      rows.sum[i] *= by[i];
    }
    if (j) rescale_output(o, by);
    issue_values(o, j);
  }
  // Store the weights of this group's tile j for both groups. Every thread arrives for its own
  // accesses: racecheck does not understand one lane arriving for its warp.
  DEVICE void publish(const float (&s)[32], const OnlineSoftmax& rows, int j) const {
    u8* weights = sh.tiles[j % 2] + VALUES;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        *(u32*)(weights + row(r) * 128 + ((i ^ (row(r) % 8)) * 16) + lane % 4 * 4) =
            pack_half2(s[4 * i + 2 * r], s[4 * i + 2 * r + 1]);
      if (lane % 4 == 0) {
        sh.row_max[mine][row(r)] = rows.row_max[r];
        sh.rescale[mine][row(r)] = rows.rescale[r];
      }
    }
    fence_proxy_async_shared();
    mbarrier_arrive(&sh.weighed[j % 2]);
  }
};

// Consumer main loop: this group's tiles, and between them those of the other group.
DEVICE void attend(float (&o)[128], OnlineSoftmax& rows, Group& g, int count, int high) {
  Storage& sh = g.sh;
  float s[32];
  const u64 queries = smem_descriptor(sh.queries, 0);
  mbarrier_wait(&sh.have_queries, 0);
  for (int j = g.mine; j < count; j += 2) {
    if (j) g.issue_other(o, rows, j - 1);
    mbarrier_wait(&sh.loaded[j % 2], j / 2 % 2);
    warpgroup_fence_operand(s);
    wgmma_fence();
    issue_scores(s, queries, smem_descriptor(sh.tiles[j % 2], 0));
    if (j) {
      wgmma_wait<1>();
      warpgroup_fence_operand(o);
      warp_release(&sh.used[1 - j % 2], g.lane);
    }
    wgmma_wait<0>();
    warpgroup_fence_operand(s);
    rows.update(s, (high - j) * KV_TILE, g.lane);
    // All warps of the group have read the keys before any of them overwrites them.
    named_barrier_sync(1 + g.mine, 128);
    g.publish(s, rows, j);
    named_barrier_sync(1 + g.mine, 128);
    if (j) rescale_output(o, rows.rescale);
    g.issue_values(o, j);
    wgmma_wait<0>();
    warpgroup_fence_operand(o);
    warp_release(&sh.used[j % 2], g.lane);
  }
  if ((count - 1) % 2 != g.mine) {
    g.issue_other(o, rows, count - 1);
    wgmma_wait<0>();
    warpgroup_fence_operand(o);
  }
}

// Normalize and store this group's half of the columns: out, half [tokens, KV heads, group, 512].
DEVICE void write(const float (&o)[128], const OnlineSoftmax& rows, const Group& g, u16* out,
                  int first, int tokens, int group) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float sum = rows.sum[r];
    sum += __shfl_xor_sync(FULL_MASK, sum, 1);
    sum += __shfl_xor_sync(FULL_MASK, sum, 2);
    if (g.lane % 4 == 0) g.sh.sums[g.mine][g.row(r)] = sum;
  }
  named_barrier_sync<3, 256>();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int at = first + g.row(r), token = at / group;
    if (token >= tokens) continue;
    const float by = 1.0f / (g.sh.sums[0][g.row(r)] + g.sh.sums[1][g.row(r)]);
    u16* to = out + (((i64)token * gridDim.y + blockIdx.y) * group + at % group) * 512 +
              g.mine * 256 + g.lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < 32; ++j)
      *(u32*)(to + j * 8) = pack_half2(o[4 * j + 2 * r] * by, o[4 * j + 2 * r + 1] * by);
  }
}

DEVICE void feed(Storage& sh, const u8* queries, const u8* tiles, int count, int high) {
  cp_async_bulk(sh.queries, queries, VALUES, &sh.have_queries);
  mbarrier_arrive_expect_tx(&sh.have_queries, VALUES);
  for (int j = 0; j < count; ++j) {
    mbarrier_wait(&sh.used[j % 2], (j / 2 + 1) % 2);
    cp_async_bulk(sh.tiles[j % 2], tiles + (i64)(high - j) * TILE, TILE, &sh.loaded[j % 2]);
    mbarrier_arrive_expect_tx(&sh.loaded[j % 2], TILE);
  }
}
#endif

// Grid: (blocks of 64 rows, KV heads). queries: `query_rows` rows per KV head, token t's from row t
// * group on; tiles: `key_rows` keys per KV head. Token t sees the `window` keys up to row t +
// offset.
__global__ void __launch_bounds__(FLASH_THREADS, 1)
flash_wide(const u16* queries, const u16* tiles, u16* out, int tokens, int group, int query_rows,
           int key_rows, int offset, int window) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) u8 bytes[];
  Storage& sh = *(Storage*)bytes;
  if (threadIdx.x == 0) {
    mbarrier_init(&sh.have_queries, 1);
    for (int s = 0; s < 2; ++s) {
      mbarrier_init(&sh.loaded[s], 1), mbarrier_init(&sh.weighed[s], 128);
      mbarrier_init(&sh.used[s], 8);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  const int first = (gridDim.x - 1 - blockIdx.x) * FLASH_WIDE_ROWS;  // blocks with the most keys first
  const int low = max(0, first / group + offset - window + 1) / KV_TILE;
  const int high = (min((first + FLASH_WIDE_ROWS - 1) / group, tokens - 1) + offset) / KV_TILE;
  const int count = high - low + 1;
  if (threadIdx.x < 128) {
    setmaxnreg_dec<24>();
    if (threadIdx.x == 0)
      feed(sh, (const u8*)queries + ((i64)blockIdx.y * query_rows + first) * 1024,
           (const u8*)tiles + (i64)blockIdx.y * (key_rows / KV_TILE) * TILE, count, high);
  } else {
    setmaxnreg_inc<240>();
    Group g{sh, (int)threadIdx.x / 128 - 1, (int)threadIdx.x % 32, (int)threadIdx.x / 32 % 4};
    OnlineSoftmax rows(first, group, g.lane, g.warp, offset, window);
    float o[128];
    attend(o, rows, g, count, high);
    write(o, rows, g, out, first, tokens, group);
  }
#endif
}
