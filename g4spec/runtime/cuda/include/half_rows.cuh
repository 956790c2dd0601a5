// Element types of prefill's activation rows, two values per 32-bit word: half precision, bfloat16,
// or float32 (no packing). Kernels take one of them as a template parameter.
#pragma once
#include "ptx.cuh"

struct Half {
  static constexpr int BYTES = 2;
  static DEVICE u32 pack(float low, float high) { return pack_half2(low, high); }
  static DEVICE float low(u32 two) { return from_half((u16)two); }
  static DEVICE float high(u32 two) { return from_half((u16)(two >> 16)); }
};

struct Bfloat {
  static constexpr int BYTES = 2;
  static DEVICE u32 pack(float low, float high) {
#if ARCH >= 800
    return pack_bf16(low, high);
#else
    return round(low) | round(high) << 16;
#endif
  }
  static DEVICE u32 round(float x) {  // to nearest, ties to even; finite values
    const u32 bits = __float_as_uint(x);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  }
  static DEVICE float low(u32 two) { return __uint_as_float(two << 16); }
  static DEVICE float high(u32 two) { return __uint_as_float(two & 0xffff0000u); }
};

struct Float {
  static constexpr int BYTES = 4;
};

// Load N 16-bit floats (N: 1, 2, 4 or a multiple of 8) as float32, in the widest loads that fit;
// `pack_row` stores them. `from` and `to` are aligned to min(2 N, 16) bytes.
template <class T = Half, int N>
DEVICE void unpack_row(float (&v)[N], const u16* from) {
  u32 w[(N + 1) / 2];
  if constexpr (N % 8 == 0) {
#pragma unroll
    for (int i = 0; i < N / 8; ++i) *(uint4*)(w + 4 * i) = ((const uint4*)from)[i];
  } else if constexpr (N == 4) {
    *(uint2*)w = *(const uint2*)from;
  } else if constexpr (N == 2) {
    w[0] = *(const u32*)from;
  } else {
    w[0] = *from;
  }
#pragma unroll
  for (int i = 0; i < N; ++i) v[i] = i % 2 ? T::high(w[i / 2]) : T::low(w[i / 2]);
}

template <class T = Half, int N>
DEVICE void pack_row(u16* to, const float (&v)[N]) {
  u32 w[(N + 1) / 2];
#pragma unroll
  for (int i = 0; i < N; i += 2) w[i / 2] = T::pack(v[i], i + 1 < N ? v[i + 1] : 0.0f);
  if constexpr (N % 8 == 0) {
#pragma unroll
    for (int i = 0; i < N / 8; ++i) ((uint4*)to)[i] = *(const uint4*)(w + 4 * i);
  } else if constexpr (N == 4) {
    *(uint2*)to = *(const uint2*)w;
  } else if constexpr (N == 2) {
    *(u32*)to = w[0];
  } else {
    *to = (u16)w[0];
  }
}
