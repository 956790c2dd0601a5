// Q5_K: Q4_K with a fifth bit per code. Views: formats.cuh.
#pragma once
#include "q4_k.cuh"

using Q5K = Affine<5>;

namespace raw {
using Q5K = Affine<5>;
}
namespace quad {
using Q5K = Affine<5>;
}
namespace fragment {
using Q5K = Affine<5>;
}
