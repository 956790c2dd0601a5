// The raw view of a quant type: `raw::X::values` dequantizes values k .. k + 7 of a row, k a multiple
// of 8, from the blocks in GPU memory before packing: those of the file, or, for some table-coded
// types, rewritten ones (g4spec/runtime/cuda/weights/held.py). Used by portable.cu. Here are its
// helpers and the views of table-coded types and of plain floats; the others are in
// g4spec/quant/formats/.
#pragma once
#include "codebook.cuh"

// Load 8 bytes of codes, in loads of ALIGN bytes: blocks in the file are aligned to 2 or 4 bytes
// only.
template <int ALIGN>
DEVICE uint2 load8(const u8* p) {
  if constexpr (ALIGN == 8) return *(const uint2*)p;
  if constexpr (ALIGN == 4) return {((const u32*)p)[0], ((const u32*)p)[1]};
  const u16* h = (const u16*)p;
  return {h[0] | (u32)h[1] << 16, h[2] | (u32)h[3] << 16};
}
DEVICE float load_half(const u8* p) { return from_half(*(const u16*)p); }
DEVICE uint2 shifted(uint2 v, int shift, u32 mask) {
  return {v.x >> shift & mask, v.y >> shift & mask};
}

// w = scale * (code - zero) + least for eight byte codes. 0x4b0000cc is the float 2^23 + cc.
DEVICE void affine(float (&w)[8], uint2 codes, float zero, float scale, float least) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const u32 bits = permute(i < 4 ? codes.x : codes.y, 0x4b000000u, 0x7540 + i % 4);
    w[i] = fmaf(scale, __uint_as_float(bits) - (8388608.0f + zero), least);
  }
}

namespace raw {

// Table-coded types.
template <class T>
struct Codebook {
  static constexpr int VALUES = T::BLOCK, BYTES = T::BYTES;

  static DEVICE void values(float (&w)[8], const u8* row, int k) {
    const u8* block = row + k / VALUES * BYTES;
    const int at = k % VALUES, group = at / T::GROUP;
    const float s = T::raw_factor(block, group);
    float least = 0.0f;
    if constexpr (T::MINIMUM) least = T::raw_minimum(block, group);
#pragma unroll
    for (int half = 0; half < 8; half += 4) {
      const u32 entries = codebook::looked_up_bytes<T>(T::four(block, at + half));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const u32 bits = permute(entries, 0x4b000000u, 0x7540 + i);
        const float x = __uint_as_float(bits) - (8388608.0f + 128.0f);
        w[half + i] = T::MINIMUM ? fmaf(s, x, -least) : s * x;
      }
    }
  }
};

struct F32 {
  static constexpr int VALUES = 1, BYTES = 4;

  static DEVICE void values(float (&w)[8], const u8* row, int k) {
    const float4 *p = (const float4*)row + k / 4, a = p[0], b = p[1];
    w[0] = a.x, w[1] = a.y, w[2] = a.z, w[3] = a.w;
    w[4] = b.x, w[5] = b.y, w[6] = b.z, w[7] = b.w;
  }
};

template <bool BRAIN>
struct Halves {
  static constexpr int VALUES = 1, BYTES = 2;

  static DEVICE void values(float (&w)[8], const u8* row, int k) {
    const uint4 v = *((const uint4*)row + k / 8);
    const u32 pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const u16 h = (u16)(pairs[i / 2] >> i % 2 * 16);
      w[i] = BRAIN ? from_bf16(h) : from_half(h);
    }
  }
};
using F16 = Halves<false>;
using BF16 = Halves<true>;

}  // namespace raw
