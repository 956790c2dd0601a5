// IQ2_S: rewritten to codes of 3 bits (held.py); a value is d * scale / 8 * table[code]. Views:
// formats.cuh.
#pragma once
#include "codebook_views.cuh"

namespace codebook {

struct IQ2_S : Scaled<16, 8>, Grid2 {};

}  // namespace codebook

using IQ2S = ScaledCodebook<codebook::IQ2_S>;

namespace raw {
using IQ2S = Codebook<codebook::IQ2_S>;
}
namespace quad {
using IQ2S = Codebook<codebook::IQ2_S>;
}
namespace fragment {
using IQ2S = Codebook<codebook::IQ2_S>;
}
