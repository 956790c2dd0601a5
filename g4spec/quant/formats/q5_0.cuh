// Q5_0: a value is d * (q - 16). Views: formats.cuh.
#pragma once
#include "blocks32.cuh"

template <int K>
using Q50 = Blocks32<K, 5, false>;

namespace raw {
using Q50 = Blocks32<5, false>;
}
namespace quad {
using Q50 = Blocks32<5, false>;
}
namespace fragment {
template <int K>
using Q50 = Blocks32<5, false, K>;
}
