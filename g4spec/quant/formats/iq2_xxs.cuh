// IQ2_XXS: rewritten to codes of 3 bits (held.py); a value is d * scale / 8 * table[code]. Views:
// formats.cuh.
#pragma once
#include "codebook_views.cuh"

namespace codebook {

struct IQ2_XXS : Scaled<32, 8>, Grid2 {};

}  // namespace codebook

using IQ2XXS = ScaledCodebook<codebook::IQ2_XXS>;

namespace raw {
using IQ2XXS = Codebook<codebook::IQ2_XXS>;
}
namespace quad {
using IQ2XXS = Codebook<codebook::IQ2_XXS>;
}
namespace fragment {
using IQ2XXS = Codebook<codebook::IQ2_XXS>;
}
