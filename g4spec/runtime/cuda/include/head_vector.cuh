// One head's vector of one token in the registers of a warp: RMS norm, rotary embedding, conversion
// to half (queries), and storage in the KV cache (layout: g4spec/runtime/cuda/cache/cuda_kv.py).
#pragma once
#include "math.cuh"
#include "reduce.cuh"

// a / b rounded to nearest, given share = 1 / b; without the branches of a division.
DEVICE float divide_rn(float a, float b, float share) {
  const float q = a * share;
  return fmaf(fmaf(-q, b, a), share, q);
}

// {cos, sin} of an angle of 0 to 2^20 radians, absolute error at most 1.2e-7: range reduction by pi/2 in three
// parts, then polynomials that interpolate at Chebyshev nodes. sincosf has a slow path beyond
// 105,615 that needs local memory.
DEVICE float2 cos_sin_of(float angle) {
  const float k = rintf(angle * 0.636619772f);
  float r = fmaf(k, -1.57079637f, angle);
  r = fmaf(k, 4.37113900e-8f, r);
  r = fmaf(k, 1.71512451e-15f, r);
  const float u = r * r;
  float p = fmaf(2.45177453e-5f, u, -1.38881546e-3f), q = fmaf(-1.95577741e-4f, u, 8.33260082e-3f);
  p = fmaf(p, u, 4.16666642e-2f), q = fmaf(q, u, -1.66666642e-1f);
  const float c = fmaf(u * u, p, fmaf(u, -0.5f, 1.0f)), s = fmaf(r * u, q, r);
  const int n = (int)k;
  const float x = n & 1 ? s : c, y = n & 1 ? c : s;
  return {(n + 1) & 2 ? -x : x, n & 2 ? -y : y};
}

// Element v[j][e] is value (32 j + lane) W + e of the head. W is chosen so that one lane holds both
// values of a rotated pair: PAIRS 1 rotates (2 i, 2 i + 1), PAIRS 0 rotates (i, i + D / 2).
template <int D, int PAIRS>
struct HeadVector {
  static constexpr int W = PAIRS ? (D >= 128 ? 4 : 2) : (D >= 256 ? 4 : D / 64);
  static constexpr int J = D / (32 * W);
  static_assert(J * 32 * W == D, "a warp holds the whole head");
  static_assert(PAIRS || J % 2 == 0, "value i + D / 2 must be in the lane of value i");
  float v[J][W];

  static DEVICE int at(int j) { return (j * 32 + threadIdx.x % 32) * W; }

