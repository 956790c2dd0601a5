// Residual addition and RMS norm between two GEMMs. A block reads a row once into registers and
// writes the new residual and up to three normed copies (float32 or packed activations).
//
// The kernel is bound by latency and by the issue rate of one SM. Therefore weights are loaded and
// addresses computed before the preceding kernel has ended (EARLY: the residual too), and for the
// few rows of a step V blocks compute the same row and each writes 1 / V of it (SPLIT).
#include "packed_rows.cuh"
#include "row_registers.cuh"

template <int WARPS, int V, bool WHOLE>
struct Row : RowRegisters<WARPS, V, WHOLE> {
  using RowRegisters<WARPS, V, WHOLE>::v, RowRegisters<WARPS, V, WHOLE>::squares;

  DEVICE float largest() const {
    float most = 0;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      most = MaxNan()(most, largest4(v[j]));
      if (!finite4(v[j])) most = QUIET_NAN;
    }
    return most;
  }
  // 1 / root mean square; `share` is 1 / width.
  DEVICE float inverse_rms(float* slots, float share, float eps) const {
    return rsqrtf(block_reduce<WARPS>(squares(), slots, Sum()) * share + eps);
  }
};

// The power of two s such that most / s is in [512, 1024); 1 for zero, inf and NaN.
DEVICE float power_of_two_scale(float most) {
  if (!(most > 0.0f && most < POS_INF)) return 1.0f;
  const int exponent = (int)(__float_as_uint(most) >> 23) - 127 - 9;
  return __int_as_float((max(exponent, -100) + 127) << 23);
}

// v = (v + norm(h)) * factor. `h` [SLICES]: split-K slices, summed in order.
template <int ENTER, int SLICES, int WARPS, int V, bool WHOLE>
DEVICE void add_residual(Row<WARPS, V, WHOLE>& v, Row<WARPS, V, WHOLE> (&h)[SLICES],
                         const Row<WARPS, V, WHOLE>& weight, float* slots, float factor,
                         float share, float eps) {
#pragma unroll
  for (int s = 1; s < SLICES; ++s)
#pragma unroll
    for (int j = 0; j < V; ++j) h[0].v[j] = add4(h[0].v[j], h[s].v[j]);
  const float q = ENTER == NormInput::NORM ? h[0].inverse_rms(slots, share, eps) : 1.0f;
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const float4 y = ENTER == NormInput::NORM ? mul4(mul4(h[0].v[j], q), weight.v[j]) : h[0].v[j];
    v.v[j] = mul4(add4(v.v[j], y), factor);
  }
}

// Write zeros, values 4 i .. 4 i + 3, to the padding rows after the last row, as far as this block
// handles them.
template <int N>
DEVICE void zero_padding_rows(void* const (&to)[3], const RowGroup& own, int width, int i,
                              bool mine) {
  for (int m = own.row + own.count; m < 8 * own.tiles; m += own.count) {
    const QuadOffsets place(own.with_row(m), width, i);
#pragma unroll
    for (int o = 0; o < N; ++o) place.store((u8*)to[o], {0, 0, 0, 0}, mine, own.swizzled);
  }
}

// Multiply four normed values by each norm weight and store them to each output.
template <int NEXT, int N, int OWN>
DEVICE void write_outputs(float4 normed, const float4 (&weights)[N][OWN], int q,
                          void* const (&to)[3], u32 at, const QuadOffsets& place, bool mine,
                          bool swizzled) {
#pragma unroll
  for (int o = 0; o < N; ++o) {
    const float4 y = mul4(normed, weights[o][q]);
    if (NEXT == NormOutput::FLOATS && mine) ((float4*)to[o])[at] = y;
    if (NEXT == NormOutput::ROWS || NEXT == NormOutput::SCALED)
      place.store((u8*)to[o], y, mine, swizzled);
  }
}

