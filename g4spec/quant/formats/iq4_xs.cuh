// IQ4_XS: a value is d * (scale - 32) * LINEAR_4[code]. Views: formats.cuh.
#pragma once
#include "codebook_views.cuh"

namespace codebook {

struct IQ4_XS : Codes<4, 32, 256, 136, 8, Order::PAIRED>, Linear4 {
  static constexpr int HEADER = 8;
  static DEVICE float of(u32 first, u32 low, int i) {
    // The mantissa of 2^23 + scale.
    const u32 scale = and_or(low >> (4 * i), 15, 0x4b000000u);
    const u32 both = and_or(first >> (12 + 2 * i), 48, scale);
    return __fmul_rn(from_half((u16)first), __uint_as_float(both) - (8388608.0f + 32.0f));
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
