// Prefill attention for heads of 256 on sm_90a, in the style of FlashAttention-3: scores stay in
// registers. A block handles 128 rows (token x query head) of one KV head: two consumer warp groups
// of 64 rows, and one producer thread in a third warp group, which bulk-copies tiles of 64 keys and
// values, from the last visible tile to the first. All operands are in global memory in the
// swizzled order of wgmma (prefill_kv_layout.cuh, SwizzledTiles), so a tile is one contiguous copy.
#include "online_softmax.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr int TILE = KV_TILE * 256 * 2, STAGES = 2, GROUPS = FLASH_ROWS / 64;
static_assert(TILE % 1024 == 0,
              "wgmma operands with the 128-byte swizzle start at multiples of 1024 bytes");

struct Barriers {
  u64 queries, keys[STAGES], values[STAGES], no_keys[STAGES], no_values[STAGES];
};
struct Storage {
  u8 queries[GROUPS][TILE];
  u8 keys[STAGES][TILE], values[STAGES][TILE];
  Barriers bar;
};
static_assert(sizeof(Storage) <= FLASH_SHARED, "the launch reserves FLASH_SHARED bytes");

DEVICE void issue_scores(float (&s)[32], u64 queries, u64 keys) {
#pragma unroll
  for (int k = 0; k < 16; ++k) {
    const int at = k / 4 * (8192 >> 4) + k % 4 * (32 >> 4);
    wgmma_m64n64_ss(s, queries + at, keys + at, k != 0);
  }
  wgmma_commit();
}
DEVICE void issue_values(float (&o)[128], const u32 (&p)[16], u64 values, int add) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const u32 a[4] = {p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3]};
    wgmma_m64n256_rs_mn(o, a, values + k * (2048 >> 4), k ? 1 : add);
  }
  wgmma_commit();
}
// Producer: copy the queries, then tiles `high` down to `low` of keys and values.
DEVICE void feed(Storage& sh, const u8* queries, const u8* keys, const u8* values, int low,
                 int high) {
  cp_async_bulk(sh.queries, queries, GROUPS * TILE, &sh.bar.queries);
  mbarrier_arrive_expect_tx(&sh.bar.queries, GROUPS * TILE);
  for (int i = 0; i <= high - low; ++i) {
    const int s = i % STAGES, parity = (i / STAGES + 1) % 2;
    const i64 at = (i64)(high - i) * TILE;
    mbarrier_wait(&sh.bar.no_keys[s], parity);
    cp_async_bulk(sh.keys[s], keys + at, TILE, &sh.bar.keys[s]);
    mbarrier_arrive_expect_tx(&sh.bar.keys[s], TILE);
    mbarrier_wait(&sh.bar.no_values[s], parity);
    cp_async_bulk(sh.values[s], values + at, TILE, &sh.bar.values[s]);
    mbarrier_arrive_expect_tx(&sh.bar.values[s], TILE);
  }
}

