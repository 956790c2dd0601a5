// y = x W^T for 17 to 64 rows x and a quantized W in packed order, one product a launch that reads W
// once. The kernels are those of linear.cu, but what is made of weights is multiplied with G groups of 16
// rows: each of them takes the same sums in the same order, so a row has the bits that it has there.
// WG: warp groups multiply all groups, by so many products for each step of K; 0: warps do.
#include "gemm_pipeline.cuh"
#include "gemm_formats.cuh"

// y [tokens, N] of slices [whole, N], where `slices` is not 0; `row_groups` groups of rows have the
// tokens.
template <class F, int G, int ROWS, int STAGES, int WG>
__global__ __launch_bounds__(WIDE_THREADS, 1) void linear_wide(GEMM_PARAMS, float* y, int n_rows, int slices,
                                                          int tokens, int whole, int row_groups) {
  extern __shared__ __align__(1024) u8 shared[];
  const int cta = reversed_block_index();
  if (slices) y += (i64)(cta % slices) * whole * n_rows;
  multiply<F, 2, ROWS, STAGES, G, WG>(
      {weights, rows, row_scale, partial, arrived, units, groups, run, slices, row_groups},
      StoreFloat{y, n_rows, n_rows, tokens}, shared, cta);
}

// gelu(gate x) or silu(gate x), times up x, as input of the next product
template <class F, int G, int ROWS, int STAGES, int WG>
__global__ __launch_bounds__(WIDE_THREADS, 1) void gate_up_wide(GEMM_PARAMS, u8* y, int channels, int silu,
                                                           int tokens, int row_groups) {
  extern __shared__ __align__(1024) u8 shared[];
  multiply<F, 2, ROWS, STAGES, G, WG>(
      {weights, rows, row_scale, partial, arrived, units, groups, run, 0, row_groups},
      StoreGated{y, channels, tokens, silu != 0, true}, shared, reversed_block_index());
}

// Two products of the same rows, side by side in y: CTAs from `others` on have the second.
template <class A, class B, int G, int ROWS_A, int STAGES_A, int ROWS_B, int STAGES_B,
          int WG>
__global__ __launch_bounds__(WIDE_THREADS, 1) void linear_two_wide(
    GEMM_PARAMS, const u8* weights_b, int units_b, int groups_b, int run_b, int others, float* y,
    int n_rows, int n_rows_b, int stride, int tokens, int row_groups) {
  extern __shared__ __align__(1024) u8 shared[];
  if (blockIdx.x < others)
    multiply<A, 2, ROWS_A, STAGES_A, G, WG>(
        {weights, rows, row_scale, partial, arrived, units, groups, run, 0, row_groups},
        StoreFloat{y, n_rows, stride, tokens}, shared, others - 1 - blockIdx.x);
  else
    multiply<B, 2, ROWS_B, STAGES_B, G, WG>(
        {weights_b, rows, row_scale, partial + (i64)others * (PARTIAL_BYTES<2, 256> / 4) * G, arrived + groups,
         units_b, groups_b, run_b, 0, row_groups},
        StoreFloat{y + n_rows, n_rows_b, stride, tokens}, shared, reversed_block_index());
}
