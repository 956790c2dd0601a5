// Quant types whose codes are indices into a table of up to 16 entries: value = factor *
// table[code] (Q2_K: minus a minimum). These are the parts that types share. The traits
// `codebook::X` of a type, which all of its views use, are in g4spec/quant/formats/. Table entries
// are integers in -128 .. 127. Block layouts: g4spec/runtime/cuda/weights/held.py; packed units:
// g4spec/runtime/cuda/weights/packing.py.
#pragma once
#include "ptx.cuh"

namespace codebook {

constexpr u32 bytes(u32 a, u32 b, u32 c, u32 d) { return a | b << 8 | c << 16 | d << 24; }
// Four table entries as bytes, with 128 added.
constexpr u32 entries(int a, int b, int c, int d) {
  return bytes(a + 128, b + 128, c + 128, d + 128);
}

DEVICE float half_of(const u8* p) { return from_half(*(const u16*)p); }

// The bits of `mask`, `at` bits higher in `word`, as a number minus `bias`. They stay where they are,
// in the mantissa of a power of two: below bit 23.
DEVICE float bits_in_place(u32 word, int at, u32 mask, float bias) {
  const u32 bits = and_or(word, mask << at, (u32)(150 - at) << 23);
  return __uint_as_float(bits) - ((float)(1 << (23 - at)) + bias);
}

// Order of the bits of codes in packed words (g4spec/runtime/cuda/weights/parts.py), chosen such
// that `fragment` needs few instructions:
//   CODES   a code in each nibble: table lookups
//   PAIRED  the lowest bit of a 4-bit code is the highest bit of its nibble
//   EVEN    4-bit codes of evenly spaced values, as in Q4_K (`subnormal_nibbles`)
//   DENSE   3-bit codes of evenly spaced values; five codes in each half of a word (`dense_word`)
enum class Order { CODES, PAIRED, EVEN, DENSE };

// Layout of the codes in a block. LOW: offset of the low 4 bits (BITS 4) or low 2 bits (BITS 2, 3);
// HIGH: offset of the third bits. RUN: bytes whose lowest bits belong to RUN consecutive values;
// their next bits belong to the RUN values after these.
template <int BITS_, int GROUP_, int BLOCK_, int BYTES_, int LOW_, Order ORDER_ = Order::CODES,
          int RUN_ = BITS_ == 4 ? 16 : 32>
struct Codes {
  static constexpr Order ORDER = ORDER_;
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

// DENSE: fragments hold code * 2^(2 j + h - 24), subnormals, for k16 step j and rows g + 8 h. Their scales are
// multiplied by 2^(5 - 2 j - h), so that all products are code * scale / DENSE_UNIT.
constexpr float DENSE_UNIT = 1 << 19;
// The exponents of these factors of steps 0 and 1 and rows g; and of -1152 times the factors.
constexpr u32 DENSE_SCALES = 0x48005000u, DENSE_SCALES_BIAS = 0xf080f880u;

// Types with 3-bit codes, an int8 scale per GROUP values and a half-precision factor per 256 values,
// times 1 / SHARE. Block: codes, scales, factor. Packed unit: scales of 128 rows, then their factors.
template <int GROUP, int SHARE, Order ORDER = Order::CODES>
struct Scaled : Codes<3, GROUP, 256, 96 + 256 / GROUP + 2, 0, ORDER> {
  static constexpr int SCALES = 256 / GROUP, AT = 96, HEADER = SCALES + 2;