// Consumer main loop. Software-pipelined: the softmax of tile i overlaps with P V of the tile
// before.
DEVICE void attend(float (&o)[128], OnlineSoftmax& rows, Storage& sh, int mine, int low, int high,
                   int lane) {
  float s[32];
  u32 p[16];
  const u64 queries = smem_descriptor(sh.queries[mine], 0);
  mbarrier_wait(&sh.bar.queries, 0);
  for (int i = 0; i <= high - low; ++i) {
    const int stage = i % STAGES, previous_stage = (i + 1) % STAGES;
    mbarrier_wait(&sh.bar.keys[stage], i / STAGES % 2);
    warpgroup_fence_operand(s);
    wgmma_fence();
    issue_scores(s, queries, smem_descriptor(sh.keys[stage], 0));
    if (i) {
      mbarrier_wait(&sh.bar.values[previous_stage], (i - 1) / STAGES % 2);
      warpgroup_fence_operand(o);
      warpgroup_fence_operand(p);
      wgmma_fence();
      issue_values(o, p, smem_descriptor(sh.values[previous_stage], 8192), i > 1);
      wgmma_wait<1>();
    } else {
      wgmma_wait<0>();
    }
    warpgroup_fence_operand(s);
    warp_release(&sh.bar.no_keys[stage], lane);
    rows.update(s, (high - i) * KV_TILE, lane);
    if (i) {
      wgmma_wait<0>();
      warpgroup_fence_operand(o);
      warp_release(&sh.bar.no_values[previous_stage], lane);
      rescale_output(o, rows.rescale);
    }
    pack_weights(p, s);
  }
  const int last = (high - low) % STAGES;
  mbarrier_wait(&sh.bar.values[last], (high - low) / STAGES % 2);
  warpgroup_fence_operand(o);
  warpgroup_fence_operand(p);
  wgmma_fence();
  issue_values(o, p, smem_descriptor(sh.values[last], 8192), high > low);
  wgmma_wait<0>();
  warpgroup_fence_operand(o);
}

// Normalize and store: out, half [tokens, KV heads, group, 256].
DEVICE void write(const float (&o)[128], const OnlineSoftmax& rows, u16* out, int row, int tokens,
                  int group, int lane, int warp) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float sum = rows.sum[r];
    sum += __shfl_xor_sync(FULL_MASK, sum, 1);
    sum += __shfl_xor_sync(FULL_MASK, sum, 2);
    const int at = row + warp * 16 + r * 8 + lane / 4, token = at / group;
    if (token >= tokens) continue;
    const float by = 1.0f / sum;
    u16* to =
        out + (((i64)token * gridDim.y + blockIdx.y) * group + at % group) * 256 + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < 32; ++j)
      *(u32*)(to + j * 8) = pack_half2(o[4 * j + 2 * r] * by, o[4 * j + 2 * r + 1] * by);
  }
}
#endif

// Grid: (blocks of 128 rows, KV heads). queries: `query_rows` rows per KV head, token t's from row
// t * group on; keys, values: `key_rows` rows per KV head. Token t sees the `window` keys up to row
// t + offset.
__global__ void __launch_bounds__(FLASH_THREADS, 1)
flash(const u16* queries, const u16* keys, const u16* values, u16* out, int tokens, int group,
      int query_rows, int key_rows, int offset, int window) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) u8 bytes[];
  Storage& sh = *(Storage*)bytes;
  if (threadIdx.x == 0) {
    mbarrier_init(&sh.bar.queries, 1);
    for (int s = 0; s < STAGES; ++s) {
      mbarrier_init(&sh.bar.keys[s], 1), mbarrier_init(&sh.bar.values[s], 1);
      mbarrier_init(&sh.bar.no_keys[s], 4 * GROUPS),
          mbarrier_init(&sh.bar.no_values[s], 4 * GROUPS);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  const int first = (gridDim.x - 1 - blockIdx.x) * FLASH_ROWS;  // blocks with the most keys first
  const int low = max(0, first / group + offset - window + 1) / KV_TILE;
  const int high = (min((first + FLASH_ROWS - 1) / group, tokens - 1) + offset) / KV_TILE;
  if (threadIdx.x < 128) {
    setmaxnreg_dec<24>();
    const i64 head = (i64)blockIdx.y * key_rows * 512;
    if (threadIdx.x == 0)
      feed(sh, (const u8*)queries + ((i64)blockIdx.y * query_rows + first) * 512,
           (const u8*)keys + head, (const u8*)values + head, low, high);
  } else {
    setmaxnreg_inc<240>();
    const int mine = threadIdx.x / 128 - 1, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int row = first + mine * 64;
    OnlineSoftmax rows(row, group, lane, warp, offset, window);
    float o[128];
    attend(o, rows, sh, mine, low, high, lane);
    write(o, rows, out, row, tokens, group, lane, warp);
  }
#endif
}
