// Packed activations: the input of a GEMM, in half precision, in the order in which tensor cores
// read it, together with sums of the values that formats with a bias or minimum need. Described in
// g4spec/runtime/cuda/step/packed_rows.py.
//
// Up to 16 rows use the fragment layout: per block of 64 columns, the B fragments of mma.m16n8k16,
// then the block's sums. More rows form groups of 16 in the swizzled layout (ldmatrix, wgmma): see
// `swizzled_word_offset`. The input of experts.cu is in groups of 8 in the fragment layout.
#pragma once
#include "math.cuh"

// Fragment layout: ACT_BYTES per 64 columns of 8 rows. Offsets of the sums in it: sums of 16 values
// as two halves each (high part and remainder), sums of 32 values as floats and as two halves each.
static_assert(ACT_COLUMNS == 64 && GROUP_ROWS == 16, "a block is 4 k16 steps, a group two tiles");
static_assert(SPLIT16 == 8 * 64 * 2, "sums follow the halves of 8 rows of 64 values");
static_assert(SUMS32 == SPLIT16 + 8 * 4 * 4, "four sums of 16 per row, each as two halves");
static_assert(SPLIT32 == SUMS32 + 8 * 2 * 4, "two sums of 32 per row as floats");
static_assert(ACT_BYTES == SPLIT32 + 8 * 2 * 4, "two sums of 32 per row, each as two halves");
// Activations as int8: g4spec/runtime/cuda/step/screen.py.
static_assert(BYTE_SCALES == 8 * 256 && BYTE_ROWS == BYTE_SCALES + 8 * 4,
              "a float per row follows the codes");

DEVICE int tiles_of(int rows) { return rows <= 8 ? 1 : 2; }

// Position of row m of `rows` rows: row `row` of group `index`, which has `count` rows in `tiles`
// tiles of 8. With more than 16 rows, groups of 16 follow each other, each of two tiles, in the
// swizzled layout. `single`: groups of one tile, in the fragment layout (the input of experts.cu).
struct RowGroup {
  int index, row, count, tiles;
  bool swizzled;

  DEVICE RowGroup(int m, int rows, bool single = false) : swizzled(rows > GROUP_ROWS && !single) {
    const int each = single ? 8 : GROUP_ROWS;
    index = m / each, row = m % each;
    const int left = rows - index * each;
    count = left < each ? left : each;
    tiles = single ? 1 : tiles_of(rows);
  }
  DEVICE RowGroup with_row(int other) const {
    RowGroup g = *this;
    g.row = other;
    return g;
  }
  // Start of the group. `blocks`: blocks of 64 columns per row.
  DEVICE u8* start_of(u8* rows, int blocks) const {
    return rows + (i64)index * blocks * tiles * ACT_BYTES;
  }
};

// Swizzled layout of a group: halves [2 tiles][blocks of 64 columns][8 rows][8 chunks of 16 bytes]
// with chunk p of row r at position p ^ r (the 128-byte swizzle), then the three kinds of sums,
// each [blocks]. K is permuted so that ldmatrix gives each lane the operands of the fragment
// layout: columns 16 i + 4 t, + 1 are word t of chunk 2 i, columns 16 i + 4 t + 2, + 3 are word t
// of chunk 2 i + 1. Byte offset of word t of chunk `piece`:
static_assert(TILE_BYTES == 8 * ACT_COLUMNS * 2, "halves of 8 rows");
DEVICE u32 swizzled_word_offset(u32 blocks, u32 block, u32 row, u32 piece, u32 t) {
  return (row / 8 * blocks + block) * TILE_BYTES + row % 8 * 128 + (piece ^ row % 8) * 16 + t * 4;
}
constexpr u32 NEXT_CHUNK = 16;  // xor-ed to an offset in chunk 2 i, gives chunk 2 i + 1

// Two sums as a half2, and their rounding errors as another.
DEVICE uint2 split_sums(float a, float b) {
  const u32 high = pack_half2(a, b);
  return {high, pack_half2(a - from_half((u16)high), b - from_half((u16)(high >> 16)))};
}
// Byte offsets of the sums of row m, from the start of its block: `split16` and `sums32` of 32
// columns (`half` 0 or 1 of the block), `split32` of all 64.
struct SumOffsets {
  u32 split16, sums32, split32, low32;  // low32: remainders of split32

