// Prefill: norms with residual addition, and gated activations, between cuBLAS GEMMs. One block per
// row, which is read once into registers.
#include "activations.cuh"
#include "half_rows.cuh"
#include "math.cuh"
#include "reduce.cuh"

// A row of H values in the registers of a block of WARPS warps.
template <int H, int WARPS>
struct Row {
  static constexpr int N = H / 4, V = (N + 32 * WARPS - 1) / (32 * WARPS);
  float4 v[V];

  static DEVICE int at(int j) { return j * 32 * WARPS + threadIdx.x; }
  DEVICE void load(const float* p) {
#pragma unroll
    for (int j = 0; j < V; ++j)
      v[j] = at(j) < N ? ((const float4*)p)[at(j)] : float4{0, 0, 0, 0};
  }
  DEVICE void store(float* p) const {
#pragma unroll
    for (int j = 0; j < V; ++j)
      if (at(j) < N) ((float4*)p)[at(j)] = v[j];
  }
  // Add `weight` times a row of 16-bit floats.
  template <class T>
  DEVICE void add(const u16* p, float weight) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      if (at(j) >= N) continue;
      const uint2 w = ((const uint2*)p)[at(j)];
      v[j] = add4(v[j], mul4({T::low(w.x), T::high(w.x), T::low(w.y), T::high(w.y)}, weight));
    }
  }
  DEVICE void scale(float s) {
#pragma unroll
    for (int j = 0; j < V; ++j) v[j] = mul4(v[j], s);
  }
  // Add `s` times another row, times a weight per channel.
  DEVICE void add_weighted(const Row& other, float s, const float* weight) {
#pragma unroll
    for (int j = 0; j < V; ++j)
      if (at(j) < N)
        v[j] = add4(v[j], mul4(mul4(other.v[j], s), ((const float4*)weight)[at(j)]));
  }
  // 1 / root mean square. Each call needs its own `sums`.
  DEVICE float inverse_rms(float* sums, float eps) const {
    float s = 0;
#pragma unroll
    for (int j = 0; j < V; ++j) s += square4(v[j]);
    return rsqrtf(block_reduce<WARPS>(s, sums, Sum()) * (1.0f / H) + eps);
  }
};

template <class T>
DEVICE void store4(void* to, int i, float4 v) {
  if constexpr (T::BYTES == 2)
    ((uint2*)to)[i] = {T::pack(v.x, v.y), T::pack(v.z, v.w)};
  else
    ((float4*)to)[i] = v;
}

// Store the row times `s` and a weight per channel (null: none), converted to T.
template <class T, int H, int WARPS>
DEVICE void write_row(const Row<H, WARPS>& x, float s, const float* weight, void* to) {
#pragma unroll
  for (int j = 0; j < Row<H, WARPS>::V; ++j) {
    const int i = x.at(j);
    if (i >= Row<H, WARPS>::N) continue;
    const float4 v = mul4(x.v[j], s);
    store4<T>(to, i, weight ? mul4(v, ((const float4*)weight)[i]) : v);
  }
}

template <class T, int H>
DEVICE void* row_of(void* base, i64 row) {
  return (u8*)base + row * H * T::BYTES;
}

// RMS norm of the residual x [T, H] -> half [T, H].
template <int H, int WARPS>
__global__ void __launch_bounds__(32 * WARPS)
norm(const float* x, const float* weight, void* to, float eps) {
  __shared__ float sums[1][WARPS];
  const i64 row = blockIdx.x;
  Row<H, WARPS> r;
  r.load(x + row * H);
  write_row<Half>(r, r.inverse_rms(sums[0], eps), weight, row_of<Half, H>(to, row));
}

// Residual rows as halves, each divided by the power of two that brings its largest magnitude into
// [512, 1024); the power goes to `powers` [T].
template <int H, int WARPS>
__global__ void __launch_bounds__(32 * WARPS) convert(const float* x, void* to, float* powers) {
  __shared__ float slots[1][WARPS];
  const i64 row = blockIdx.x;
  Row<H, WARPS> r;
  r.load(x + row * H);
  float most = 0;
#pragma unroll
  for (int j = 0; j < r.V; ++j) most = MaxNan()(most, largest4(r.v[j]));
  const u32 exponent =
      __float_as_uint(block_reduce<WARPS>(most, slots[0], MaxNan())) >> 23;  // 2^(e - 127)
  const int up = exponent ? min(max((int)exponent - 136, -126), 127) : 0;
  if (threadIdx.x == 0) powers[row] = __uint_as_float((u32)(up + 127) << 23);
  write_row<Half>(r, __uint_as_float((u32)(127 - up) << 23), nullptr, row_of<Half, H>(to, row));
}

