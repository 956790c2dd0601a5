// y = x W^T for up to 8 rows x in float32, directly from the file's blocks of W: the GEMV for GPUs
// without the tensor-core path (sm_70, sm_75). It runs on all others too.
//
// A warp computes ROWS rows of W. In each step lane l takes values 8 l .. 8 l + 7 of the next 256
// columns, dequantizes them once, and multiplies them with every row of x. The order of additions
// depends on the number of columns only. W is read once, x once per block.
//
// Also: expert GEMVs (each row with the matrix it chose), and dequantization to half for cuBLAS.
#include "codebook.cuh"
#include "half_rows.cuh"

// Load 8 bytes of codes, in loads of ALIGN bytes: blocks in the file are aligned to 2 or 4 bytes
// only.
template <int ALIGN>
DEVICE uint2 load8(const u8* p) {
  if constexpr (ALIGN == 8) return *(const uint2*)p;
  if constexpr (ALIGN == 4) return {((const u32*)p)[0], ((const u32*)p)[1]};
  const u16* h = (const u16*)p;
  return {h[0] | (u32)h[1] << 16, h[2] | (u32)h[3] << 16};
}
DEVICE float load_half(const u8* p) { return from_half(*(const u16*)p); }
DEVICE uint2 shifted(uint2 v, int shift, u32 mask) {
  return {v.x >> shift & mask, v.y >> shift & mask};
}

// w = scale * (code - zero) + least for eight byte codes. 0x4b0000cc is the float 2^23 + cc.
DEVICE void affine(float (&w)[8], uint2 codes, float zero, float scale, float least) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const u32 bits = permute(i < 4 ? codes.x : codes.y, 0x4b000000u, 0x7540 + i % 4);
    w[i] = fmaf(scale, __uint_as_float(bits) - (8388608.0f + zero), least);
  }
}

// Formats: `values` returns values k .. k + 7 of a row, k a multiple of 8. Block layouts are
// described in g4spec/quant/formats/.

template <int BITS, bool MINIMUM>
struct Blocks32 {  // Q4_0 Q4_1 Q5_0 Q5_1
  static constexpr int VALUES = 32, HIGH = MINIMUM ? 4 : 2, CODES = HIGH + (BITS == 5 ? 4 : 0);
  static constexpr int BYTES = CODES + 16, ALIGN = MINIMUM ? 4 : 2;

  static DEVICE void values(float (&w)[8], const u8* row, int k) {
    const u8* block = row + k / 32 * BYTES;
    uint2 codes = shifted(load8<ALIGN>(block + CODES + k % 16), k % 32 / 16 * 4, 0x0f0f0f0fu);
    if constexpr (BITS == 5) {  // spread 4 bits to the low bits of 4 bytes by a multiplication
      const u16* high = (const u16*)(block + HIGH);
      const u32 bits = (high[0] | (u32)high[1] << 16) >> (k % 32);
      codes.x |= ((bits & 15) * 0x00204081u & 0x01010101u) << 4;
      codes.y |= ((bits >> 4 & 15) * 0x00204081u & 0x01010101u) << 4;
    }
    const float zero = MINIMUM ? 0 : 1 << (BITS - 1);
    affine(w, codes, zero, load_half(block), MINIMUM ? load_half(block + 2) : 0.0f);
  }
};
using Q40 = Blocks32<4, false>;
using Q41 = Blocks32<4, true>;
using Q50 = Blocks32<5, false>;
using Q51 = Blocks32<5, true>;

struct Q80 {
  static constexpr int VALUES = 32, BYTES = 34;

  static DEVICE void values(float (&w)[8], const u8* row, int k) {
    const u8* block = row + k / 32 * BYTES;
    uint2 codes = load8<2>(block + 2 + k % 32);
    codes.x ^= 0x80808080u, codes.y ^= 0x80808080u;
    affine(w, codes, 128.0f, load_half(block), 0.0f);
  }
};

template <int BITS>
struct Affine {  // Q4_K Q5_K
  static constexpr int VALUES = 256, CODES = BITS == 5 ? 48 : 16, BYTES = CODES + 128;