// x' = (x + rms_norm(h) * weight) * scale, and its norms by N weights. `h` [SLICES][rows][width];
// `x` [rows][x_stride]; `out` [rows, width], not `x`. `single`: packed rows are in groups of one tile.
// Grid [rows, V if SPLIT].
template <int WARPS, int V, int SLICES, int ENTER, int NEXT, int N, bool SPLIT, bool WHOLE>
__global__ __launch_bounds__(32 * WARPS, SPLIT ? 1 : 0) void norm_rows(
    const float* h, const float* x, i64 x_stride, const float* weight, const float* scale,
    const float* next_a, const float* next_b, const float* next_c, void* to_a, void* to_b,
    void* to_c, float* row_scale, float* out, int rows, int width, int single, float eps) {
  griddep_launch_dependents();
  // Split-K slices come from linear.cu, whose dependents start only after everything before it has
  // ended.
  constexpr bool EARLY = SLICES > 1;
  __shared__ float slots[2][WARPS];
  using R = Row<WARPS, V, WHOLE>;
  constexpr int OWN = SPLIT ? 1 : V;  // groups of four values that a thread writes
  const float* next[3] = {next_a, next_b, next_c};
  void* const to[3] = {to_a, to_b, to_c};
  const int row = blockIdx.x, part = blockIdx.y, n4 = width / 4;
  const RowGroup own(row, rows, single != 0);
  R w, parts[SLICES], v;
  float4 nw[N][OWN];
  QuadOffsets place[OWN];
  if (ENTER == NormInput::NORM) w.load(weight, n4);
#pragma unroll
  for (int q = 0; q < OWN; ++q) {
    const int j = SPLIT ? part : q, i = R::at(j);
#pragma unroll
    for (int o = 0; o < N; ++o)
      nw[o][q] =
          next[o] && R::valid(j, n4) ? __ldcg((const float4*)next[o] + i) : float4{1, 1, 1, 1};
    if (NEXT == NormOutput::ROWS || NEXT == NormOutput::SCALED)
      place[q] = QuadOffsets(own, width, i);
  }
  const float factor = scale ? *scale : 1.0f, share = 1.0f / (float)width;
  const float* old = materialize(x + row * x_stride);
  const u32 start = materialize(row * n4);
  if (EARLY) v.load(old, n4);
  griddep_wait();
  if (!EARLY) v.load(old, n4);
  if (ENTER != NormInput::PLAIN) {
#pragma unroll
    for (int s = 0; s < SLICES; ++s) parts[s].load(h + ((i64)s * rows + row) * width, n4);
    add_residual<ENTER>(v, parts, w, slots[0], factor, share, eps);
  }
  float r = 1.0f;
  if (NEXT == NormOutput::FLOATS || NEXT == NormOutput::ROWS)
    r = v.inverse_rms(slots[1], share, eps);
  if (NEXT == NormOutput::SCALED)
    r = power_of_two_scale(block_reduce<WARPS>(v.largest(), slots[1], MaxNan()));
  if (NEXT == NormOutput::SCALED && part == 0 && threadIdx.x == 0)
    for (int m = own.row; m < 8 * own.tiles; m += own.count)
      row_scale[own.index * GROUP_ROWS + m] = m == own.row ? r : 1.0f;
  if (NEXT == NormOutput::SCALED) r = 1.0f / r;
#pragma unroll
  for (int q = 0; q < OWN; ++q) {
    const int j = SPLIT ? part : q, i = R::at(j);
    const bool mine = R::valid(j, n4);
    const float4 value = SPLIT ? v.select(part) : v.v[q];
    if (ENTER != NormInput::PLAIN && mine) ((float4*)out)[start + i] = value;
    write_outputs<NEXT>(mul4(value, r), nw, q, to, start + i, place[q], mine, own.swizzled);
    if (NEXT == NormOutput::ROWS || NEXT == NormOutput::SCALED)
      zero_padding_rows<N>(to, own, width, i, mine);
  }
}