// x = (x + rms_norm(stored * h) * weight) * scale, then its norm as halves to `to` (null: no norm).
template <int H, int WARPS>
__global__ void __launch_bounds__(32 * WARPS)
add_norm(const float* h, float* x, const float* weight, const float* scale, const float* next,
         void* to, float stored, float eps) {
  __shared__ float sums[2][WARPS];
  const i64 row = blockIdx.x;
  Row<H, WARPS> a, r;
  a.load(h + row * H);
  a.scale(stored);
  r.load(x + row * H);
  r.add_weighted(a, a.inverse_rms(sums[0], eps), weight);
  if (scale) r.scale(*scale);
  r.store(x + row * H);
  if (to) write_row<Half>(r, r.inverse_rms(sums[1], eps), next, row_of<Half, H>(to, row));
}

// The same before an MoE block: three norms of the row, for the dense branch, the experts, and
// (times `share`, float32) the router.
template <int H, int WARPS>
__global__ void __launch_bounds__(32 * WARPS)
add_norm_experts(const float* h, float* x, const float* weight, const float* dense, void* to_dense,
                 const float* experts, void* to_experts, const float* router, void* to_router,
                 float share, float eps) {
  __shared__ float sums[2][WARPS];
  const i64 row = blockIdx.x;
  Row<H, WARPS> a, r;
  a.load(h + row * H);
  r.load(x + row * H);
  r.add_weighted(a, a.inverse_rms(sums[0], eps), weight);
  r.store(x + row * H);
  const float s = r.inverse_rms(sums[1], eps);
  write_row<Half>(r, s, dense, row_of<Half, H>(to_dense, row));
  write_row<Bfloat>(r, s, experts, row_of<Bfloat, H>(to_experts, row));
  write_row<Float>(r, s * share, router, row_of<Float, H>(to_router, row));
}

// End of an MoE block: norm of the weighted sum of k expert rows y (at `places` [T, k], `weights`
// [T, k]), plus norm of the dense branch h times `stored`; their sum is normed and added to the
// residual.
template <int H, int WARPS>
__global__ void __launch_bounds__(32 * WARPS)
add_experts(const float* h, const u16* y, const i32* places, const float* weights, int k, float* x,
            const float* dense, const float* experts, const float* post, const float* scale,
            const float* next, void* to, float stored, float eps) {
  __shared__ float sums[4][WARPS];
  const i64 row = blockIdx.x;
  Row<H, WARPS> a, b, r;
#pragma unroll
  for (int j = 0; j < Row<H, WARPS>::V; ++j) r.v[j] = b.v[j] = float4{0, 0, 0, 0};
  a.load(h + row * H);
  a.scale(stored);
  for (int i = 0; i < k; ++i)
    b.template add<Bfloat>(y + (i64)places[row * k + i] * H, weights[row * k + i]);
  r.add_weighted(a, a.inverse_rms(sums[0], eps), dense);
  r.add_weighted(b, b.inverse_rms(sums[1], eps), experts);
  a.load(x + row * H);
  a.add_weighted(r, r.inverse_rms(sums[2], eps), post);
  if (scale) a.scale(*scale);
  a.store(x + row * H);
  if (to) write_row<Half>(a, a.inverse_rms(sums[3], eps), next, row_of<Half, H>(to, row));
}

// gelu(gate * in_scale) * (up * in_scale) * out_scale. A row interleaves 16 gates and 16 ups, or with
// HALVES holds all gates first. A thread handles eight channels.
template <class T, bool HALVES>
__global__ void __launch_bounds__(GATED_THREADS)
gated(const u16* gate_up, u16* to, int width, float in_scale, float out_scale) {
  const int i = (blockIdx.y * GATED_THREADS + threadIdx.x) * GATED_CHANNELS;  // channel
  if (i >= width) return;
  const u16* row = gate_up + (i64)blockIdx.x * 2 * width;
  const u16* gates =
      row + (HALVES ? i : i / INTERLEAVE_ROWS * (2 * INTERLEAVE_ROWS) + i % INTERLEAVE_ROWS);
  float g[GATED_CHANNELS], u[GATED_CHANNELS];
  unpack_row<T>(g, gates);
  unpack_row<T>(u, gates + (HALVES ? width : INTERLEAVE_ROWS));
#pragma unroll
  for (int e = 0; e < GATED_CHANNELS; ++e)
    g[e] = gelu_by_exp(g[e] * in_scale) * (u[e] * in_scale) * out_scale;
  pack_row<T>(to + (i64)blockIdx.x * width + i, g);
}

// Per-layer embedding: gelu(gate * powers[row]) * by; rows of `by` are `stride` elements apart.
__global__ void __launch_bounds__(GATED_THREADS)
modulated(const float* gate, const float* powers, const float* by, i64 stride, u16* to, int width) {
  const int i = blockIdx.y * GATED_THREADS + threadIdx.x;
  if (i >= width) return;
  const i64 row = blockIdx.x;
  to[row * width + i] =
      to_half(gelu_by_exp(gate[row * width + i] * powers[row]) * by[row * stride + i]);
}
