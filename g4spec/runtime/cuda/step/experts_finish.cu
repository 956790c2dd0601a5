// End of an MoE layer: x' = (x + norm(norm(sum of experts) + norm(dense))) * scale, then the next
// layer's first norm as packed activations. A row is held in the registers of a block. For the few rows
// of a step V blocks compute the same row and each writes 1 / V of it (SPLIT), as in norm.cu.
#include "packed_rows.cuh"
#include "row_registers.cuh"

template <int WARPS, int V>
struct Part : RowRegisters<WARPS, V, false> {
  using RowRegisters<WARPS, V, false>::v, RowRegisters<WARPS, V, false>::squares;

  DEVICE void add(const Part& other) {
#pragma unroll
    for (int j = 0; j < V; ++j) v[j] = add4(v[j], other.v[j]);
  }
  DEVICE void scale(float s, const Part& weight) {
#pragma unroll
    for (int j = 0; j < V; ++j) v[j] = mul4(mul4(v[j], s), weight.v[j]);
  }
  // 1 / root mean square
  DEVICE float inverse_rms(float* slots, int width, float eps) const {
    return rsqrtf(block_reduce<WARPS>(squares(), slots, Sum()) / (float)width + eps);
  }
};

// y [rows, K, width]: weighted expert outputs; dense [rows, width]. Norm weights [width]:
// experts_norm of the experts' sum, dense_norm of the dense branch, norm of both together,
// next_norm of the next layer (null: `to` is not written). `out` [rows, width]: new residual.
// Zeroes `arrived` [counters]. Grid: [rows, V if SPLIT], including the padding rows of each group of
// `tiles` tiles. `swizzled`: layout of `to`, for more than 16 rows.
template <int WARPS, int V, int K, bool SPLIT>
__global__ __launch_bounds__(32 * WARPS) void finish(
    const float* y, const float* dense, const float* x, const float* experts_norm,
    const float* dense_norm, const float* norm, const float* next_norm, const float* scale,
    float* out, u8* to, u32* arrived, int counters, int rows, int tiles, int swizzled,
    int width, float eps) {
  using P = Part<WARPS, V>;
  griddep_launch_dependents();
  __shared__ float slots[4][WARPS];
  constexpr int OWN = SPLIT ? 1 : V;  // groups of four values that a thread writes
  const int row = blockIdx.x, part = blockIdx.y, n4 = width / 4;
  P experts_weight, dense_weight, weight, next, sum, other, parts[K];
  experts_weight.load(experts_norm, n4);
  dense_weight.load(dense_norm, n4);
  weight.load(norm, n4);
  if (next_norm) next.load(next_norm, n4);
  const float factor = scale ? *scale : 1.0f;
  griddep_wait();
  if (row == 0 && part == 0)
    for (int i = threadIdx.x; i < counters; i += 32 * WARPS) arrived[i] = 0;
  float r = 0;
  P result = {};
  if (row < rows) {
    const i64 at = (i64)row * width;
#pragma unroll
    for (int s = 0; s < K; ++s) parts[s].load(y + at * K + s * width, n4);
    other.load(dense + at, n4);
    result.load(x + at, n4);
    sum = parts[0];
#pragma unroll
    for (int s = 1; s < K; ++s) sum.add(parts[s]);
    const float2 both = block_reduce2<WARPS>(other.squares(), sum.squares(), slots[0], slots[1]);
    other.scale(rsqrtf(both.x / (float)width + eps), dense_weight);
    sum.scale(rsqrtf(both.y / (float)width + eps), experts_weight);
    other.add(sum);
    other.scale(other.inverse_rms(slots[2], width, eps), weight);
    result.add(other);
#pragma unroll
    for (int j = 0; j < V; ++j) result.v[j] = mul4(result.v[j], factor);
#pragma unroll
    for (int q = 0; q < OWN; ++q) {
      const int j = SPLIT ? part : q;
      if (P::at(j) < n4)
        ((float4*)(out + at))[P::at(j)] = SPLIT ? result.select(part) : result.v[q];
    }
    r = result.inverse_rms(slots[3], width, eps);
  }
  if (!next_norm) return;
  const int blocks = width / 64, group = row / (8 * tiles), m = row % (8 * tiles);
  to += (i64)group * blocks * tiles * ACT_BYTES;
#pragma unroll
  for (int q = 0; q < OWN; ++q) {
    const int i = P::at(SPLIT ? part : q);
    const float4 value = SPLIT ? result.select(part) : result.v[q];
    const float4 by = SPLIT ? next.select(part) : next.v[q];
    QuadOffsets(tiles, m, i, swizzled ? blocks : 0)
        .store(to, mul4(mul4(value, r), by), i < n4, swizzled);
  }
}
