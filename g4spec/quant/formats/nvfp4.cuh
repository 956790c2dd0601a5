// NVFP4: a value is scale / 2 * E2M1[code]. Views: formats.cuh.
#pragma once
#include "codebook_views.cuh"

namespace codebook {

// The scales of a row's four groups in 64 values are adjacent bytes.
struct NVFP4 : Codes<4, 16, 64, 36, 4, Order::CODES, 8>, E2M1 {
  static constexpr int HEADER = 1 * 16;
  static DEVICE float of(u32 e) {  // half the value of an unsigned E4M3 float
    return (u8)e == 127 ? 0.0f : from_half((u16)((e & 127) << 7)) * 128.0f;
  }
  static DEVICE float raw_factor(const u8* b, int i) { return of(b[i]); }
  static DEVICE float factor(const u8* header, int row, int i) {
    return of(header[(i / 4 * 128 + row) * 4 + i % 4]);
  }
  template <int N>
  static DEVICE void factors(float (&f)[N], const u8* header, int row) {
#pragma unroll
    for (int i = 0; i < N; ++i)
      f[i] = of(((const u32*)header)[i / 4 * 128 + row] >> (i % 4 * 8) & 255);
  }
};

}  // namespace codebook

template <int K>
using NVFP4 = Codebook<codebook::NVFP4, K>;
template <int K>
using NVFP4Pairs = PairCodebook<codebook::NVFP4, K>;

namespace raw {
using NVFP4 = Codebook<codebook::NVFP4>;
}
namespace quad {
using NVFP4 = Codebook<codebook::NVFP4>;
}
namespace fragment {
template <int K>
using NVFP4 = Codebook<codebook::NVFP4, K>;
}
