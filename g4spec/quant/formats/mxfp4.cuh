// MXFP4: a value is 2 ** (e - 128) * E2M1[code]. Views: formats.cuh.
#pragma once
#include "codebook_views.cuh"

namespace codebook {

struct MXFP4 : Codes<4, 32, 32, 17, 1>, E2M1, Apart<MXFP4, 1> {
  static constexpr int HEADER = 1 * 8;
  static DEVICE float of(const u8* p) {  // 2 ** (e - 128)
    return __uint_as_float(*p > 1 ? (u32)(*p - 1) << 23 : 0x00200000u << *p);
  }
  static DEVICE float raw_factor(const u8* b, int) { return of(b); }
};

}  // namespace codebook

template <int K>
using MXFP4 = Codebook<codebook::MXFP4, K>;
template <int K>
using MXFP4Pairs = PairCodebook<codebook::MXFP4, K>;

namespace raw {
using MXFP4 = Codebook<codebook::MXFP4>;
}
namespace quad {
using MXFP4 = Codebook<codebook::MXFP4>;
}
namespace fragment {
template <int K>
using MXFP4 = Codebook<codebook::MXFP4, K>;
}
