// Q4_K: a value is d * scale * q - dmin * min. Q5_K is the same with a fifth bit. Views: formats.cuh.
#pragma once
#include "fragments.cuh"
#include "gemm_affine.cuh"
#include "quads.cuh"
#include "raw_values.cuh"

using Q4K = Affine<4>;

namespace raw {

template <int BITS>
struct Affine {  // Q4_K Q5_K
  static constexpr int VALUES = 256, CODES = BITS == 5 ? 48 : 16, BYTES = CODES + 128;

  static DEVICE void values(float (&w)[8], const u8* row, int k) {
    const u8* block = row + k / 256 * BYTES;
    const int group = k % 256 / 32;
    const uint4 head = *(const uint4*)block;
    uint2 codes =
        shifted(load8<8>(block + CODES + group / 2 * 32 + k % 32), group % 2 * 4, 0x0f0f0f0fu);
    if constexpr (BITS == 5) {
      const uint2 high = shifted(load8<8>(block + 16 + k % 32), group, 0x01010101u);
      codes.x |= high.x << 4, codes.y |= high.y << 4;
    }
    // Groups 0 .. 3: 6-bit scale and minimum in the low bits of a byte, whose upper bits belong to
    // groups 4 .. 7.
    const int at = group % 4 * 8;
    const u32 scale = head.y >> at, least = head.z >> at, lower = head.w >> at;
    const u32 s = group < 4 ? scale & 63 : (lower & 15) | (scale >> 6 & 3) << 4;
    const u32 m = group < 4 ? least & 63 : (lower >> 4 & 15) | (least >> 6 & 3) << 4;
    affine(w, codes, 0.0f, from_half(head.x) * s, -(from_half(head.x >> 16) * m));
  }
};
using Q4K = Affine<4>;

}  // namespace raw

namespace quad {

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
    CodeQuad f;
    factors(f, from_half((u16)h.x), from_half((u16)(h.x >> 16)), six_bits<0>(h, p.k / 32),
            six_bits<1>(h, p.k / 32));
#pragma unroll
    for (int e = 0; e < 4; ++e) f.code[e] = BITS == 5 ? p.five_bits(e) : p.nibble(e);
    return f.values();
  }
};
using Q4K = Affine<4>;

}  // namespace quad

namespace fragment {

template <int BITS>
struct Affine {
  static constexpr int UNIT = 256, PLANE = BITS == 5 ? 4096 : 0, BYTES = 16384 + PLANE + 2048;
  const u8* unit;
  int tile, lane;
  uint4 header[2];

  DEVICE Affine(const u8* unit, int tile, int lane) : unit(unit), tile(tile), lane(lane) {
    const uint4* h = (const uint4*)(unit + 16384 + PLANE) + tile * 16 + lane / 4;
    header[0] = h[0], header[1] = h[8];
  }
  DEVICE void values(int k64, Values& v) const {
    const uint4 q = load_streaming((const uint4*)unit + (tile * 4 + k64) * 32 + lane);
    const u32 last = BITS == 5 ? ((const u32*)(unit + 16384))[(tile * 4 + k64) * 32 + lane] : 0;
    const u32 words[5] = {q.x, q.y, q.z, q.w, last};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint4 h = header[r];
      const float d = from_half(h.x), least = from_half(h.x >> 16);
#pragma unroll
      for (int k32 = 0; k32 < 2; ++k32) {
        const float s = d * bits_to_float(six_bits<0>(h, k64 * 2 + k32), 63, 0);
        const float m = -least * bits_to_float(six_bits<1>(h, k64 * 2 + k32), 63, 0);
#pragma unroll
        for (int j = 2 * k32; j < 2 * k32 + 2; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            v[r][j][e] = fmaf(s, bits_to_float(code_bits<BITS>(words, r, e, j), 31, 0), m);
          }
      }
    }
  }
};
using Q4K = Affine<4>;

}  // namespace fragment
