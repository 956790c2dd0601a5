// Q4_0: a value is d * (q - 8). Views: formats.cuh.
#pragma once
#include "blocks32.cuh"

template <int K>
using Q40 = Blocks32<K, 4, false>;

namespace raw {
using Q40 = Blocks32<4, false>;
}
namespace quad {
using Q40 = Blocks32<4, false>;
}
namespace fragment {
template <int K>
using Q40 = Blocks32<4, false, K>;
}