  DEVICE void load(const float* p) {
#pragma unroll
    for (int j = 0; j < J; ++j) {
      if constexpr (W == 4) {
        const float4 x = __ldcg((const float4*)(p + at(j)));
        v[j][0] = x.x, v[j][1] = x.y, v[j][2] = x.z, v[j][3] = x.w;
      } else if constexpr (W == 2) {
        const float2 x = __ldcg((const float2*)(p + at(j)));
        v[j][0] = x.x, v[j][1] = x.y;
      } else {
        v[j][0] = __ldcg(p + at(j));
      }
    }
  }
  DEVICE void load_shared(const float* p) {
    static_assert(W == 4, "16-byte loads");
#pragma unroll
    for (int j = 0; j < J; ++j) {
      const float4 x = *(const float4*)(p + at(j));
      v[j][0] = x.x, v[j][1] = x.y, v[j][2] = x.z, v[j][3] = x.w;
    }
  }
  template <int SLICES>  // sum of split-K slices p [SLICES][rows][n heads][D], in order
  DEVICE void load(const float* p, int row, int rows, int n, int head) {
    load<SLICES>(p + ((i64)row * n + head) * D, (i64)rows * n * D);
  }
  template <int SLICES>  // `apart`: elements from one slice to the next
  DEVICE void load(const float* p, i64 apart) {
    load(p);
#pragma unroll
    for (int s = 1; s < SLICES; ++s) {
      HeadVector more;
      more.load(p + s * apart);
#pragma unroll
      for (int j = 0; j < J; ++j)
#pragma unroll
        for (int e = 0; e < W; ++e) v[j][e] += more.v[j][e];
    }
  }
  DEVICE float inverse_rms(float eps) const {  // 1 / root mean square
    float s = 0;
#pragma unroll
    for (int j = 0; j < J; ++j)
#pragma unroll
      for (int e = 0; e < W; ++e) s += v[j][e] * v[j][e];
    return rsqrtf(warp_reduce(s, Sum()) * (1.0f / D) + eps);
  }
  DEVICE void scale(float r) {
#pragma unroll
    for (int j = 0; j < J; ++j)
#pragma unroll
      for (int e = 0; e < W; ++e) v[j][e] *= r;
  }
  template <int ROTARY_PAIRS>  // except the first ROTARY_PAIRS columns of both halves
  DEVICE void scale(const HeadVector& w) {
#pragma unroll
    for (int j = 0; j < J; ++j)
#pragma unroll
      for (int e = 0; e < W; ++e)
        if (at(j) % (D / 2) >= ROTARY_PAIRS) v[j][e] *= w.v[j][e];
  }
  static DEVICE void rotate_pair(float& a, float& b, float2 by) {  // by {cos, sin}
    const float x = a * by.x - b * by.y;
    b = b * by.x + a * by.y;
    a = x;
  }
  DEVICE void rotate(const float2* cos_sin) {  // of each pair
    if constexpr (PAIRS) {
#pragma unroll
      for (int j = 0; j < J; ++j)
#pragma unroll
        for (int e = 0; e < W; e += 2) rotate_pair(v[j][e], v[j][e + 1], cos_sin[(at(j) + e) / 2]);
    } else {
#pragma unroll
      for (int j = 0; j < J / 2; ++j)
#pragma unroll
        for (int e = 0; e < W; ++e) rotate_pair(v[j][e], v[j + J / 2][e], cos_sin[at(j) + e]);
    }
  }
  // RMS norm (optionally weighted), then rotation.
  DEVICE void finish(bool normed, bool weighted, const HeadVector& weight, bool rotated,
                     const float2* cos_sin, float eps) {
    if (normed || weighted) {
      scale(inverse_rms(eps));
      if (weighted) scale<0>(weight);
    }
    if (rotated) rotate(cos_sin);
  }
  // Columns that the cache stores: all (ROTARY_PAIRS 0), or the first ROTARY_PAIRS of both halves.
  template <int ROTARY_PAIRS>
  static DEVICE bool stored(int j) {
    return !ROTARY_PAIRS || at(j) % (D / 2) < ROTARY_PAIRS;
  }
  template <int ROTARY_PAIRS>
  static DEVICE int column(int j) {
    return ROTARY_PAIRS ? at(j) % (D / 2) + (at(j) < D / 2 ? 0 : ROTARY_PAIRS) : at(j);
  }
  template <int ROTARY_PAIRS>
  DEVICE void store(u16* p) const {
#pragma unroll
    for (int j = 0; j < J; ++j) {
      if (!stored<ROTARY_PAIRS>(j)) continue;
      u16* to = p + column<ROTARY_PAIRS>(j);
      if constexpr (W == 4)
        *(uint2*)to = {pack_half2(v[j][0], v[j][1]), pack_half2(v[j][2], v[j][3])};
      else if constexpr (W == 2)
        *(u32*)to = pack_half2(v[j][0], v[j][1]);
      else
        *to = to_half(v[j][0]);
    }
  }
  // Store as Q8_0: bytes q + 128 and a half-precision scale per 32 values, rounded as `roundf`.
  // `also`: an optional second destination.
  template <int ROTARY_PAIRS>
  DEVICE void store(u8* p, u16* scales, u8* also = nullptr, u16* also_scales = nullptr) const {
#pragma unroll
    for (int j = 0; j < J; ++j) {
      float most = 0;
#pragma unroll
      for (int e = 0; e < W; ++e) most = MaxNan()(most, fabsf(v[j][e]));
#pragma unroll
      for (int step = 16 / W; step; step /= 2)
        most = MaxNan()(most, __shfl_xor_sync(FULL_MASK, most, step));
      const float d = divide_rn(most, 127.0f, 1.0f / 127.0f);
      const float rough = rcp_approx(d);
      float inverse = fmaf(rough, fmaf(-d, rough, 1.0f), rough);
      if (!(inverse < POS_INF)) inverse = 0.0f;
      int codes[4] = {};
#pragma unroll
      for (int e = 0; e < W; ++e) {
        const float x = __fmul_rn(v[j][e], inverse);
        codes[e] = __float2int_rz(__fadd_rn(x, copysignf(0.49999997f, x)));
      }
      const u32 bytes = pack_s8x4(codes[0], codes[1], codes[2], codes[3]) ^ 0x80808080u;
      if (!stored<ROTARY_PAIRS>(j)) continue;
      store_q8<ROTARY_PAIRS>(p, scales, j, bytes, d);
      if (also) store_q8<ROTARY_PAIRS>(also, also_scales, j, bytes, d);
    }
  }
  template <int ROTARY_PAIRS>
  static DEVICE void store_q8(u8* p, u16* scales, int j, u32 bytes, float d) {
    u8* to = p + column<ROTARY_PAIRS>(j);
    if constexpr (W == 4) *(u32*)to = bytes;
    else if constexpr (W == 2) *(u16*)to = (u16)bytes;
    else *to = (u8)bytes;
    if (at(j) % 32 == 0) scales[column<ROTARY_PAIRS>(j) / 32] = to_half(d);
  }
};
