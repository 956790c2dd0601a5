// y = x W^T for 17 to 64 rows x and a quantized W in packed order, one product a launch that reads W
// once. The kernels are those of linear.cu, but what is made of weights is multiplied with G groups of 16
// rows: each of them takes the same sums in the same order, so a row has the bits that it has there.
#include "linear.cuh"
#include "q4_0.cuh"
#include "q4_1.cuh"
#include "q4_k.cuh"
#include "q5_0.cuh"
#include "q5_1.cuh"
#include "q5_k.cuh"
#include "q6_k.cuh"
#include "q8_0.cuh"

// y [tokens, N] of slices [whole, N], where `slices` is not 0; `row_groups` groups of rows have the
// tokens.
template <class F, int G, int ROWS, int STAGES>
__global__ __launch_bounds__(WIDE_THREADS, 1) void linear_wide(WORK, float* y, int n_rows, int slices,
                                                          int tokens, int whole, int row_groups) {
  extern __shared__ __align__(128) u8 shared[];
  const int cta = last_first();
  if (slices) y += (i64)(cta % slices) * whole * n_rows;
  multiply<F, 2, ROWS, STAGES, G>(
      {weights, rows, row_scale, partial, arrived, units, groups, run, slices, row_groups},
      Plain{y, n_rows, n_rows, tokens}, shared, cta);
}

// gelu(gate x) or silu(gate x), times up x, as input of the next product
template <class F, int G, int ROWS, int STAGES>
__global__ __launch_bounds__(WIDE_THREADS, 1) void gate_up_wide(WORK, u8* y, int channels, int silu,
                                                           int tokens, int row_groups) {
  extern __shared__ __align__(128) u8 shared[];
  multiply<F, 2, ROWS, STAGES, G>(
      {weights, rows, row_scale, partial, arrived, units, groups, run, 0, row_groups},
      Gated{y, channels, tokens, silu != 0}, shared, last_first());
}

// Two products of the same rows, side by side in y: CTAs from `others` on have the second.
template <class A, class B, int G, int ROWS_A, int STAGES_A, int ROWS_B, int STAGES_B>
__global__ __launch_bounds__(WIDE_THREADS, 1) void linear_two_wide(
    WORK, const u8* weights_b, int units_b, int groups_b, int run_b, int others, float* y,
    int n_rows, int n_rows_b, int stride, int tokens, int row_groups) {
  extern __shared__ __align__(128) u8 shared[];
  if (blockIdx.x < others)
    multiply<A, 2, ROWS_A, STAGES_A, G>(
        {weights, rows, row_scale, partial, arrived, units, groups, run, 0, row_groups},
        Plain{y, n_rows, stride, tokens}, shared, others - 1 - blockIdx.x);
  else
    multiply<B, 2, ROWS_B, STAGES_B, G>(
        {weights_b, rows, row_scale, partial + (i64)others * (LEFT<2, 256> / 4) * G, arrived + groups,
         units_b, groups_b, run_b, 0, row_groups},
        Plain{y + n_rows, n_rows_b, stride, tokens}, shared, last_first());
}