  static DEVICE void values(float (&w)[8], const u8* row, int k) {
    const u8* block = row + k / 256 * BYTES;
    const int group = k % 256 / 32;
    const uint4 head = *(const uint4*)block;
    uint2 codes =
        shifted(load8<8>(block + CODES + group / 2 * 32 + k % 32), group % 2 * 4, 0x0f0f0f0fu);
    if constexpr (BITS == 5) {
      const uint2 high = shifted(load8<8>(block + 16 + k % 32), group, 0x01010101u);
      codes.x |= high.x << 4, codes.y |= high.y << 4;
    }
    // Groups 0 .. 3: 6-bit scale and minimum in the low bits of a byte, whose upper bits belong to
    // groups 4 .. 7.
    const int at = group % 4 * 8;
    const u32 scale = head.y >> at, least = head.z >> at, lower = head.w >> at;
    const u32 s = group < 4 ? scale & 63 : (lower & 15) | (scale >> 6 & 3) << 4;
    const u32 m = group < 4 ? least & 63 : (lower >> 4 & 15) | (least >> 6 & 3) << 4;
    affine(w, codes, 0.0f, from_half(head.x) * s, -(from_half(head.x >> 16) * m));
  }
};
using Q4K = Affine<4>;
using Q5K = Affine<5>;

struct Q6K {
  static constexpr int VALUES = 256, BYTES = 210;

  static DEVICE void values(float (&w)[8], const u8* row, int k) {
    const u8* block = row + k / 256 * BYTES;
    const int half = k % 256 / 128, r = k % 128;
    uint2 codes = shifted(load8<2>(block + half * 64 + r % 64), r / 64 * 4, 0x0f0f0f0fu);
    const uint2 high = shifted(load8<2>(block + 128 + half * 32 + r % 32), r / 32 * 2, 0x03030303u);
    codes.x |= high.x << 4, codes.y |= high.y << 4;
    const float scale = load_half(block + 208) * ((const i8*)block)[192 + k % 256 / 16];
    affine(w, codes, 32.0f, scale, 0.0f);
  }
};

// Table-coded types, in the block layout of g4spec/runtime/cuda/weights/held.py.
template <class T>
struct Codebook {
  static constexpr int VALUES = T::BLOCK, BYTES = T::BYTES;

