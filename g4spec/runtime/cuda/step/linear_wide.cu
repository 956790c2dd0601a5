// y = x W^T for more than 16 rows x and quantized W in packed order; one GEMM per launch, which reads W
// once. The kernels of linear.cu, with G groups of 16 rows multiplied by the same dequantized
// weights. Each group adds in the order of linear.cu, so a row has the same bits as there. WGMMA: wgmma
// for all groups instead of mma.sync.
#include "gemm_pipeline.cuh"
#include "formats.cuh"

// y [tokens, N]; with split-K, slices [slices, whole, N] of which this launch writes `tokens` rows.
// `row_groups`: ceil(tokens / 16).
template <class F, int G, int ROWS, int STAGES, bool WGMMA>
__global__ __launch_bounds__(WIDE_THREADS, 1) void linear_wide(
    GEMM_PARAMS, float* y, int n_rows, int slices, int tokens, int whole, int row_groups) {
  extern __shared__ __align__(1024) u8 shared[];
  const int cta = reversed_block_index();
  if (slices) y += (i64)(cta % slices) * whole * n_rows;
  multiply<F, 2, ROWS, STAGES, G, WGMMA>(
      {weights, rows, row_scale, partial, arrived, units, groups, run, slices, row_groups},
      StoreFloat{y, n_rows, n_rows, tokens}, shared, cta);
}

// y = act(gate x) * (up x) as packed activations, act GELU or SiLU.
template <class F, int G, int ROWS, int STAGES, bool WGMMA>
__global__ __launch_bounds__(WIDE_THREADS, 1) void gate_up_wide(
    GEMM_PARAMS, u8* y, int channels, int silu, int tokens, int row_groups) {
  extern __shared__ __align__(1024) u8 shared[];
  multiply<F, 2, ROWS, STAGES, G, WGMMA>(
      {weights, rows, row_scale, partial, arrived, units, groups, run, 0, row_groups},
      StoreGated{y, channels, tokens, silu != 0, true}, shared, reversed_block_index());
}

// Two matrices of different formats times the same rows, concatenated in y. CTAs below `others`
// compute the first.
template <class A, class B, int G, int ROWS_A, int STAGES_A, int ROWS_B, int STAGES_B, bool WGMMA>
__global__ __launch_bounds__(WIDE_THREADS, 1) void linear_two_wide(
    GEMM_PARAMS, const u8* weights_b, int units_b, int groups_b, int run_b, int others, float* y,
    int n_rows, int n_rows_b, int stride, int tokens, int row_groups) {
  extern __shared__ __align__(1024) u8 shared[];
  if (blockIdx.x < others)
    multiply<A, 2, ROWS_A, STAGES_A, G, WGMMA>(
        {weights, rows, row_scale, partial, arrived, units, groups, run, 0, row_groups},
        StoreFloat{y, n_rows, stride, tokens}, shared, others - 1 - blockIdx.x);
  else
    multiply<B, 2, ROWS_B, STAGES_B, G, WGMMA>(
        {weights_b, rows, row_scale, partial + (i64)others * (PARTIAL_BYTES<2, 256> / 4) * G,
         arrived + groups, units_b, groups_b, run_b, 0, row_groups},
        StoreFloat{y + n_rows, n_rows_b, stride, tokens}, shared, reversed_block_index());
}
