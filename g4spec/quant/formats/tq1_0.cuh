// TQ1_0: rewritten to blocks of TQ2_0 (held.py). Views: formats.cuh.
#pragma once
#include "tq2_0.cuh"

using TQ10 = TQ20;

namespace raw {
using TQ10 = TQ20;
}
namespace quad {
using TQ10 = TQ20;
}
namespace fragment {
using TQ10 = TQ20;
}
