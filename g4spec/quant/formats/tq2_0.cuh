// TQ2_0: a value is d * (code - 1). Views: formats.cuh.
#pragma once
#include "codebook_views.cuh"

namespace codebook {

// A half-precision factor per 256 values.
struct TQ2_0 : Codes<2, 32, 256, 66, 0> {
  static constexpr int HEADER = 2;
  static constexpr u32 TABLE[4] = {entries(-1, 0, 1, 2), 0, 0, 0};

  static DEVICE float raw_factor(const u8* b, int) { return half_of(b + 64); }
  static DEVICE float factor(const u8* header, int row, int) { return half_of(header + row * 2); }
  template <int N>
  static DEVICE void factors(float (&f)[N], const u8* header, int row) {
    const float d = half_of(header + row * 2);
#pragma unroll
    for (int i = 0; i < N; ++i) f[i] = d;
  }
};

}  // namespace codebook

using TQ20 = Codebook<codebook::TQ2_0>;

namespace raw {
using TQ20 = Codebook<codebook::TQ2_0>;
}
namespace quad {
using TQ20 = Codebook<codebook::TQ2_0>;
}
namespace fragment {
using TQ20 = Codebook<codebook::TQ2_0>;
}
