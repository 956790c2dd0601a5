// Dequantization of four consecutive values of a matrix, from a block as the file stores it (`raw`)
// or from a packed unit (`packed`, layout in g4spec/runtime/cuda/weights/packing.py). Every
// operation is rounded as in g4spec.quant, so results have the same bits. Used for embedding rows
// and for recomputing single logits, where speed does not matter.
#pragma once
#include "codebook.cuh"

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
  DEVICE int fifth_bit(int e) const {
    const int low = h() ? 8 + e / 2 * 4 : 4 - e / 2 * 4;
    return (((const u32*)(unit + columns * 64))[lane64()] >> (e % 2 * 16 + low + j()) & 1) << 4;
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

// Q4_0, Q4_1, Q5_0, Q5_1
template <int BITS, bool MINIMUM>
struct Legacy {
  static constexpr int BLOCK = 32, HEAD = MINIMUM ? 4 : 2, CODES = HEAD + (BITS == 5 ? 4 : 0);
  static constexpr int BYTES = CODES + 16;
  static constexpr int BIAS = MINIMUM ? 0 : 1 << (BITS - 1);

  static DEVICE float4 raw(const u8* b, int k) {
    CodeQuad f;
    f.scale = half_at(b), f.offset = MINIMUM ? half_at(b + 2) : 0.0f;
    const u32 high = BITS == 5 ? word_at(b + HEAD) : 0;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int at = k + e;
      f.code[e] = (b[CODES + at % 16] >> (at / 16 * 4) & 15) | (high >> at & 1) << 4;
      f.code[e] -= BIAS;
    }
    return f.values();
  }
  static DEVICE float4 packed(const PackedQuad& p) {
    const int planes = p.columns * (BITS == 5 ? 80 : 64);
    CodeQuad f;
    f.scale = p.plane(planes, 0), f.offset = MINIMUM ? p.plane(planes, 1) : 0.0f;
#pragma unroll
    for (int e = 0; e < 4; ++e) f.code[e] = (p.nibble(e) | (BITS == 5 ? p.fifth_bit(e) : 0)) - BIAS;
    return f.values();
  }
};
using Q4_0 = Legacy<4, false>;
using Q4_1 = Legacy<4, true>;
using Q5_0 = Legacy<5, false>;
using Q5_1 = Legacy<5, true>;

struct Q8_0 {
  static constexpr int BLOCK = 32, BYTES = 34;

  static DEVICE float4 raw(const u8* b, int k) {
    CodeQuad f;
    f.scale = half_at(b), f.offset = 0.0f;
#pragma unroll
    for (int e = 0; e < 4; ++e) f.code[e] = (i8)b[2 + k + e];
    return f.values();
  }
  static DEVICE float4 packed(const PackedQuad& p) {
    CodeQuad f;
    f.scale = p.plane(p.columns * 128, 0), f.offset = 0.0f;
#pragma unroll
    for (int e = 0; e < 4; ++e) f.code[e] = p.byte(e) - 128;
    return f.values();
  }
};

// Q4_K, Q5_K
template <int BITS>
struct Affine {
  static constexpr int BLOCK = 256, CODES = BITS == 5 ? 48 : 16, BYTES = CODES + 128;

  static DEVICE void factors(CodeQuad& f, float d, float dmin, int scale, int minimum) {
    f.scale = __fmul_rn(d, (float)scale), f.offset = -__fmul_rn(dmin, (float)minimum);
  }
  static DEVICE float4 raw(const u8* b, int k) {
    const u8* s = b + 4;
    const int g = k / 32;
    CodeQuad f;
    if (g < 4)
      factors(f, half_at(b), half_at(b + 2), s[g] & 63, s[g + 4] & 63);
    else
      factors(f, half_at(b), half_at(b + 2), (s[g + 4] & 15) | s[g - 4] >> 6 << 4,
              s[g + 4] >> 4 | s[g] >> 6 << 4);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int at = k % 32 + e;
      f.code[e] = b[CODES + k / 64 * 32 + at] >> (g % 2 * 4) & 15;
      if (BITS == 5) f.code[e] |= (b[16 + at] >> g & 1) << 4;
    }
    return f.values();
  }
  static DEVICE float4 packed(const PackedQuad& p) {
    const uint4 h = *(const uint4*)(p.unit + p.columns * (BITS == 5 ? 80 : 64) + p.r * 16);
    const u64 scales = h.y | (u64)(h.w & 0xffff) << 32, minima = h.z | (u64)(h.w >> 16) << 32;
    const int shift = 6 * (p.k / 32);
    CodeQuad f;
    factors(f, from_half((u16)h.x), from_half((u16)(h.x >> 16)), (int)(scales >> shift & 63),
            (int)(minima >> shift & 63));
#pragma unroll
    for (int e = 0; e < 4; ++e) f.code[e] = p.nibble(e) | (BITS == 5 ? p.fifth_bit(e) : 0);
    return f.values();
  }
};
using Q4_K = Affine<4>;
using Q5_K = Affine<5>;

struct Q6_K {
  static constexpr int BLOCK = 256, BYTES = 210;

  static DEVICE float4 raw(const u8* b, int k) {
    const int half = k / 128, quarter = k / 32 % 4;
    CodeQuad f;
    f.scale = __fmul_rn(half_at(b + 208), (float)(i8)b[192 + k / 16]), f.offset = 0.0f;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int at = k % 32 + e;
      const int low = b[half * 64 + quarter % 2 * 32 + at] >> (quarter / 2 * 4) & 15;
      f.code[e] = (low | (b[128 + half * 32 + at] >> (quarter * 2) & 3) << 4) - 32;
    }
    return f.values();
  }
  static DEVICE float4 packed(const PackedQuad& p) {
    const u8* header = p.unit + p.columns * 96;
    CodeQuad f;
    f.scale = __fmul_rn(half_at(header + 2048 + p.r * 2), (float)(i8)header[p.r * 16 + p.k / 16]);
    f.offset = 0.0f;
#pragma unroll
    for (int e = 0; e < 4; ++e) f.code[e] = (p.nibble(e) | p.upper_bits(e)) - 32;
    return f.values();
  }
};

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
    const u32 codes = T::four(b, k), pairs = (codes | codes >> 4) & 0x00ff00ffu;
    float least = 0.0f;
    if constexpr (T::MINIMUM) least = T::raw_minimum(b, k / T::GROUP);
    return values(codebook::looked_up<T>((pairs | pairs >> 8) & 0xffffu),
                  T::raw_factor(b, k / T::GROUP), least);
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
using IQ1_M = Codebook<codebook::IQ1_M>;
using IQ1_S = Codebook<codebook::IQ1_S>;
using IQ2_S = Codebook<codebook::IQ2_S>;
using IQ2_XS = Codebook<codebook::IQ2_XS>;
using IQ2_XXS = Codebook<codebook::IQ2_XXS>;
using IQ3_S = Codebook<codebook::IQ3_S>;
using IQ3_XXS = Codebook<codebook::IQ3_XXS>;
using IQ4_NL = Codebook<codebook::IQ4_NL>;
using IQ4_XS = Codebook<codebook::IQ4_XS>;
using MXFP4 = Codebook<codebook::MXFP4>;
using NVFP4 = Codebook<codebook::NVFP4>;
using Q2_K = Codebook<codebook::Q2_K>;
using Q3_K = Codebook<codebook::Q3_K>;

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
