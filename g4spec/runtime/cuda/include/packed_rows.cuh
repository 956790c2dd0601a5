// Input of a product: up to 16 rows as half, in the order in which the tensor cores read them. The
// format is described in g4spec/runtime/cuda/step/packed_rows.py.
#pragma once
#include "ptx.cuh"

// Bytes of 64 values of 8 rows, and where their sums are: of 16 in two halves each, of 32 as floats
// and in two halves each.
constexpr int ACT_BYTES = 1280, SPLIT16 = 1024, SUMS32 = 1152, SPLIT32 = 1216;
// Bytes of 256 values of 8 rows where values are bytes (g4spec/runtime/cuda/step/screen.py), and where the
// scales of these rows are.
constexpr int BYTE_SCALES = 2048, BYTE_ROWS = BYTE_SCALES + 32;

DEVICE int tiles_of(int rows) { return rows <= 8 ? 1 : 2; }

// More than 16 rows come in groups of 16, one behind the other, all in two tiles that lie row by row
// (`swizzled_word_offset`). Row m of `rows` is row `row` of its group, which has `count` rows.
struct RowGroup {
  int index, row, count, tiles;
  bool swizzled;

  DEVICE RowGroup(int m, int rows) {
    index = m / 16, row = m % 16;
    count = rows - index * 16 < 16 ? rows - index * 16 : 16;
    tiles = tiles_of(rows), swizzled = rows > 16;
  }
  DEVICE RowGroup with_row(int other) const {
    RowGroup g = *this;
    g.row = other;
    return g;
  }
  // Where the group begins; `blocks` of 64 columns are a row. Groups in front have two tiles.
  DEVICE u8* start_of(u8* rows, int blocks) const { return rows + (i64)index * blocks * (2 * ACT_BYTES); }
};

// A group of more than 16 rows: halves [2 tiles][blocks of 64 columns][8 rows][8 pieces of 16 bytes],
// piece p of row r in place p ^ r (the 128-byte swizzle), then sums, a kind behind the other, each
// [blocks]. Of columns 16 i + 4 t and on, two are word t of piece 2 i and two word t of piece 2 i + 1:
// in this order of K a lane has its operands. Where such a word is, in bytes:
constexpr int TILE_BYTES = 1024;
DEVICE u32 swizzled_word_offset(u32 blocks, u32 block, u32 row, u32 piece, u32 t) {
  return (row / 8 * blocks + block) * TILE_BYTES + row % 8 * 128 + (piece ^ row % 8) * 16 + t * 4;
}
constexpr u32 NEXT_CHUNK = 16;  // from piece 2 i to 2 i + 1, by exclusive or

DEVICE float sum4(float4 v) { return (v.x + v.y) + (v.z + v.w); }
DEVICE float4 mul4(float4 a, float s) { return {a.x * s, a.y * s, a.z * s, a.w * s}; }
DEVICE float4 mul4(float4 a, float4 b) { return {a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w}; }
DEVICE float4 add4(float4 a, float4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }
DEVICE float square4(float4 v) { return (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w); }
DEVICE float largest4(float4 v) {
  return fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
}
DEVICE bool finite4(float4 v) {  // NaN - NaN and inf - inf are NaN
  return sum4({v.x - v.x, v.y - v.y, v.z - v.z, v.w - v.w}) == 0.0f;
}

// Two sums as halves, and what halves leave of them.
DEVICE uint2 split_sums(float a, float b) {
  const u32 high = pack_half2(a, b);
  return {high, pack_half2(a - from_half((u16)high), b - from_half((u16)(high >> 16)))};
}
// Where the sums of row m go, in bytes from the start of its block: those of half `half`, and those of
// both.
struct SumOffsets {
  u32 split16, sums32, split32;

  SumOffsets() = default;
  DEVICE SumOffsets(u32 tiles, u32 m, u32 half) {
    const u32 at = half * 8 * tiles + m;
    split16 = SPLIT16 * tiles + at * 8;
    sums32 = SUMS32 * tiles + at * 4;
    split32 = SPLIT32 * tiles + m * 8;
  }
  // The same in bytes from the start of a group of more than 16 rows of so many blocks.
  DEVICE SumOffsets(u32 blocks, u32 block, u32 m, u32 half) {
    split16 = blocks * (2 * SPLIT16) + block * (2 * (SUMS32 - SPLIT16)) + (half * 16 + m) * 8;
    sums32 = blocks * (2 * SUMS32) + block * (2 * (SPLIT32 - SUMS32)) + (half * 16 + m) * 4;
    split32 = blocks * (2 * SPLIT32) + block * (2 * (ACT_BYTES - SPLIT32)) + m * 8;
  }
  DEVICE void store32(u8* block, float a, float b) const {  // a, b: of 16
    *(uint2*)(block + split16) = split_sums(a, b);
    *(float*)(block + sums32) = -1024.0f * (a + b);
  }
  DEVICE void store64(u8* block, float a, float b) const {  // a, b: of 32
    *(uint2*)(block + split32) = split_sums(a, b);
  }
};

// Where the eight words of a row's sums are: split 16s of both halves, 32s, split 32s.
DEVICE int sum_word_offset(int tiles, int m, int word) {
  const SumOffsets at(tiles, m, word < 4 ? word / 2 : word % 2);
  return word < 4 ? at.split16 + word % 2 * 4 : word < 6 ? at.sums32 : at.split32 + word % 2 * 4;
}

// Where values 4 i .. 4 i + 3 of row m go, in bytes.
struct QuadOffsets {
  u32 block, halves;
  u32 quad;  // of 16
  SumOffsets sums;

  QuadOffsets() = default;
  // Of a row of `width` values.
  DEVICE QuadOffsets(const RowGroup& own, u32 width, u32 i)
      : QuadOffsets(own.tiles, own.row, i, own.swizzled ? width / 64 : 0) {
    block = materialize(block + own.index * (width / 64 * (2 * ACT_BYTES)));
  }
  // From the start of its group; `blocks` of a row among more than 16, else 0.
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

  // All lanes of a warp call it, with consecutive i that start at a multiple of 16; `valid` is the
  // same for 16 lanes. `tiled`: as it was made.
  DEVICE void store(u8* rows, float4 v, bool valid, bool swizzled = false) const {
    const uint2 h = {pack_half2(v.x, v.y), pack_half2(v.z, v.w)};
    float sum = (from_half(h.x) + from_half(h.x >> 16)) + (from_half(h.y) + from_half(h.y >> 16));
    sum += __shfl_xor_sync(FULL_MASK, sum, 1);
    sum += __shfl_xor_sync(FULL_MASK, sum, 2);
    const float next16 = __shfl_xor_sync(FULL_MASK, sum, 4), sum32 = sum + next16;
    const float next32 = __shfl_xor_sync(FULL_MASK, sum32, 8);
    if (!valid) return;
    u8* to = rows + block;
    if (swizzled) *(u32*)(to + halves) = h.x, *(u32*)(to + (halves ^ NEXT_CHUNK)) = h.y;
    else *(uint2*)(to + halves) = h;
    if (quad % 8 == 0) sums.store32(to, sum, next16);
    if (quad == 0) sums.store64(to, sum32, next32);
  }
};
