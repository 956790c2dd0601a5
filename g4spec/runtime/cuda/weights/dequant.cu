// Dequantization of packed weights (g4spec/runtime/cuda/weights/packing.py) to 16-bit floats [N,
// K], for cuBLAS in prefill. Values are computed in float32 and rounded once.
//
// One CTA per unit of 128 rows; one warp per tile of 16 rows. Lane 4 g + t handles rows g and g +
// 8, columns 4 t .. 4 t + 3 of each k16 step, so a warp's store fills a 32-byte sector in each of
// eight rows.
#include "codebook.cuh"
#include "half_rows.cuh"

// The integer x & mask (below 2^23) minus `bias`, as float.
DEVICE float bits_to_float(u32 x, u32 mask, float bias) {
  return __uint_as_float(and_or(x, mask, 0x4b000000u)) - (8388608.0f + bias);
}

// Bit offset of value e of row r (0: g, 1: g + 8) in a word of 4-bit codes.
DEVICE constexpr int nibble_shift(int r, int e) { return e % 2 * 16 + e / 2 * 8 + r * 4; }
// Bit offset of its fifth bit, for k16 step j.
DEVICE constexpr int fifth_bit_shift(int r, int e, int j) {
  return e % 2 * 16 + (r ? 8 + e / 2 * 4 : 4 - e / 2 * 4) + j;
}
// Bit offset of its two upper bits; a word serves two k16 steps.
DEVICE constexpr int upper_bits_shift(int r, int e, int j) {
  return e % 2 * 16 + e / 2 * 8 + (r ? 2 - j % 2 * 2 : 4 + j % 2 * 2);
}

using Values = float[2][4][4];  // [row][k16][e]

// Two factors (rows g and g + 8 of the tile) of a plane of halves [k32][warp 4][g 8][q 4], row warp
// * 32 + q * 8 + g.
DEVICE u32 plane_pair(const u8* plane, int k32, int tile, int lane) {
  return *(const u32*)(plane + ((k32 * 4 + tile / 2) * 8 + lane / 4) * 8 + tile % 2 * 4);
}

template <int BITS>  // 4 or 5
struct KQuant {
  static constexpr int UNIT = 256, PLANE = BITS == 5 ? 4096 : 0, BYTES = 16384 + PLANE + 2048;
  const u8* unit;
  int tile, lane;
  uint4 header[2];

  DEVICE KQuant(const u8* unit, int tile, int lane) : unit(unit), tile(tile), lane(lane) {
    const uint4* h = (const uint4*)(unit + 16384 + PLANE) + tile * 16 + lane / 4;
    header[0] = h[0], header[1] = h[8];
  }
  static DEVICE u32 six(u32 low, u32 high, int i) {  // 6-bit number i of eight in 48 bits
    return (u32)(((u64)high << 32 | low) >> (6 * i)) & 63;
  }
  DEVICE void values(int k64, Values& v) const {
    const uint4 q = load_streaming((const uint4*)unit + (tile * 4 + k64) * 32 + lane);
    const u32 words[4] = {q.x, q.y, q.z, q.w};
    const u32 bits = BITS == 5 ? ((const u32*)(unit + 16384))[(tile * 4 + k64) * 32 + lane] : 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint4 h = header[r];
      const float d = from_half(h.x), least = from_half(h.x >> 16);
#pragma unroll
      for (int k32 = 0; k32 < 2; ++k32) {
        const float s = d * bits_to_float(six(h.y, h.w & 0xffff, k64 * 2 + k32), 63, 0);
        const float m = -least * bits_to_float(six(h.z, h.w >> 16, k64 * 2 + k32), 63, 0);
#pragma unroll
        for (int j = 2 * k32; j < 2 * k32 + 2; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            u32 code = words[j] >> nibble_shift(r, e) & 15;
            if (BITS == 5) code |= (bits >> fifth_bit_shift(r, e, j) & 1) << 4;
            v[r][j][e] = fmaf(s, bits_to_float(code, 31, 0), m);
          }
      }
    }
  }
};
using Q4K = KQuant<4>;
using Q5K = KQuant<5>;

struct Q6K {
  static constexpr int UNIT = 256, BYTES = 16384 + 8192 + 2048 + 256;
  const u8* unit;
  int tile, lane;
  uint4 scales[2];
  float d[2];

