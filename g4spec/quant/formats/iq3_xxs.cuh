// IQ3_XXS: rewritten to codes of 4 bits (held.py); a value is d * (2 scale + 1) / 4 * table[code]. Views:
// formats.cuh.
#pragma once
#include "codebook_views.cuh"

namespace codebook {

struct IQ3_XXS : OddScaled<4> {
  static constexpr u32 TABLE[4] = {entries(4, 12, 20, 28), entries(36, 44, 52, 62),
                                   entries(-4, -12, -20, -28), entries(-36, -44, -52, -62)};
};

}  // namespace codebook

using IQ3XXS = Codebook<codebook::IQ3_XXS>;
using IQ3XXSPairs = PairCodebook<codebook::IQ3_XXS>;

namespace raw {
using IQ3XXS = Codebook<codebook::IQ3_XXS>;
}
namespace quad {
using IQ3XXS = Codebook<codebook::IQ3_XXS>;
}
namespace fragment {
using IQ3XXS = Codebook<codebook::IQ3_XXS>;
}
