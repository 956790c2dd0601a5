// 5-bit codes in packed words (g4spec/runtime/cuda/weights/packing.py), for Q5_0, Q5_1 and Q5_K. A lane
// has five words for 64 columns, four of them adjacent. Each half of a word holds three codes and, in its
// highest bit, a bit of a sixteenth. Most codes need one instruction to become an operand, or two.
#pragma once
#include "ptx.cuh"

// Bit offset in the five words of the code of row g + 8 r and columns 4 t + 2 e1 of k16 step j; that of
// the next column is 16 bits higher. -1: bit i is the highest bit of word i's half.
DEVICE constexpr int five_bit_place(int r, int e1, int j) {
  if (!e1) return 32 * j + 5 * r;
  if (!r) return j < 3 ? 32 * j + 10 : 128;
  return j == 2 ? -1 : j == 3 ? 96 + 10 : 128 + 5 + 5 * j;
}

// Code of value e (column 4 t + e) of row g + 8 r in k16 step j. `word(i)`: word i.
template <class Word>
DEVICE u32 five_bit_code(Word word, int r, int e, int j) {
  const int at = five_bit_place(r, e / 2, j), half = e % 2 * 16;
  if (at >= 0) return word(at / 32) >> (at % 32 + half) & 31;
  u32 code = 0;
#pragma unroll
  for (int i = 0; i < 5; ++i) code |= (word(i) >> (15 + half) & 1) << i;
  return code;
}

// MMA fragment of codes q of k16 step j as subnormal halves: rows g as q, rows g + 8 as 32 q, both
// divided by 2^24. `w`, `last`: the lane's words.
DEVICE void subnormal_fives(u32 (&a)[4], const uint4& w, u32 last, int j) {
  constexpr u32 LOW = 0x001f001fu, HIGH = LOW << 5;
  const u32 own = j == 0 ? w.x : j == 1 ? w.y : j == 2 ? w.z : w.w;
  a[0] = own & LOW;
  a[1] = own & HIGH;
  a[2] = (j < 3 ? own >> 10 : last) & LOW;
  if (j == 2) {
    const u32 two = and_or(w.y >> 9, 0x00400040u, w.x >> 10 & 0x00200020u);
    const u32 four = and_or(w.w >> 7, 0x01000100u, and_or(w.z >> 8, 0x00800080u, two));
    a[3] = and_or(last >> 6, 0x02000200u, four);
  } else {
    a[3] = (j == 0 ? last : (j == 1 ? last : own) >> 5) & HIGH;
  }
}
