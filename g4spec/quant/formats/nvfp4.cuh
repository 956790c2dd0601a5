// NVFP4: a value is scale / 2 * E2M1[code], times the factor of its matrix, which each block in
// memory contains (g4spec/runtime/cuda/weights/held.py). Views: formats.cuh.
#pragma once
#include "codebook_views.cuh"

namespace codebook {

// The scales of a row's four groups in 64 values are adjacent bytes; the factor follows them.
struct NVFP4 : Codes<4, 16, 64, 40, 8, Order::CODES, 8>, E2M1 {
  static constexpr int HEADER = 2 * 16;
  static DEVICE float of(u32 e) {  // half the value of an unsigned E4M3 float
    return (u8)e == 127 ? 0.0f : from_half((u16)((e & 127) << 7)) * 128.0f;
  }
  static DEVICE float raw_factor(const u8* b, int i) { return of(b[i]) * *(const float*)(b + 4); }
  static DEVICE float factor(const u8* header, int row, int i) {
    return raw_factor(header + (i / 4 * 128 + row) * 8, i % 4);
  }
  template <int N>
  static DEVICE void factors(float (&f)[N], const u8* header, int row) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const uint2 own = ((const uint2*)header)[i / 4 * 128 + row];
      f[i] = of(own.x >> (i % 4 * 8) & 255) * __uint_as_float(own.y);
    }
  }
};

}  // namespace codebook

template <int K>
using NVFP4 = Codebook<codebook::NVFP4, K>;
template <int K>
using NVFP4Pairs = PairCodebook<codebook::NVFP4, K>;

namespace raw {
using NVFP4 = Codebook<codebook::NVFP4>;
}
namespace quad {
using NVFP4 = Codebook<codebook::NVFP4>;
}
namespace fragment {
template <int K>
using NVFP4 = Codebook<codebook::NVFP4, K>;
}
