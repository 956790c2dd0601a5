// IQ1_M: rewritten to codes of 3 bits (held.py); a value is d * scale / 8 * table[code]. Views:
// formats.cuh.
#pragma once
#include "codebook_views.cuh"

namespace codebook {

struct IQ1_M : Scaled<16, 8>, Grid1 {};

}  // namespace codebook

using IQ1M = ScaledCodebook<codebook::IQ1_M>;

namespace raw {
using IQ1M = Codebook<codebook::IQ1_M>;
}
namespace quad {
using IQ1M = Codebook<codebook::IQ1_M>;
}
namespace fragment {
using IQ1M = Codebook<codebook::IQ1_M>;
}