  static DEVICE void values(float (&w)[8], const u8* row, int k) {
    const u8* block = row + k / VALUES * BYTES;
    const int at = k % VALUES, group = at / T::GROUP;
    const float s = T::raw_factor(block, group);
    float least = 0.0f;
    if constexpr (T::MINIMUM) least = T::raw_minimum(block, group);
#pragma unroll
    for (int half = 0; half < 8; half += 4) {
      const u32 codes = T::four(block, at + half), pairs = (codes | codes >> 4) & 0x00ff00ffu;
      const u32 entries = codebook::looked_up<T>((pairs | pairs >> 8) & 0xffffu);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const u32 bits = permute(entries, 0x4b000000u, 0x7540 + i);
        const float x = __uint_as_float(bits) - (8388608.0f + 128.0f);
        w[half + i] = T::MINIMUM ? fmaf(s, x, -least) : s * x;
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
using IQ4NL = Codebook<codebook::IQ4_NL>;
using IQ4XS = Codebook<codebook::IQ4_XS>;
using MXFP4 = Codebook<codebook::MXFP4>;
using NVFP4 = Codebook<codebook::NVFP4>;
using Q2K = Codebook<codebook::Q2_K>;
using Q3K = Codebook<codebook::Q3_K>;

struct F32 {
  static constexpr int VALUES = 1, BYTES = 4;

  static DEVICE void values(float (&w)[8], const u8* row, int k) {
    const float4 *p = (const float4*)row + k / 4, a = p[0], b = p[1];
    w[0] = a.x, w[1] = a.y, w[2] = a.z, w[3] = a.w;
    w[4] = b.x, w[5] = b.y, w[6] = b.z, w[7] = b.w;
  }
};

template <bool BRAIN>
struct Halves {
  static constexpr int VALUES = 1, BYTES = 2;

  static DEVICE void values(float (&w)[8], const u8* row, int k) {
    const uint4 v = *((const uint4*)row + k / 8);
    const u32 pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const u16 h = (u16)(pairs[i / 2] >> i % 2 * 16);
      w[i] = BRAIN ? from_bf16(h) : from_half(h);
    }
  }
};
using F16 = Halves<false>;
using BF16 = Halves<true>;

template <class F>
DEVICE i64 row_bytes(int k) {
  return (i64)(k / F::VALUES) * F::BYTES;
}

// Warp sums of ROWS * T values per lane. Each lane returns one of the sums; lanes exchange halves
// of their values, so the number of shuffles is about ROWS * T instead of 5 * ROWS * T. Each sum is
// added in the same order for every ROWS and T.
template <int T, int ROWS>
DEVICE float transpose_reduce(float (&v)[ROWS][T], int lane) {
  float* flat = &v[0][0];
  int step = 16;
#pragma unroll
  for (int n = ROWS * T / 2; n; n /= 2, step /= 2) {
    const bool upper = lane & step;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const float other = __shfl_xor_sync(FULL_MASK, upper ? flat[i] : flat[i + n], step);
      flat[i] = (upper ? flat[i + n] : flat[i]) + other;
    }
  }
#pragma unroll
  for (; step; step /= 2) flat[0] += __shfl_xor_sync(FULL_MASK, flat[0], step);
  return flat[0];
}

// weights: [n_rows][k / F::VALUES * F::BYTES], x: [tokens, k], y: [tokens, n_rows]; tokens <= T,
// k a multiple of 8 and of F::VALUES. Each warp computes ROWS rows.
template <class F, int T, int ROWS>
DEVICE void multiply(const u8* weights, const float* x, float* y, int n_rows, int k, int tokens) {
  const int lane = threadIdx.x % 32;
  const int first = (blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) * ROWS;
  if (first >= n_rows) return;
  float acc[ROWS][T] = {};
#pragma unroll(T == 1 ? 2 : 1)
  for (int at = lane * 8; at < k; at += 256) {
    float w[ROWS][8];
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
      F::values(w[r], weights + min(first + r, n_rows - 1) * row_bytes<F>(k), at);
#pragma unroll
    for (int m = 0; m < T; ++m) {
      const float4* p = (const float4*)(x + (i64)min(m, tokens - 1) * k + at);
      const float4 a = p[0], b = p[1];
      const float v[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
      for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int i = 0; i < 8; ++i) acc[r][m] = fmaf(w[r][i], v[i], acc[r][m]);
    }
  }
  constexpr int SHARE = 32 / (ROWS * T);  // lanes that end with the same sum
  const int i = lane / SHARE, r = i / T, m = i % T;
  const float sum = transpose_reduce(acc, lane);
  if (lane % SHARE == 0 && m < tokens && first + r < n_rows) y[(i64)m * n_rows + first + r] = sum;
}

template <class F, int T, int ROWS>
__global__ __launch_bounds__(32 * PORTABLE_WARPS, 3) void portable(const void* weights, const float* x, float* y,
                                                int n_rows, int k, int tokens) {
  griddep_launch_dependents();
  griddep_wait();
  multiply<F, T, ROWS>((const u8*)weights, x, y, n_rows, k, tokens);
}

// Row v of y [visits, n_rows]: row v / share of x times matrix ids[v] of the stack `weights`.
// blockIdx.y is v.
template <class F, int ROWS>
__global__ __launch_bounds__(32 * PORTABLE_WARPS, 3) void portable_visits(const void* weights, const float* x,
                                                       const i64* ids, float* y, int n_rows,
                                                       int k, int share) {
  griddep_launch_dependents();
  griddep_wait();
  const i64 visit = blockIdx.y;
  const u8* matrix = (const u8*)weights + ids[visit] * n_rows * row_bytes<F>(k);
  multiply<F, 1, ROWS>(matrix, x + visit / share * k, y + visit * n_rows, n_rows, k, 1);
}

// Dequantize `count` * 8 values, of rows of k values, to half.
template <class F>
__global__ __launch_bounds__(DEQUANT_THREADS) void portable_halves(const u8* weights, u16* out, u32 count,
                                                    int k) {
  griddep_launch_dependents();
  griddep_wait();
  const u32 i = blockIdx.x * DEQUANT_THREADS + threadIdx.x, row = i / (k / 8);
  if (i >= count) return;
  float w[8];
  F::values(w, weights + row * row_bytes<F>(k), (i - row * (k / 8)) * 8);
  pack_row(out + (i64)i * 8, w);
}
