// Work distribution of decode attention (split-KV). Keys are summed in chunks of absolute
// positions, each by one block; attention_combine.cu adds the chunks. Chunk borders depend on
// positions only, so a row's result depends neither on other rows of the step nor on the length of
// the sequence.
#pragma once
#include "kv_storage.cuh"
#include "math.cuh"

// Map of positions to chunks. Chunks have 2^shift positions. With `growing` that holds below
// GROWTH_START, and each following octave has chunks of twice the size: 2^(GROWTH_SHIFT - shift)
// chunks per octave.
struct Chunks {
  int shift, growing;

  DEVICE int chunk_of(int position) const {
    if (!growing || position < GROWTH_START) return position >> shift;
    const int octave = 31 - (GROWTH_SHIFT + 1) - __clz(position);  // GROWTH_START is octave 0
    return ((2 + octave) << (GROWTH_SHIFT - shift)) +
           ((position - (GROWTH_START << octave)) >> (shift + octave + 1));
  }
  DEVICE int start(int chunk) const {
    if (!growing) return chunk << shift;
    const int beyond = chunk - (2 << (GROWTH_SHIFT - shift));
    if (beyond < 0) return chunk << shift;
    const int octave = beyond >> (GROWTH_SHIFT - shift);
    const int inside = beyond & ((1 << (GROWTH_SHIFT - shift)) - 1);
    return (GROWTH_START << octave) + (inside << (shift + octave + 1));
  }
};

// Positions that a set of rows sees: lo .. hi are seen by some row, all_lo .. all_hi by every row.
struct Span {
  int lo, hi, all_lo, all_hi;
};

// The smaller and the larger of two numbers. Written as selects: with the built-in min() and max()
// nvcc schedules the loops of attention.cu differently.
template <class T>
DEVICE T min_of(T a, T b) {
  return a < b ? a : b;
}
template <class T>
DEVICE T max_of(T a, T b) {
  return a > b ? a : b;
}

DEVICE Span span_of(const i64* first, const i64* last, int tokens) {
  const int lane = threadIdx.x % 32, t = lane < tokens ? lane : 0;
  const int from = (int)__ldcg(first + t), to = (int)__ldcg(last + t);
  Span s = {from, to, from, to};
#pragma unroll
  for (int step = 16; step; step /= 2) {
    s.lo = min_of(s.lo, __shfl_xor_sync(FULL_MASK, s.lo, step));
    s.hi = max_of(s.hi, __shfl_xor_sync(FULL_MASK, s.hi, step));
    s.all_lo = max_of(s.all_lo, __shfl_xor_sync(FULL_MASK, s.all_lo, step));
    s.all_hi = min_of(s.all_hi, __shfl_xor_sync(FULL_MASK, s.all_hi, step));
  }
  return s;
}

// One work item: the keys of one chunk (tiles tile .. end - 1), one KV head, one block of rows.
struct __align__(8) WorkItem {
  u16 tile, end;
  u16 chunk;  // relative to the first chunk that some row sees
  u8 head, row_block;
};
static_assert(sizeof(WorkItem) == 8, "items are read in one load");
static_assert(MAX_ITEM_HEADS == 1 << 8 * sizeof(WorkItem::head) &&
                  MAX_ITEM_TILES == (1 << 8 * sizeof(WorkItem::tile)) - 1,
              "attention.py takes no layer with more");

// `blocks` blocks of the launch work on `sequence`; this block is number `own` of them.
struct BlockShare {
  int sequence, own, blocks;
};

// Work list of a block, in shared memory. Every (KV head, row block) pair gets the same number of
// blocks, so that blocks that read the same keys read them at the same time. Chunks are dealt from
// the last to the first; each goes to the block of its pair with the lowest cost so far (greedy
// scheduling).
template <int KEYS>  // keys per tile
struct AttentionWork {
  static constexpr int COST = 4;  // cost of a tile, in units of the fixed cost of a chunk
  WorkItem items[MAX_ITEMS];
  Units units;
  int count, all_lo, all_hi, capacity, n_kv;
  int sequence;