  DEVICE Q6K(const u8* unit, int tile, int lane) : unit(unit), tile(tile), lane(lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = tile * 16 + r * 8 + lane / 4;
      scales[r] = ((const uint4*)(unit + 24576))[row];
      d[r] = from_half(((const u16*)(unit + 26624))[row]);
    }
  }
  DEVICE void values(int k64, Values& v) const {
    const int at = (tile * 4 + k64) * 32 + lane;
    const uint4 q = load_streaming((const uint4*)unit + at);
    const uint2 u = ((const uint2*)(unit + 16384))[at];
    const u32 words[4] = {q.x, q.y, q.z, q.w}, high[2] = {u.x, u.y};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const u32 four[4] = {scales[r].x, scales[r].y, scales[r].z, scales[r].w};
      const u32 mine = four[k64] ^ 0x80808080u;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float s = d[r] * bits_to_float(mine >> (8 * j), 255, 128);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const u32 low = words[j] >> nibble_shift(r, e) & 15;
          v[r][j][e] =
              s * bits_to_float((high[j / 2] >> upper_bits_shift(r, e, j) & 3) << 4 | low, 63, 32);
        }
      }
    }
  }
};

template <int K>  // bytes
struct Q80 {
  static constexpr int UNIT = K, BYTES = K * 128 + K / 32 * 256;
  const u8* unit;
  int tile, lane;

  DEVICE Q80(const u8* unit, int tile, int lane) : unit(unit), tile(tile), lane(lane) {}
  DEVICE void values(int k64, Values& v) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int k32 = k64 * 2 + h;
      const uint4 q = load_streaming((const uint4*)unit + (tile * (K / 32) + k32) * 32 + lane);
      const u32 words[2][2] = {{q.x, q.y}, {q.z, q.w}};
      const u32 d = plane_pair(unit + K * 128, k32, tile, lane);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float s = from_half(d >> (16 * r));
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            v[r][2 * h + j][e] =
                s * bits_to_float(words[j][e / 2] >> (8 * (2 * r + e % 2)), 255, 128);
      }
    }
  }
};

template <int BITS, bool MINS, int K>  // Q4_0 Q4_1 Q5_0 Q5_1
struct Legacy {
  static constexpr int CODES = K * 64, PLANE = BITS == 5 ? K * 16 : 0, SCALES = K / 32 * 256;
  static constexpr int UNIT = K, BYTES = CODES + PLANE + SCALES * (MINS ? 2 : 1);
  const u8* unit;
  int tile, lane;

  DEVICE Legacy(const u8* unit, int tile, int lane) : unit(unit), tile(tile), lane(lane) {}
  DEVICE void values(int k64, Values& v) const {
    const int at = (tile * (K / 64) + k64) * 32 + lane;
    const uint4 q = load_streaming((const uint4*)unit + at);
    const u32 words[4] = {q.x, q.y, q.z, q.w};
    const u32 bits = BITS == 5 ? ((const u32*)(unit + CODES))[at] : 0;
    const float bias = MINS ? 0 : BITS == 5 ? 16 : 8;
#pragma unroll
    for (int k32 = 0; k32 < 2; ++k32) {
      const u8* plane = unit + CODES + PLANE;
      const u32 d = plane_pair(plane, k64 * 2 + k32, tile, lane);
      const u32 m = MINS ? plane_pair(plane + SCALES, k64 * 2 + k32, tile, lane) : 0;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float s = from_half(d >> (16 * r)), least = from_half(m >> (16 * r));
#pragma unroll
        for (int j = 2 * k32; j < 2 * k32 + 2; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            u32 code = words[j] >> nibble_shift(r, e) & 15;
            if (BITS == 5) code |= (bits >> fifth_bit_shift(r, e, j) & 1) << 4;
            const float x = s * bits_to_float(code, 31, bias);
            v[r][j][e] = MINS ? x + least : x;
          }
      }
    }
  }
};
template <int K> using Q40 = Legacy<4, false, K>;
template <int K> using Q41 = Legacy<4, true, K>;
template <int K> using Q50 = Legacy<5, false, K>;
template <int K> using Q51 = Legacy<5, true, K>;

