// The packed view of a quant type: `quad::X` dequantizes four consecutive values of a matrix, from a
// packed unit (`packed`, layout in g4spec/runtime/cuda/weights/packing.py) or from a block before
// packing (`raw`). Every operation is rounded as in g4spec.quant, so results have the same bits.
// Used for embedding rows and for recomputing single logits, where speed does not matter. Here are
// its helpers and the views of table-coded types and of plain floats; the others are in
// g4spec/quant/formats/.
#pragma once
#include "codebook.cuh"
#include "five_bits.cuh"

struct CodeQuad {  // four values code * scale + offset
  int code[4];
  float scale, offset;

  DEVICE float4 values() const {
    float v[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) v[e] = __fadd_rn(__fmul_rn((float)code[e], scale), offset);
    return {v[0], v[1], v[2], v[3]};
  }
};

DEVICE float half_at(const u8* p) { return from_half(*(const u16*)p); }
DEVICE u32 word_at(const u8* p) { return ((const u16*)p)[0] | (u32)((const u16*)p)[1] << 16; }

// Location of four values in a packed unit of `columns` columns and 128 rows: columns k .. k + 3 of
// row r. With k = 64 c + 16 j + 4 t, they belong to k16 step j of lane 4 (r % 8) + t of MMA tile r
// / 16; h is 1 for rows 8 .. 15 of the tile.
struct PackedQuad {
  const u8* unit;
  int columns, r, k;

  DEVICE int tile() const { return r / 16; }
  DEVICE int h() const { return r / 8 % 2; }
  DEVICE int j() const { return k / 16 % 4; }
  // Index of the lane's words for these 64 columns.
  DEVICE int lane64() const {
    return (tile() * (columns / 64) + k / 64) * 32 + r % 8 * 4 + k / 4 % 4;
  }
  DEVICE int nibble(int e) const {
    return ((const u32*)unit)[lane64() * 4 + j()] >> (e % 2 * 16 + e / 2 * 8 + h() * 4) & 15;
  }
  DEVICE int five_bits(int e) const {
    const u32 *codes = (const u32*)unit, at = lane64();
    const auto word = [&](int i) { return codes[i < 4 ? at * 4 + i : columns * 16 + at]; };
    return five_bit_code(word, h(), e, j());
  }
  DEVICE int upper_bits(int e) const {
    const int low = (h() ? 2 - j() % 2 * 2 : 4 + j() % 2 * 2) + e / 2 * 8;
    const u32 word = ((const u32*)(unit + columns * 64))[lane64() * 2 + j() / 2];
    return (word >> (e % 2 * 16 + low) & 3) << 4;
  }
  DEVICE int byte(int e) const {
    const int lane32 = (tile() * (columns / 32) + k / 32) * 32 + r % 8 * 4 + k / 4 % 4;
    return unit[(lane32 * 4 + j() % 2 * 2 + e / 2) * 4 + h() * 2 + e % 2];
  }
  // This row's half-precision factor in plane `i`; the planes begin at byte `at`.
  DEVICE float plane(int at, int i) const {
    const int row = ((k / 32 * 4 + r / 32) * 8 + r % 8) * 4 + r / 8 % 4;
    return half_at(unit + at + i * columns * 8 + row * 2);
  }
};

namespace quad {

// Codes are indices into a table of 16 or fewer entries.
template <class T>
struct Codebook {
  static constexpr int BLOCK = T::BLOCK, BYTES = T::BYTES;

  static DEVICE float4 values(u32 entries, float scale, float least) {
    float v[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      v[e] = __fmul_rn((float)((int)(entries >> (8 * e) & 255) - 128), scale);
      if constexpr (T::MINIMUM) v[e] = __fsub_rn(v[e], least);
    }
    return {v[0], v[1], v[2], v[3]};
  }
  static DEVICE float4 raw(const u8* b, int k) {
    float least = 0.0f;
    if constexpr (T::MINIMUM) least = T::raw_minimum(b, k / T::GROUP);
    return values(codebook::looked_up_bytes<T>(T::four(b, k)), T::raw_factor(b, k / T::GROUP),
                  least);
  }
  static DEVICE float4 packed(const PackedQuad& p) {
    const int low_bytes = codebook::low_bytes<T>(p.columns);
    const u32* low = (const u32*)p.unit + p.lane64() * (T::BITS == 4 ? 4 : 2);
    const u32 high = T::BITS == 3 ? ((const u32*)(p.unit + low_bytes))[p.lane64()] : 0;
    const u32 codes = codebook::eight_codes<T>(low, high, p.j()) >> (8 * p.h());
    const u8* header = p.unit + codebook::code_bytes<T>(p.columns);
    float least = 0.0f;
    if constexpr (T::MINIMUM) least = T::minimum(header, p.r, p.k / T::GROUP);
    return values(codebook::looked_up<T>((codes & 255) | (codes >> 8 & 0xff00u)),
                  T::factor(header, p.r, p.k / T::GROUP), least);
  }
};
struct F32 {
  static constexpr int BLOCK = 4, BYTES = 16;
  static DEVICE float4 raw(const u8* b, int) { return *(const float4*)b; }
};
struct F16 {
  static constexpr int BLOCK = 4, BYTES = 8;
  static DEVICE float4 raw(const u8* b, int) {
    return {half_at(b), half_at(b + 2), half_at(b + 4), half_at(b + 6)};
  }
};
struct BF16 {
  static constexpr int BLOCK = 4, BYTES = 8;
  static DEVICE float at(const u8* b) { return from_bf16(*(const u16*)b); }
  static DEVICE float4 raw(const u8* b, int) { return {at(b), at(b + 2), at(b + 4), at(b + 6)}; }
};

}  // namespace quad