  // Cost of a sequence for each (KV head, row block) pair, and how many pairs fit into one block's
  // list.
  struct Cost {
    u32 of_pair, pairs;

    // Number of blocks for `all` pairs such that none costs more than `time`.
    DEVICE u32 blocks(u32 time, u32 all) const {
      if (time < of_pair) return all * ((of_pair + time - 1) / time);
      const u32 some = min_of(min_of(time / of_pair, pairs), all);
      return (all + some - 1) / some;
    }
  };

  // Assign the blocks of the launch to sequences so that the largest cost of a block is minimal
  // (binary search over that cost); leftover blocks get no work. The grid is enough for blocks whose
  // lists are full. Called by one warp.
  DEVICE BlockShare assign_block(const Chunks& chunks, const i64* first, const i64* last,
                                 int sequences, int tokens, int pairs) {
    if (sequences == 1) return {0, (int)blockIdx.x, (int)gridDim.x};
    const int each = gridDim.x / sequences, at = blockIdx.x;
    if (sequences > MAX_ITEMS)
      return {at % sequences, at / sequences, at / sequences < each ? each : 0};
    static_assert(sizeof(Cost) <= sizeof(WorkItem), "one cost per sequence fits into `items`");
    Cost* costs = (Cost*)items;  // scratch: items are written later
    const int lane = threadIdx.x % 32;
    u32 all = 0, longest = 0;
    for (int s = lane; s < sequences; s += 32) {
      int lo = 0x7fffffff, hi = 0;
#pragma unroll
      for (int t = 0; t < MAX_STEP_ROWS; ++t)
        if (t < tokens) {
          lo = min_of(lo, (int)__ldcg(first + s * tokens + t));
          hi = max_of(hi, (int)__ldcg(last + s * tokens + t));
        }
      const u32 some = chunks.chunk_of(hi) - chunks.chunk_of(lo) + 1;
      costs[s] = {(hi / KEYS - lo / KEYS + 1) * COST + some, MAX_ITEMS / some};
      all += costs[s].of_pair, longest = max_of(longest, costs[s].of_pair);
    }
    __syncwarp();
    longest = ~__reduce_min_sync(FULL_MASK, ~longest);
    // Lower and upper bound: one block for each pair, if the launch has so many, or for all.
    u32 low = total(all) * pairs / gridDim.x;
    u32 time = sequences * pairs <= (int)gridDim.x ? longest : longest * pairs;
    for (int step = 0; step < 16 && low + 1 < time; ++step) {
      const u32 middle = (low + time) / 2;
      u32 blocks = 0;
      for (int s = lane; s < sequences; s += 32) blocks += costs[s].blocks(middle, pairs);
      if (total(blocks) <= gridDim.x)
        time = middle;
      else
        low = middle;
    }
    BlockShare found = {0, 0, 0};
    int begin = 0;
    for (int base = 0; base < sequences; base += 32) {
      const int n = base + lane < sequences ? costs[base + lane].blocks(time, pairs) : 0;
      int end = n;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int before = __shfl_up_sync(FULL_MASK, end, step);
        if (lane >= step) end += before;
      }
      const int own = at - begin - (end - n);
      const u32 mine = __ballot_sync(FULL_MASK, own >= 0 && own < n);
      if (mine) {
        const int of = __ffs(mine) - 1;
        found = {base + of, __shfl_sync(FULL_MASK, own, of), __shfl_sync(FULL_MASK, n, of)};
      }
      begin += __shfl_sync(FULL_MASK, end, 31);
    }
    __syncwarp();
    return found;
  }
  static DEVICE u32 total(u32 x) {  // sum over the warp
#pragma unroll
    for (int step = 16; step; step /= 2) x += __shfl_xor_sync(FULL_MASK, x, step);
    return x;
  }

  // Build this block's list. Called by one warp; each lane simulates one block of the pair. With
  // more than 32 blocks per pair, they form sets of at most 32, and set i takes every n-th chunk.
  // With fewer blocks than pairs, a block takes several pairs.
  DEVICE void build_items(const Chunks& chunks, const Span& span, const Units& where,
                          int rows_of_unit, int heads, int row_blocks, const BlockShare& share) {
    const int lane = threadIdx.x % 32, low = chunks.chunk_of(span.lo),
              high = chunks.chunk_of(span.hi);
    const int found =
        share.blocks < heads * row_blocks
            ? items_of_few_blocks(chunks, span, low, high, heads * row_blocks, row_blocks, share)
            : items_of_many_blocks(chunks, span, low, high, heads, row_blocks, share);
    if (lane) return;
    count = found, all_lo = span.all_lo, all_hi = span.all_hi;
    units = where, capacity = rows_of_unit, n_kv = heads, sequence = share.sequence;
  }
  DEVICE int items_of_few_blocks(const Chunks& chunks, const Span& span, int low, int high,
                                 int pairs, int row_blocks, const BlockShare& share) {
    if (share.blocks == 0) return 0;
    const int each = (pairs + share.blocks - 1) / share.blocks, from = share.own * each;
    const int some = high - low + 1, found = max_of(0, min_of(each, pairs - from)) * some;
    for (int i = threadIdx.x % 32; i < found; i += 32) {
      const int pair = from + i / some, chunk = high - i % some;
      items[i] = item_of(chunks, span, low, chunk, pair / row_blocks, pair % row_blocks);
    }
    return found;
  }
  DEVICE WorkItem item_of(const Chunks& chunks, const Span& span, int low, int chunk, int head,
                          int rows) const {
    const int begin = max_of(chunks.start(chunk), span.lo) / KEYS;
    const int end = min_of(chunks.start(chunk + 1) - 1, span.hi) / KEYS + 1;
    return {(u16)begin, (u16)end, (u16)(chunk - low), (u8)head, (u8)rows};
  }
  DEVICE int items_of_many_blocks(const Chunks& chunks, const Span& span, int low, int high,
                                  int heads, int row_blocks, const BlockShare& share) {
    const int lane = threadIdx.x % 32;
    const u32 each = share.blocks / (u32)(heads * row_blocks), turns = (each + 31) / 32;
    const u32 blocks = each / turns, place = share.own / blocks, own = share.own - place * blocks;
    const u32 pair = place / turns, head = pair / (u32)row_blocks, rows = pair - head * row_blocks;
    WorkItem item;
    auto open = [&](int chunk) {  // set `item`; return its cost, 0 past the first chunk
      if (chunk < low || head >= heads) return 0;
      item = item_of(chunks, span, low, chunk, head, rows);
      return ((item.end - item.tile) * COST + 1) * 32;
    };
    int chunk = high - (place - pair * turns) - lane * turns, found = 0;
    u32 cost = open(chunk), load = lane < blocks ? cost + lane : ~0u;  // cost * 32 + block number
    if (cost && lane == own) items[0] = item, found = 1;
    found = __shfl_sync(FULL_MASK, found, own);
    chunk -= blocks * turns;
    while (__shfl_sync(FULL_MASK, cost = open(chunk), 0)) {
#pragma unroll 8
      for (int i = 0; i < 32; ++i) {
        const u32 more = __shfl_sync(FULL_MASK, cost, i), free = __reduce_min_sync(FULL_MASK, load);
        if (load == free) load += more;
        const bool mine = more && free % 32 == own;
        if (mine && lane == i) items[found] = item;
        found += mine;
      }
      chunk -= 32 * turns;
    }
    return found;
  }
  // Index of the [capacity, columns] block of a plane that stores a position of a head.
  DEVICE int kv_block(int position, int head) const {
    return units.unit_of(position) * n_kv + head;
  }
  DEVICE bool fully_visible(int tile) const {  // every row sees all keys of the tile
    return tile * KEYS >= all_lo && tile * KEYS + KEYS - 1 <= all_hi;
  }
  DEVICE bool visible_to_all(int position) const {
    return position >= all_lo && position <= all_hi;
  }
};
