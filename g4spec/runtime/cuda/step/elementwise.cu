// Elementwise kernels between GEMMs: gated activation functions, per-layer embeddings, soft-capping of
// logits, and the ranges of positions that rows attend to.
#include "activations.cuh"
#include "packed_rows.cuh"
#include "reduce.cuh"

template <int ACTIVATION>
DEVICE float activated(float x) {
  return ACTIVATION == Activation::SILU ? silu(x) : gelu(x);
}

// out = activation(gate) * by. Row m of `gate` and of `by` begins at m times its stride. A thread
// computes four values. AS_ROWS: `out` is packed rows, whose values are divided by GATED_SCALE (their
// row scale); grid [width / (4 * blockDim), rows including padding]. Otherwise `out` is float32 [rows,
// width]; grid [.., rows].
template <int ACTIVATION, int AS_ROWS>
__global__ void gated(const float* gate, i64 gate_stride, const float* by, i64 by_stride, void* out,
                      int rows, int width) {
  griddep_launch_dependents();
  const int i = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
  const bool valid = i < width / 4;
  const RowGroup own(row, rows);
  const QuadOffsets place(own, width, i);
  griddep_wait();
  float4 v = {};
  if (valid && row < rows) {
    const float4 g = __ldcg((const float4*)(gate + row * gate_stride) + i);
    const float4 b = __ldcg((const float4*)(by + row * by_stride) + i);
    v = mul4({activated<ACTIVATION>(g.x), activated<ACTIVATION>(g.y), activated<ACTIVATION>(g.z),
              activated<ACTIVATION>(g.w)}, b);
  }
  if (AS_ROWS)
    place.store((u8*)out, mul4(v, 1.0f / GATED_SCALE), valid, own.swizzled);
  else if (valid) ((float4*)out)[(i64)row * (width / 4) + i] = v;
}

// Inputs of Gemma's per-layer embeddings: out = (rms_norm(y / root) * weight + tokens) * sqrt(1/2). y,
// tokens, out: [rows, layers, size]; `n`: rows * layers; `root`: square root of the hidden size. One
// warp computes one layer of a row.
template <int WARPS>  // per block
__global__ void per_layer_inputs(const float* y, const float* tokens, const float* weight,
                                 float* out, int n, int size, float root, float eps) {
  griddep_launch_dependents();
  griddep_wait();
  const int index = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (index >= n) return;
  const i64 at = (i64)index * size;
  float s = 0;
  for (int i = lane; i < size; i += 32) {
    const float v = __fdiv_rn(__ldcg(y + at + i), root);
    s += v * v;
  }
  const float r = rsqrtf(warp_reduce(s, Sum()) / (float)size + eps);
  for (int i = lane; i < size; i += 32) {
    const float v = __fdiv_rn(__ldcg(y + at + i), root);
    out[at + i] = (v * r * weight[i] + __ldcg(tokens + at + i)) * 0.70710678118654752f;
  }
}

template <bool CAPPED>
DEVICE float capped(float x, float cap, float scale) {
  const float v = scale * x;
  return CAPPED ? cap * tanhf(v / cap) : v;
}

// x = cap * tanh(scale * x / cap) in place; not CAPPED: scale * x. A thread handles four values.
template <bool CAPPED>
__global__ void softcap(float* x, i64 n, float cap, float scale) {
  griddep_launch_dependents();
  griddep_wait();
  const i64 i = 4 * ((i64)blockIdx.x * blockDim.x + threadIdx.x);
  if (i + 4 <= n) {
    float4 v = *(const float4*)(x + i);
    v = {capped<CAPPED>(v.x, cap, scale), capped<CAPPED>(v.y, cap, scale),
         capped<CAPPED>(v.z, cap, scale), capped<CAPPED>(v.w, cap, scale)};
    *(float4*)(x + i) = v;
  } else {
    for (i64 j = i; j < n; ++j) x[j] = capped<CAPPED>(x[j], cap, scale);
  }
}

// First and last position that each row attends to, for up to four kinds of range (core.Reach): out
// [kinds][2][rows]. a, b, c, d: `back` of each kind; -1: all positions. Bits 2 k and 2 k + 1 of
// `flags`: `from_first` and `to_last` of kind k. Each sequence has `tokens` rows. This kernel does not
// call griddep_launch_dependents(), because later kernels read the ranges before their
// griddep_wait().
__global__ void spans(const i64* positions, i64* out, int rows, int tokens, int a, int b, int c,
                      int d, int flags) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x, kind = blockIdx.y;
  if (row >= rows) return;
  const int start = row / tokens * tokens;
  const int back = kind == 0 ? a : kind == 1 ? b : kind == 2 ? c : d;
  flags >>= 2 * kind;
  const i64 first = positions[flags & 1 ? start : row] - back;
  out += (i64)kind * 2 * rows + row;
  out[0] = back < 0 || first < 0 ? 0 : first;
  out[rows] = positions[flags & 2 ? start + tokens - 1 : row];
}
