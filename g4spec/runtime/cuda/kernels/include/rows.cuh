// Input of a product: up to 16 rows as half, in the order in which the tensor cores read them. The
// format is described in g4spec/runtime/cuda/rows.py.
#pragma once
#include "ptx.cuh"

DEVICE int tiles_of(int rows) { return rows <= 8 ? 1 : 2; }

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

// Where values 4 i .. 4 i + 3 of row m go, in bytes.
struct RowPlace {
  static constexpr u32 NOWHERE = ~0u;
  u32 halves, n16, n32;  // NOWHERE in lanes that do not write sums

  RowPlace() = default;
  DEVICE RowPlace(int tiles, int m, int i) {
    const int block = i / 16 * (1216 * tiles), sums = block + 1024 * tiles + m * 4;
    const int k16 = i / 4 % 4, lane = m % 8 * 4 + i % 4;
    const int at = tiles == 1 ? (k16 / 2 * 32 + lane) * 16 + k16 % 2 * 8
                              : (k16 * 32 + lane) * 16 + m / 8 * 8;
    halves = now(block + at);
    n16 = now(i % 4 == 0 ? sums + k16 * 32 * tiles : NOWHERE);
    n32 = now(i % 8 == 0 ? sums + (4 + k16 / 2) * 32 * tiles : NOWHERE);
  }

  // All lanes of a warp call it, with consecutive i that start at a multiple of 16; `valid` is the
  // same for 16 lanes.
  DEVICE void store(u8* rows, float4 v, bool valid) const {
    const uint2 h = {pack_halves(v.x, v.y), pack_halves(v.z, v.w)};
    float sum = (from_half(h.x) + from_half(h.x >> 16)) + (from_half(h.y) + from_half(h.y >> 16));
    sum += __shfl_xor_sync(FULL, sum, 1);
    sum += __shfl_xor_sync(FULL, sum, 2);
    const float sum16 = -1024.0f * sum, sum32 = sum16 + __shfl_xor_sync(FULL, sum16, 4);
    if (!valid) return;
    *(uint2*)(rows + halves) = h;
    if (n16 != NOWHERE) *(float*)(rows + n16) = sum16;
    if (n32 != NOWHERE) *(float*)(rows + n32) = sum32;
  }
};
