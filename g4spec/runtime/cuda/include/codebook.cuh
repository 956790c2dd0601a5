// Quant types whose codes are indices into a table of up to 16 entries: value = factor *
// table[code] (Q2_K: minus a minimum). These are the parts that types share. The traits
// `codebook::X` of a type, which all of its views use, are in g4spec/quant/formats/. Table entries
// are integers in -128 .. 127. Block layouts: g4spec/runtime/cuda/weights/held.py; packed units:
// g4spec/runtime/cuda/weights/packing.py.
#pragma once
#include "ptx.cuh"

namespace codebook {

// Four table entries as bytes, with 128 added.
constexpr u32 entries(int a, int b, int c, int d) {
  return (u32)(a + 128) | (u32)(b + 128) << 8 | (u32)(c + 128) << 16 | (u32)(d + 128) << 24;
}

DEVICE float half_of(const u8* p) { return from_half(*(const u16*)p); }

// Layout of the codes in a block. LOW: offset of the low 4 bits (BITS 4) or low 2 bits (BITS 2, 3);
// HIGH: offset of the third bits. RUN: bytes whose lowest bits belong to RUN consecutive values;
// their next bits belong to the RUN values after these.
template <int BITS_, int GROUP_, int BLOCK_, int BYTES_, int LOW_, int RUN_ = BITS_ == 4 ? 16 : 32>
struct Codes {
  static constexpr int BITS = BITS_, GROUP = GROUP_, BLOCK = BLOCK_, BYTES = BYTES_;
  static constexpr int LOW = LOW_, HIGH = LOW_ + 64, RUN = RUN_;
  static constexpr bool MINIMUM = false;

  static DEVICE u32 four_bytes(const u8* p) {
    if constexpr (BYTES % 2) return p[0] | p[1] << 8 | p[2] << 16 | (u32)p[3] << 24;
    return ((const u16*)p)[0] | (u32)((const u16*)p)[1] << 16;
  }
  // Codes k .. k + 3 of a block, one per byte.
  static DEVICE u32 four(const u8* block, int k) {
    constexpr int WIDTH = BITS == 4 ? 4 : 2, SPAN = RUN * 8 / WIDTH;
    const int rest = k % SPAN;
    const u32 low = four_bytes(block + LOW + k / SPAN * RUN + rest % RUN) >> (rest / RUN * WIDTH);
    if constexpr (BITS == 4) return low & 0x0f0f0f0fu;
    if constexpr (BITS == 2) return low & 0x03030303u;
    return (low & 0x03030303u) |
           (four_bytes(block + HIGH + k % 32) >> (k / 32) & 0x01010101u) << 2;
  }
};

// Types with an int8 scale per GROUP values and a half-precision factor per 256 values, times 1 /
// SHARE. Block: codes, scales, factor. Packed unit: scales of 128 rows, then their factors.
template <int BITS, int GROUP, int SHARE>
struct Scaled : Codes<BITS, GROUP, 256, (BITS == 4 ? 128 : 96) + 256 / GROUP + 2, 0> {
  static constexpr int SCALES = 256 / GROUP, AT = BITS == 4 ? 128 : 96, HEADER = SCALES + 2;

  static DEVICE float times(float d, int scale) {
    return __fmul_rn(d, (float)scale) * (1.0f / SHARE);
  }
  static DEVICE float raw_factor(const u8* b, int i) {
    return times(half_of(b + AT + SCALES), (i8)b[AT + i]);
  }
  static DEVICE float factor(const u8* header, int row, int i) {
    return times(half_of(header + SCALES * 128 + row * 2), (i8)header[row * SCALES + i]);
  }
  template <int N>
  static DEVICE void factors(float (&f)[N], const u8* header, int row) {
    const float d = half_of(header + SCALES * 128 + row * 2) * (1.0f / SHARE);
    const u32* four = (const u32*)(header + row * SCALES);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const u32 bits = permute(four[i / 4] ^ 0x80808080u, 0x4b000000u, 0x7540 + i % 4);
      f[i] = d * (__uint_as_float(bits) - (8388608.0f + 128.0f));
    }
  }
};

// Types with one factor of W bytes per GROUP values, decoded by `F::of`. Packed unit: for each
// group, the factors of 128 rows.
template <class F, int W>
struct Apart {
  static DEVICE float factor(const u8* header, int row, int i) {
    return F::of(header + (i * 128 + row) * W);
  }
  template <int N>
  static DEVICE void factors(float (&f)[N], const u8* header, int row) {
#pragma unroll
    for (int i = 0; i < N; ++i) f[i] = factor(header, row, i);
  }
};

struct Linear4 {  // IQ4_NL, IQ4_XS
  static constexpr u32 TABLE[4] = {entries(-127, -104, -83, -65), entries(-49, -35, -22, -10),
                                   entries(1, 13, 25, 38), entries(53, 69, 89, 113)};
};
struct E2M1 {  // MXFP4, NVFP4: twice the FP4 values
  static constexpr u32 TABLE[4] = {entries(0, 1, 2, 3), entries(4, 6, 8, 12),
                                   entries(0, -1, -2, -3), entries(-4, -6, -8, -12)};
};
struct Grid2 {  // IQ2_XXS, IQ2_XS, IQ2_S
  static constexpr u32 TABLE[4] = {entries(8, 25, 43, 0), entries(-8, -25, -43, 0), 0, 0};
};
struct Grid1 {  // IQ1_S, IQ1_M: 8 * (grid entry +- delta)
  static constexpr u32 TABLE[4] = {entries(-7, 1, 9, 0), entries(-9, -1, 7, 0), 0, 0};
};

// Bytes of a packed unit of `columns` columns: its low code bits (low_bytes), and all codes
// (code_bytes), which is also the offset of its header.
template <class T>
DEVICE constexpr int low_bytes(int columns) {
  return columns * (T::BITS == 4 ? 64 : 32);
}
template <class T>
DEVICE constexpr int code_bytes(int columns) {
  return columns * (16 * T::BITS);
}

// Table lookup of four 4-bit codes; entries as bytes with 128 added.
template <class T>
DEVICE u32 looked_up(u32 codes) {
  if constexpr (T::BITS < 4) return permute_unmasked(T::TABLE[0], T::TABLE[1], codes);
  const u32 low = codes & 0x7777u;
  return permute_unmasked(permute_unmasked(T::TABLE[0], T::TABLE[1], low),
                          permute_unmasked(T::TABLE[2], T::TABLE[3], low),
                          and_or(codes >> 1, 0x4444u, 0x3210u));
}

// A lane's eight codes of k16 step j: rows g + 8 h, columns 4 t + 2 e1 + e0, at bits 16 e1 + 8 h +
// 4 e0. `low`, `high`: the lane's words of 64 columns.
template <class T>
DEVICE u32 eight_codes(const u32* low, u32 high, int j) {
  if constexpr (T::BITS == 4) return low[j];
  const u32 two = low[j / 2] >> (j % 2 * 2) & 0x33333333u;
  if constexpr (T::BITS == 2) return two;
  return and_or(j < 2 ? high << (2 - j) : high >> (j - 2), 0x44444444u, two);
}

}  // namespace codebook
