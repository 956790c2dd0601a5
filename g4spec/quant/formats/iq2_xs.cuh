// IQ2_XS: rewritten to codes of 3 bits (held.py); a value is d * scale / 8 * table[code]. Views:
// formats.cuh.
#pragma once
#include "codebook_views.cuh"

namespace codebook {

struct IQ2_XS : Scaled<16, 8>, Grid2 {};

}  // namespace codebook

using IQ2XS = ScaledCodebook<codebook::IQ2_XS>;

namespace raw {
using IQ2XS = Codebook<codebook::IQ2_XS>;
}
namespace quad {
using IQ2XS = Codebook<codebook::IQ2_XS>;
}
namespace fragment {
using IQ2XS = Codebook<codebook::IQ2_XS>;
}
