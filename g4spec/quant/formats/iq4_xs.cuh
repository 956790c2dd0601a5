// IQ4_XS: a value is d * (scale - 32) * LINEAR_4[code]. Views: formats.cuh.
#pragma once
#include "codebook_views.cuh"

namespace codebook {

struct IQ4_XS : Codes<4, 32, 256, 136, 8>, Linear4 {
  static constexpr int HEADER = 8;
  static DEVICE float of(u32 first, u32 low, int i) {
    const u32 scale = (low >> (4 * i) & 15) | (first >> (16 + 2 * i) & 3) << 4;
    return __fmul_rn(from_half((u16)first), small_uint_to_float(scale) - 32.0f);
  }
  static DEVICE float raw_factor(const u8* b, int i) { return factor(b, 0, i); }
  static DEVICE float factor(const u8* header, int row, int i) {
    const uint2 h = *(const uint2*)(header + row * 8);
    return of(h.x, h.y, i);
  }
  template <int N>
  static DEVICE void factors(float (&f)[N], const u8* header, int row) {
    const uint2 h = *(const uint2*)(header + row * 8);
#pragma unroll
    for (int i = 0; i < N; ++i) f[i] = of(h.x, h.y, i);
  }
};

}  // namespace codebook

using IQ4XS = Codebook<codebook::IQ4_XS>;

namespace raw {
using IQ4XS = Codebook<codebook::IQ4_XS>;
}
namespace quad {
using IQ4XS = Codebook<codebook::IQ4_XS>;
}
namespace fragment {
using IQ4XS = Codebook<codebook::IQ4_XS>;
}