  static DEVICE float times(float d, int scale) {
    return __fmul_rn(d, (float)scale) * (1.0f / SHARE);
  }
  static DEVICE float common_factor(const u8* header, int row) {
    const float unit = ORDER == Order::DENSE ? DENSE_UNIT : 1.0f;
    return half_of(header + SCALES * 128 + row * 2) * (unit / SHARE);
  }
  static DEVICE void scale_pairs(u32 (&s)[SCALES / 2], const u8* header, int row) {
    const u32* four = (const u32*)(header + row * SCALES);
#pragma unroll
    for (int i = 0; i < SCALES / 2; ++i) {
      const u32 x = permute(four[i / 2] ^ 0x80808080u, 0x64646464u, i % 2 ? 0x4342 : 0x4140);
      const u32 less = (row & 8) * 0x00800080u + i % 2 * 0x10001000u;  // 2^h, 16 in steps 2 and 3
      s[i] = ORDER == Order::DENSE ? fma_half2(x, DENSE_SCALES - less, DENSE_SCALES_BIAS - less)
                                   : sub_half2(x, 0x64806480u);  // 1024 + 128
    }
  }
  static DEVICE float raw_factor(const u8* b, int i) {
    return times(half_of(b + AT + SCALES), (i8)b[AT + i]);
  }
  static DEVICE float factor(const u8* header, int row, int i) {
    return times(half_of(header + SCALES * 128 + row * 2), (i8)header[row * SCALES + i]);
  }
};

// The same with 4-bit codes and, for each 32 values, a scale of 4 bits, which stands for 2 scale + 1. EVEN: packed
// scales 2 i and 2 i + 1 are at bit 4 i of the halves of a word.
template <int SHARE, Order ORDER = Order::CODES>
struct OddScaled : Codes<4, 32, 256, 128 + 4 + 2, 0, ORDER> {
  static constexpr int AT = 128, HEADER = 4 + 2;