  SumOffsets() = default;
  DEVICE SumOffsets(u32 tiles, u32 m, u32 half) {
    const u32 at = half * 8 * tiles + m;
    split16 = SPLIT16 * tiles + at * 8;
    sums32 = SUMS32 * tiles + at * 4;
    split32 = SPLIT32 * tiles + m * 8, low32 = split32 + 4;
  }
  // Swizzled layout: from the start of the group, whose rows have `blocks` blocks.
  DEVICE SumOffsets(u32 blocks, u32 block, u32 m, u32 half) {
    split16 = blocks * (2 * SPLIT16) + block * (2 * (SUMS32 - SPLIT16)) + (half * 16 + m) * 8;
    sums32 = blocks * (2 * SUMS32) + block * (2 * (SPLIT32 - SUMS32)) + (half * 16 + m) * 4;
    // [unit of 4 blocks][tile][high part, remainder][8 rows][sums of the unit]: a wgmma operand
    // without swizzle. The last unit may be shorter.
    const u32 first = block & ~3u, some = min(blocks - first, 4u);
    low32 = 32 * some;
    split32 = blocks * (2 * SPLIT32) + first * (2 * (ACT_BYTES - SPLIT32)) + m / 8 * (2 * low32) +
              (m % 8 * some + block % 4) * 4;
    low32 += split32;
  }
  DEVICE void store32(u8* block, float a, float b) const {  // a, b: sums of 16 columns
    *(uint2*)(block + split16) = split_sums(a, b);
    *(float*)(block + sums32) = -1024.0f * (a + b);
  }
  DEVICE void store64(u8* block, float a, float b) const {  // a, b: sums of 32 columns
    const uint2 sums = split_sums(a, b);
    *(u32*)(block + split32) = sums.x, *(u32*)(block + low32) = sums.y;
  }
};

// Byte offset of word 0 .. 7 of a row's sums: four words split16, two sums32, two split32.
DEVICE int sum_word_offset(int tiles, int m, int word) {
  const SumOffsets at(tiles, m, word < 4 ? word / 2 : word % 2);
  return word < 4 ? at.split16 + word % 2 * 4 : word < 6 ? at.sums32 : at.split32 + word % 2 * 4;
}

// Byte offsets at which values 4 i .. 4 i + 3 of a row are stored.
struct QuadOffsets {
  u32 block, halves;
  u32 quad;  // i % 16: which four values of the block
  SumOffsets sums;

  QuadOffsets() = default;
  // Row `own` of `width` values; offsets from the start of all rows.
  DEVICE QuadOffsets(const RowGroup& own, u32 width, u32 i)
      : QuadOffsets(own.tiles, own.row, i, own.swizzled ? width / 64 : 0) {
    block = materialize(block + own.index * (width / 64 * (own.tiles * ACT_BYTES)));
  }
  // Offsets from the start of the row's group. `blocks`: blocks of a row in the swizzled layout,
  // else 0.
  DEVICE QuadOffsets(u32 tiles, u32 m, u32 i, u32 blocks = 0) {
    const u32 k16 = i / 4 % 4, lane = m % 8 * 4 + i % 4;
    quad = materialize(i % 16);
    block = materialize(blocks ? 0 : i / 16 * (ACT_BYTES * tiles));
    halves = materialize(blocks       ? swizzled_word_offset(blocks, i / 16, m, k16 * 2, i % 4)
                         : tiles == 1 ? (k16 / 2 * 32 + lane) * 16 + k16 % 2 * 8
                                      : (k16 * 32 + lane) * 16 + m / 8 * 8);
    sums = blocks ? SumOffsets(blocks, i / 16, m, k16 / 2) : SumOffsets(tiles, m, k16 / 2);
    sums.split16 = materialize(sums.split16), sums.sums32 = materialize(sums.sums32);
  }

  // Convert to half and store, with the sums. All lanes of a warp call it, with consecutive i from
  // a multiple of 16 on; `valid` is equal for each 16 lanes. `swizzled`: the layout of the offsets.
  DEVICE void store(u8* rows, float4 v, bool valid, bool swizzled = false) const {
    const uint2 h = {pack_half2(v.x, v.y), pack_half2(v.z, v.w)};
    float sum = (from_half(h.x) + from_half(h.x >> 16)) + (from_half(h.y) + from_half(h.y >> 16));
    sum += __shfl_xor_sync(FULL_MASK, sum, 1);
    sum += __shfl_xor_sync(FULL_MASK, sum, 2);
    const float next16 = __shfl_xor_sync(FULL_MASK, sum, 4), sum32 = sum + next16;
    const float next32 = __shfl_xor_sync(FULL_MASK, sum32, 8);
    if (!valid) return;
    u8* to = rows + block;
    if (swizzled)
      *(u32*)(to + halves) = h.x, *(u32*)(to + (halves ^ NEXT_CHUNK)) = h.y;
    else
      *(uint2*)(to + halves) = h;
    if (quad % 8 == 0) sums.store32(to, sum, next16);
    if (quad == 0) sums.store64(to, sum32, next32);
  }
};
