// IQ3_S: rewritten to codes of 4 bits (held.py); a value is d * (2 scale + 1) * table[code]. Views:
// formats.cuh.
#pragma once
#include "codebook_views.cuh"

namespace codebook {

struct IQ3_S : OddScaled<1, Order::SIGNED> {
  static constexpr u32 TABLE[4] = {entries(1, 3, 5, 7), entries(9, 11, 13, 15),
                                   entries(-1, -3, -5, -7), entries(-9, -11, -13, -15)};
};

}  // namespace codebook

using IQ3S = Codebook<codebook::IQ3_S>;

namespace raw {
using IQ3S = Codebook<codebook::IQ3_S>;
}
namespace quad {
using IQ3S = Codebook<codebook::IQ3_S>;
}
namespace fragment {
using IQ3S = Codebook<codebook::IQ3_S>;
}
