// IQ4_XS: a value is d * (scale - 32) * LINEAR_4[code]. Views: formats.cuh.
#pragma once
#include "codebook_views.cuh"

namespace codebook {

struct IQ4_XS : Codes<4, 32, 256, 136, 8, Order::PAIRED>, Linear4 {
  static constexpr int HEADER = 8;
  static DEVICE float raw_factor(const u8* b, int i) {
    const u32 low = b[4 + i / 2] >> (i % 2 * 4) & 15, high = *(const u16*)(b + 2) >> (2 * i) & 3;
    const u32 scale = low | high << 4;
    return __fmul_rn(half_of(b), (float)scale - 32.0f);
  }
  // Packed: d, scales 5 and 6 and the lower four bits of scale 7 in one word; scales 0 to 4 and the
  // upper two bits of scale 7 in the next.
  static DEVICE float factor(const u8* header, int row, int i) {
    const uint2 h = *(const uint2*)(header + row * 8);
    const u32 last = h.x >> 28 | h.y >> 30 << 4;
    const u32 scale = i < 5 ? h.y >> (6 * i) : i < 7 ? h.x >> (6 * i - 14) : last;
    return __fmul_rn(from_half((u16)h.x), (float)(scale & 63) - 32.0f);
  }
  template <int N>
  static DEVICE void factors(float (&f)[N], const u8* header, int row) {
    static_assert(N == 8, "a unit has 256 columns");
    const uint2 h = *(const uint2*)(header + row * 8);
    const u32 x = h.x >> 20, y = h.y >> 18;
    const u32 last = and_or(y, 0x3000, x & 0x0f00);
    const float d = from_half((u16)h.x);
    f[0] = d * bits_in_place(h.y, 0, 63, 32), f[1] = d * bits_in_place(h.y, 6, 63, 32);
    f[2] = d * bits_in_place(h.y, 12, 63, 32), f[3] = d * bits_in_place(y, 0, 63, 32);
    f[4] = d * bits_in_place(y, 6, 63, 32), f[5] = d * bits_in_place(h.x, 16, 63, 32);
    f[6] = d * bits_in_place(x, 2, 63, 32), f[7] = d * bits_in_place(last, 8, 63, 32);
  }
};

}  // namespace codebook

using IQ4XS = Codebook<codebook::IQ4_XS>;
using IQ4XSPairs = PairCodebook<codebook::IQ4_XS>;

namespace raw {
using IQ4XS = Codebook<codebook::IQ4_XS>;
}
namespace quad {
using IQ4XS = Codebook<codebook::IQ4_XS>;
}
namespace fragment {
using IQ4XS = Codebook<codebook::IQ4_XS>;
}
