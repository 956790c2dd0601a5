// Q4_1: a value is d * q + m. Views: formats.cuh.
#pragma once
#include "blocks32.cuh"

template <int K>
using Q41 = Blocks32<K, 4, true>;

namespace raw {
using Q41 = Blocks32<4, true>;
}
namespace quad {
using Q41 = Blocks32<4, true>;
}
namespace fragment {
template <int K>
using Q41 = Blocks32<4, true, K>;
}
