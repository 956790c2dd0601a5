// Q3_K: a value is d * scale * (code - 4). Views: formats.cuh.
#pragma once
#include "codebook_views.cuh"

namespace codebook {

struct Q3_K : Scaled<16, 1, Order::DENSE> {
  static constexpr u32 TABLE[4] = {entries(-4, -3, -2, -1), entries(0, 1, 2, 3), 0, 0};
};

}  // namespace codebook

using Q3K = ScaledCodebook<codebook::Q3_K>;

namespace raw {
using Q3K = Codebook<codebook::Q3_K>;
}
namespace quad {
using Q3K = Codebook<codebook::Q3_K>;
}
namespace fragment {
using Q3K = Codebook<codebook::Q3_K>;
}