  static DEVICE float times(float d, u32 scale) {
    return __fmul_rn(d, (float)(2 * (scale & 15) + 1)) * (1.0f / SHARE);
  }
  static DEVICE float raw_factor(const u8* b, int i) {
    return times(half_of(b + AT + 4), b[AT + i / 2] >> (i % 2 * 4));
  }
  static DEVICE float factor(const u8* header, int row, int i) {
    const int at = ORDER == Order::EVEN ? i % 2 * 16 + i / 2 * 4 : 4 * i;
    return times(half_of(header + 4 * 128 + row * 2), ((const u32*)header)[row] >> at);
  }
  template <int N>
  static DEVICE void factors(float (&f)[N], const u8* header, int row) {
    const float d = half_of(header + 4 * 128 + row * 2) * (2.0f / SHARE);
    const u32 scales = ((const u32*)header)[row], upper = scales >> 20;
#pragma unroll
    for (int i = 0; i < N; ++i)
      f[i] = d * bits_in_place(i < 5 ? scales : upper, i % 5 * 4, 15, -0.5f);
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
  // For PAIRED: the entries of odd codes, and how much larger they are than the entry before.
  static constexpr u32 ODD[2] = {entries(-104, -65, -35, -10), entries(13, 38, 69, 113)};
  static constexpr u32 STEPS[2] = {bytes(23, 18, 14, 12), bytes(12, 13, 16, 24)};
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

// The same for codes in the bytes of a word.
template <class T>
DEVICE u32 looked_up_bytes(u32 codes) {
  if constexpr (T::ORDER == Order::EVEN) return codes * 2 + bytes(113, 113, 113, 113);  // 2 code - 15
  const u32 pairs = (codes | codes >> 4) & 0x00ff00ffu;
  return looked_up<T>((pairs | pairs >> 8) & 0xffffu);
}

// Which of the lane's three words has the code of k16 step j, rows g + 8 h and columns 4 t + 2 e1, with
// i = 2 j + h (DENSE). It begins at bit i + 8 e1 of each half; bits that exceed the half are the lowest
// of the other half. Code i = e1 = 0 has bit n of word n instead.
DEVICE constexpr int dense_word(int i, int e1) { return (i + 2 - e1) % 3; }

DEVICE u32 rotated_right(u32 x, int bits) { return __funnelshift_r(x, x, bits); }

// A lane's eight codes of k16 step j: rows g + 8 h, columns 4 t + 2 e1 + e0, at bits 16 e1 + 8 h +
// 4 e0. `low`, `high`: the lane's words of 64 columns.
template <class T>
DEVICE u32 eight_codes(const u32* low, u32 high, int j) {
  if constexpr (T::ORDER == Order::PAIRED)
    return (low[j] & 0x77777777u) << 1 | (low[j] >> 3 & 0x11111111u);
  if constexpr (T::ORDER == Order::EVEN) {
    u32 codes = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // 2 e1 + h; e0 = 0 and e0 = 1 at bits 0 and 16
      const u32 two = low[j] >> (i * 4) & 0x000f000fu;
      codes |= ((two & 15) | two >> 12) << (i * 8);
    }
    return codes;
  }
  if constexpr (T::ORDER == Order::DENSE) {
    u32 codes = 0;
#pragma unroll
    for (int e = 0; e < 4; ++e) {  // 2 e1 + h
      const int i = 2 * j + e % 2, e1 = e / 2, word = dense_word(i, e1);
      u32 two;  // e0 = 0 and e0 = 1 at bits 0 and 16
      if (i + e1 == 0) two = (low[0] & 0x10001u) | (low[1] & 0x20002u) | (high & 0x40004u);
      else two = rotated_right(word < 2 ? low[word] : high, i + 8 * e1);
      codes |= ((two & 7) | (two >> 16 & 7) << 4) << (e * 8);
    }
    return codes;
  }
  if constexpr (T::BITS == 4) return low[j];
  const u32 two = low[j / 2] >> (j % 2 * 2) & 0x33333333u;
  if constexpr (T::BITS == 2) return two;
  return and_or(j < 2 ? high << (2 - j) : high >> (j - 2), 0x44444444u, two);
}

// Whether shifts of table indices are multiplications (`copy_upper_half`, `dot_upper_half`): lookups,
// shifts and logic share a pipe that takes an instruction every second cycle (sm_90).
constexpr bool SHIFT_BY_FMA = ARCH < 1200;  // on sm_120 it would spill registers

// Convert two bytes to halves and subtract 128, or with BIASED add 1024: exact.
template <bool BIASED = false>
DEVICE u32 two_entries(u32 bytes, u32 which) {
  const u32 x = permute(bytes, 0x64006400u, which);
  return BIASED ? x : sub_half2(x, 0x64806480u);  // 1024 + 128
}
constexpr u32 MINUS_BIAS = 0xe480e480u;  // -1152, what BIASED entries have to lose

// Two codes (`dense_word`) as subnormal halves, times 2^I.
template <int I, int E1>
DEVICE u32 two_dense(const u32* low, u32 high) {
  if constexpr (I + E1 == 0) {
    return and_or(high, 0x40004u, and_or(low[1], 0x20002u, low[0] & 0x10001u));
  } else {
    constexpr int WORD = dense_word(I, E1);
    const u32 word = WORD < 2 ? low[WORD] : high;
    return (E1 ? rotated_right(word, 8) : word) & 0x70007u << I;
  }
}

// What BIASED fragments of rows g + 8 h times `scales` have to lose, for k16 steps 2 `pair` and 2 `pair` + 1.
// `scales`: of these, from `Scaled::scale_pairs`. DENSE: 4 scale / DENSE_UNIT.
template <class T>
DEVICE u32 minus_zero(u32 scales, int h, int pair) {
  const u32 of_dense = 0x80008000u | 0x00100004u << (4 * pair + h);
  return mul_half2(scales, T::ORDER == Order::DENSE ? of_dense : MINUS_BIAS);
}

// Two words each: entries that codes look up without their highest bits, and steps that are then added
// to entries (CODES: entries with the highest bit are smaller, by less than 128) or subtracted.
template <class T>
DEVICE constexpr u32 entry_word(int i) {
  if constexpr (T::ORDER == Order::PAIRED) return T::ODD[i];
  else return T::TABLE[2 + i];
}
template <class T>
DEVICE constexpr bool second_half_is_below() {
  for (int i = 0; i < 8; ++i) {
    const int at = i % 4 * 8;
    const int step = (int)(T::TABLE[i / 4] >> at & 255) - (int)(T::TABLE[2 + i / 4] >> at & 255);
    if (step < 0 || step > 127) return false;
  }
  return true;
}
template <class T>
DEVICE constexpr u32 step_word(int i) {
  if constexpr (T::ORDER == Order::PAIRED) {
    return T::STEPS[i];
  } else {
    static_assert(second_half_is_below<T>(), "tables that ascend need Order::PAIRED");
    return T::TABLE[i] - T::TABLE[2 + i];
  }
}

// Table lookup of four 4-bit codes, as bytes with 128 added. Codes whose highest bit is 0 look up a step,
// others its sign, which is 0. `three`: the codes without this bit.
template <class T>
DEVICE u32 four_entries(u32 three, u32 codes, u32 entries = entry_word<T>(0),
                        u32 steps = step_word<T>(0)) {
  const u32 entry = permute_unmasked(entries, entry_word<T>(1), three);
  const u32 step = permute_or_sign(steps, step_word<T>(1), codes);
  return T::ORDER == Order::PAIRED ? entry - step : entry + step;
}

// Entries of a lane's eight codes of k16 step J as halves: an A fragment. BIASED: 1152 more; DENSE, always:
// codes as subnormals, of rows g times 4^J and of rows g + 8 twice as much.
template <class T, int J, bool BIASED = false>
DEVICE void fragment(u32 (&a)[4], const u32* low, u32 high) {
  if constexpr (T::ORDER == Order::DENSE) {
    a[0] = two_dense<2 * J, 0>(low, high), a[1] = two_dense<2 * J + 1, 0>(low, high);
    a[2] = two_dense<2 * J, 1>(low, high), a[3] = two_dense<2 * J + 1, 1>(low, high);
    return;
  }
  u32 first, second;
  if constexpr (T::BITS == 4) {
    const u32 w = low[J], three = w & 0x77777777u;
    const u32 three1 = SHIFT_BY_FMA ? copy_upper_half(three) : three >> 16;
    const u32 w1 = SHIFT_BY_FMA ? dot_upper_half(w) : w >> 16;
    first = four_entries<T>(three, w), second = four_entries<T>(three1, w1);
  } else {
    const u32 codes = eight_codes<T>(low, high, J);
    first = permute_unmasked(T::TABLE[0], T::TABLE[1], codes);
    second = permute_unmasked(T::TABLE[0], T::TABLE[1], codes >> 16);
  }
  a[0] = two_entries<BIASED>(first, 0x5150), a[1] = two_entries<BIASED>(first, 0x5352);
  a[2] = two_entries<BIASED>(second, 0x5150), a[3] = two_entries<BIASED>(second, 0x5352);
}

// Table of all pairs of 4-bit codes, as two halves each, in shared memory: entry i is at i * 128 bytes,
// once for each lane, so that lanes use different banks.
constexpr int PAIR_TABLE_BYTES = 256 * 128;

// Called by 256 threads.
template <class T>
DEVICE void fill_pair_table(u8* table) {
  const u32 own = threadIdx.x, eighth = own % 32 / 8;
  u32 a[4];
  fragment<T, 0>(a, &own, 0);
#pragma unroll
  for (u32 i = 0; i < 32; i += 4) {
    const u32 v = __shfl_sync(FULL_MASK, a[0], i + eighth);
    *(uint4*)(table + (own / 32 * 32 + i + eighth) * 128 + own % 8 * 16) = {v, v, v, v};
  }
}

// `codebook::fragment` for 4-bit codes in nibbles. Of word 0 all codes are looked up in the table, which
// takes fewer instructions, of other words half; all of them would exceed the bandwidth of shared memory.
template <class T>
struct PairLookup {
  u32 table;  // shared address of this lane's entries
  u32 entries, steps;  // shuffled: the compiler would load constants again for each use

  DEVICE PairLookup(const u8* table, int lane)
      : table(materialize(shared_address(table) + lane * 4)),
        entries(__shfl_sync(FULL_MASK, lane ? 0 : entry_word<T>(0), 0)),
        steps(__shfl_sync(FULL_MASK, lane ? 0 : step_word<T>(0), 0)) {}
  DEVICE void fragment(u32 (&a)[4], u32 word, int index) const {
    a[2] = load_shared_constant(dot_bytes(word, 128u << 16, table));
    a[3] = load_shared_constant(dot_bytes(word, 128u << 24, table));
    if (index == 0) {
      a[0] = load_shared_constant(dot_bytes(word, 128u, table));
      a[1] = load_shared_constant(dot_bytes(word, 128u << 8, table));
    } else {
      const u32 four = four_entries<T>(word & 0x77777777u, word, entries, steps);
      a[0] = two_entries(four, 0x5150), a[1] = two_entries(four, 0x5352);
    }
  }
};

}  // namespace codebook
