// Q5_1: a value is d * q + m. Views: formats.cuh.
#pragma once
#include "blocks32.cuh"

template <int K>
using Q51 = Blocks32<K, 5, true>;

namespace raw {
using Q51 = Blocks32<5, true>;
}
namespace quad {
using Q51 = Blocks32<5, true>;
}
namespace fragment {
template <int K>
using Q51 = Blocks32<5, true, K>;
}