// Table-coded types.
template <class T, int K = 256>
struct Codebook {
  static constexpr int UNIT = K, CODES = codebook::code_bytes<T>(K), WORDS = T::BITS == 4 ? 4 : 2;
  static constexpr int LOW = codebook::low_bytes<T>(K), BYTES = CODES + T::HEADER * K / 2;
  const u8* unit;
  int tile, lane;

  DEVICE Codebook(const u8* unit, int tile, int lane) : unit(unit), tile(tile), lane(lane) {}
  DEVICE void values(int k64, Values& v) const {
    const int at = (tile * (K / 64) + k64) * 32 + lane;
    u32 low[WORDS], high = 0;
    if constexpr (WORDS == 4) {
      const uint4 q = load_streaming((const uint4*)unit + at);
      low[0] = q.x, low[1] = q.y, low[2] = q.z, low[3] = q.w;
    } else {
      const uint2 q = ((const uint2*)unit)[at];
      low[0] = q.x, low[1] = q.y;
    }
    if constexpr (T::BITS == 3) high = ((const u32*)(unit + LOW))[at];
    const u8* header = unit + CODES;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int group = (k64 * 4 + j) * 16 / T::GROUP;
      const u32 codes = codebook::eight_codes<T>(low, high, j);
      const u32 entries[2] = {codebook::looked_up<T>(codes), codebook::looked_up<T>(codes >> 16)};
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = tile * 16 + r * 8 + lane / 4;
        const float s = T::factor(header, row, group);
        float least = 0.0f;
        if constexpr (T::MINIMUM) least = T::minimum(header, row, group);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float x = bits_to_float(entries[e / 2] >> (16 * r + 8 * (e % 2)), 255, 128);
          v[r][j][e] = T::MINIMUM ? fmaf(s, x, -least) : s * x;
        }
      }
    }
  }
};
using IQ1M = Codebook<codebook::IQ1_M>;
using IQ1S = Codebook<codebook::IQ1_S>;
using IQ2S = Codebook<codebook::IQ2_S>;
using IQ2XS = Codebook<codebook::IQ2_XS>;
using IQ2XXS = Codebook<codebook::IQ2_XXS>;
using IQ3S = Codebook<codebook::IQ3_S>;
using IQ3XXS = Codebook<codebook::IQ3_XXS>;
template <int K> using IQ4NL = Codebook<codebook::IQ4_NL, K>;
using IQ4XS = Codebook<codebook::IQ4_XS>;
template <int K> using MXFP4 = Codebook<codebook::MXFP4, K>;
template <int K> using NVFP4 = Codebook<codebook::NVFP4, K>;
using Q2K = Codebook<codebook::Q2_K>;
using Q3K = Codebook<codebook::Q3_K>;

// `packed`: matrices of `groups` groups of 128 rows, the first `rows` of which are used. Grid:
// (units of K, groups of all matrices). out: [matrices * rows, K].
static_assert(DEQUANT_THREADS / 32 * 16 == PACK_ROWS, "a warp dequantizes 16 rows");
template <class F, class T>
__global__ void __launch_bounds__(DEQUANT_THREADS) dequant(const u8* packed, u16* out, int rows, int groups) {
  griddep_launch_dependents();
  const int tile = threadIdx.x / 32, lane = threadIdx.x % 32, k = gridDim.x * F::UNIT;
  const int matrix = blockIdx.y / groups, first = blockIdx.y % groups * PACK_ROWS + tile * 16 + lane / 4;
  griddep_wait();
  const F f(packed + ((i64)blockIdx.y * gridDim.x + blockIdx.x) * F::BYTES, tile, lane);
  u16* to = out + ((i64)matrix * rows + first) * k + blockIdx.x * F::UNIT + lane % 4 * 4;
#pragma unroll
  for (int k64 = 0; k64 < F::UNIT / 64; ++k64) {
    Values v;
    f.values(k64, v);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (first + r * 8 >= rows) continue;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint2 w = {T::pack(v[r][j][0], v[r][j][1]), T::pack(v[r][j][2], v[r][j][3])};
        __stcs((uint2*)(to + (i64)r * 8 * k + k64 * 64 + j * 16), w);
      }
    }
  }
}
