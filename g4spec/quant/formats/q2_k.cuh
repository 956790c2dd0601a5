// Q2_K: a value is d * scale * code - dmin * minimum. Views: formats.cuh.
#pragma once
#include "codebook_views.cuh"

namespace codebook {

// A byte per 16 values: scale in the low nibble, minimum in the high one; half-precision factors of
// both per 256.
struct Q2_K : Codes<2, 16, 256, 84, 16> {
  static constexpr int HEADER = 20;
  static constexpr bool MINIMUM = true;
  static constexpr u32 TABLE[4] = {entries(0, 1, 2, 3), 0, 0, 0};

  static DEVICE float raw_factor(const u8* b, int i) {
    return __fmul_rn(half_of(b + 80), (float)(b[i] & 15));
  }
  static DEVICE float raw_minimum(const u8* b, int i) {
    return __fmul_rn(half_of(b + 82), (float)(b[i] >> 4));
  }
  static DEVICE float factor(const u8* header, int row, int i) {
    return __fmul_rn(half_of(header + 2048 + row * 4), (float)(header[row * 16 + i] & 15));
  }
  static DEVICE float minimum(const u8* header, int row, int i) {
    return __fmul_rn(half_of(header + 2050 + row * 4), (float)(header[row * 16 + i] >> 4));
  }
  template <int N>
  static DEVICE void factors(float (&f)[N], const u8* header, int row) {
    const float d = half_of(header + 2048 + row * 4);
    const u32* four = (const u32*)(header + row * 16);
#pragma unroll
    for (int i = 0; i < N; ++i) f[i] = d * small_uint_to_float(four[i / 4] >> (i % 4 * 8) & 15);
  }
};

}  // namespace codebook

using Q2K = Codebook<codebook::Q2_K>;

namespace raw {
using Q2K = Codebook<codebook::Q2_K>;
}
namespace quad {
using Q2K = Codebook<codebook::Q2_K>;
}
namespace fragment {
using Q2K = Codebook<codebook::Q2_K>;
}
