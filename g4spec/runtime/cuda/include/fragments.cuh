// The fragment view of a quant type, dequantized: `fragment::X::values` computes the values of a
// lane's MMA fragments in float32, from a packed unit (g4spec/runtime/cuda/weights/packing.py). Used
// by dequant.cu; the GEMM kernels have their own view (gemm_tile.cuh). Here are its helpers and the
// view of table-coded types; the others are in g4spec/quant/formats/.
#pragma once
#include "codebook.cuh"
#include "five_bits.cuh"

// The integer x & mask (below 2^23) minus `bias`, as float.
DEVICE float bits_to_float(u32 x, u32 mask, float bias) {
  return __uint_as_float(and_or(x, mask, 0x4b000000u)) - (8388608.0f + bias);
}

// Bit offset of value e of row r (0: g, 1: g + 8) in a word of 4-bit codes.
DEVICE constexpr int nibble_shift(int r, int e) { return e % 2 * 16 + e / 2 * 8 + r * 4; }
// Bit offset of its two upper bits; a word serves two k16 steps.
DEVICE constexpr int upper_bits_shift(int r, int e, int j) {
  return e % 2 * 16 + e / 2 * 8 + (r ? 2 - j % 2 * 2 : 4 + j % 2 * 2);
}

// Code of BITS bits (4 or 5) of value e of row g + 8 r in k16 step j, from the lane's words.
template <int BITS>
DEVICE u32 code_bits(const u32 (&words)[5], int r, int e, int j) {
  if (BITS == 4) return words[j] >> nibble_shift(r, e) & 15;
  return five_bit_code([&](int i) { return words[i]; }, r, e, j);
}

using Values = float[2][4][4];  // [row][k16][e]

// Two factors (rows g and g + 8 of the tile) of a plane of halves [k32][warp 4][g 8][q 4], row warp
// * 32 + q * 8 + g.
DEVICE u32 plane_pair(const u8* plane, int k32, int tile, int lane) {
  return *(const u32*)(plane + ((k32 * 4 + tile / 2) * 8 + lane / 4) * 8 + tile % 2 * 4);
}

namespace fragment {

// Table-coded types.
template <class T, int K = 256>
struct Codebook {
  static constexpr int UNIT = K, CODES = codebook::code_bytes<T>(K), WORDS = T::BITS == 4 ? 4 : 2;
  static constexpr int LOW = codebook::low_bytes<T>(K), BYTES = CODES + T::HEADER * K / 2;
  const u8* unit;
  int tile, lane;

  DEVICE Codebook(const u8* unit, int tile, int lane) : unit(unit), tile(tile), lane(lane) {}
  DEVICE void values(int k64, Values& v) const {
    const int at = (tile * (K / 64) + k64) * 32 + lane;
    u32 low[WORDS], high = 0;
    if constexpr (WORDS == 4) {
      const uint4 q = load_streaming((const uint4*)unit + at);
      low[0] = q.x, low[1] = q.y, low[2] = q.z, low[3] = q.w;
    } else {
      const uint2 q = ((const uint2*)unit)[at];
      low[0] = q.x, low[1] = q.y;
    }
    if constexpr (T::BITS == 3) high = ((const u32*)(unit + LOW))[at];
    const u8* header = unit + CODES;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int group = (k64 * 4 + j) * 16 / T::GROUP;
      const u32 codes = codebook::eight_codes<T>(low, high, j);
      const u32 entries[2] = {codebook::looked_up<T>(codes), codebook::looked_up<T>(codes >> 16)};
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = tile * 16 + r * 8 + lane / 4;
        const float s = T::factor(header, row, group);
        float least = 0.0f;
        if constexpr (T::MINIMUM) least = T::minimum(header, row, group);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float x = bits_to_float(entries[e / 2] >> (16 * r + 8 * (e % 2)), 255, 128);
          v[r][j][e] = T::MINIMUM ? fmaf(s, x, -least) : s * x;
        }
      }
    }
  }
};

}  // namespace fragment
