// IQ1_S: rewritten to codes of 3 bits (held.py); a value is d * scale / 8 * table[code]. Views:
// formats.cuh.
#pragma once
#include "codebook_views.cuh"

namespace codebook {

struct IQ1_S : Scaled<32, 8>, Grid1 {};

}  // namespace codebook

using IQ1S = ScaledCodebook<codebook::IQ1_S>;

namespace raw {
using IQ1S = Codebook<codebook::IQ1_S>;
}
namespace quad {
using IQ1S = Codebook<codebook::IQ1_S>;
}
namespace fragment {
using IQ1S = Codebook<codebook::IQ1_S>;
}
