// IQ3_S: rewritten to codes of 4 bits (held.py); a value is d * (2 scale + 1) * (2 code - 15). So it is
// multiplied as Q4_K. Views: formats.cuh.
#pragma once
#include "codebook_views.cuh"
#include "gemm_affine.cuh"

namespace codebook {

struct IQ3_S : OddScaled<1, Order::EVEN> {
  static constexpr u32 TABLE[4] = {entries(-15, -13, -11, -9), entries(-7, -5, -3, -1),
                                   entries(1, 3, 5, 7), entries(9, 11, 13, 15)};
};

}  // namespace codebook

// Where a lane finds a row's scales of 4 bits and d. In terms of Q4_K: d is 2 d, dmin 15 d, and both scale and
// minimum are 2 scale + 1.
struct OddScales {
  static constexpr int BYTES = 6;  // of a row
  u32 scales, d;

  DEVICE OddScales(int headers, int row)
      : scales(materialize(headers + row * 4)), d(materialize(headers + 512 + row * 2)) {}
  DEVICE AffineFactors factors(const u8* unit, float share) const {
    const u32 nibbles = *(const u32*)(unit + scales);
    const float own = from_half(*(const u16*)(unit + d)), four = own * (4.0f * share);
    AffineFactors f;
    f.dmin = own * (15.0f * SUBNORMAL_SCALE);
    const u32 upper = nibbles >> 16;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      f.scales[2 * i] = four * codebook::bits_in_place(nibbles, 4 * i, 15, -0.5f);
      f.scales[2 * i + 1] = four * codebook::bits_in_place(upper, 4 * i, 15, -0.5f);
      const u32 twice = i ? nibbles >> (4 * i - 1) : nibbles << 1;
      f.mins[i] = and_or(twice, 0x001e001eu, 0x00010001u);
    }
    return f;
  }
};

using IQ3S = Affine<4, OddScales>;

namespace raw {
using IQ3S = Codebook<codebook::IQ3_S>;
}
namespace quad {
using IQ3S = Codebook<codebook::IQ3_S>;
}
namespace fragment {
using IQ3S = Codebook<codebook::IQ3_S>;
}
