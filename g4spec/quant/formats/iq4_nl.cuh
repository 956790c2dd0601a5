// IQ4_NL: a value is d * LINEAR_4[code]. Views: formats.cuh.
#pragma once
#include "codebook_views.cuh"

namespace codebook {

struct IQ4_NL : Codes<4, 32, 32, 18, 2, Order::PAIRED>, Linear4, Apart<IQ4_NL, 2> {
  static constexpr int HEADER = 2 * 8;
  static DEVICE float of(const u8* p) { return half_of(p); }
  static DEVICE float raw_factor(const u8* b, int) { return of(b); }
};

}  // namespace codebook

template <int K>
using IQ4NL = Codebook<codebook::IQ4_NL, K>;
template <int K>
using IQ4NLPairs = PairCodebook<codebook::IQ4_NL, K>;

namespace raw {
using IQ4NL = Codebook<codebook::IQ4_NL>;
}
namespace quad {
using IQ4NL = Codebook<codebook::IQ4_NL>;
}
namespace fragment {
template <int K>
using IQ4NL = Codebook<codebook::IQ4_NL, K>;
}
