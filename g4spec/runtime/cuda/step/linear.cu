// y = x W^T for 1 to 16 rows x and quantized W in packed order. One GEMM per launch (`linear_two`:
// two). A producer warp feeds a ring of stages in shared memory (gemm_pipeline.cuh), eight consumer
// warps multiply (gemm_consumer.cuh). F: weight format; NT: tiles of 8 rows of x; ROWS: weight rows
// per stage.
#include "gemm_pipeline.cuh"
#include "formats.cuh"

// y [T, N], or with split-K partial sums [slices, T, N].
template <class F, int NT, int ROWS, int STAGES>
__global__ __launch_bounds__(GEMM_THREADS, 1) void linear(
    GEMM_PARAMS, float* y, int n_rows, int slices, int tokens) {
  extern __shared__ __align__(128) u8 shared[];
  const int cta = reversed_block_index();
  if (slices) y += (i64)(cta % slices) * tokens * n_rows;
  multiply<F, NT, ROWS, STAGES>(
      {weights, rows, row_scale, partial, arrived, units, groups, run, slices},
      StoreFloat{y, n_rows, n_rows, tokens}, shared, cta);
}

// y = act(gate x) * (up x) as packed activations, act GELU or SiLU.
template <class F, int NT, int ROWS, int STAGES>
__global__ __launch_bounds__(GEMM_THREADS, 1) void gate_up(
    GEMM_PARAMS, u8* y, int channels, int silu, int tokens) {
  extern __shared__ __align__(128) u8 shared[];
  multiply<F, NT, ROWS, STAGES>({weights, rows, row_scale, partial, arrived, units, groups, run, 0},
                                StoreGated{y, channels, tokens, silu != 0, false}, shared,
                                reversed_block_index());
}

// Two matrices of different formats times the same rows, concatenated in y. CTAs below `others`
// compute the first.
template <class A, class B, int NT, int ROWS_A, int STAGES_A, int ROWS_B, int STAGES_B>
__global__ __launch_bounds__(GEMM_THREADS, 1) void linear_two(
    GEMM_PARAMS, const u8* weights_b, int units_b, int groups_b, int run_b, int others, float* y,
    int n_rows, int n_rows_b, int stride, int tokens) {
  extern __shared__ __align__(128) u8 shared[];
  if (blockIdx.x < others)
    multiply<A, NT, ROWS_A, STAGES_A>(
        {weights, rows, row_scale, partial, arrived, units, groups, run, 0},
        StoreFloat{y, n_rows, stride, tokens}, shared, others - 1 - blockIdx.x);
  else
    multiply<B, NT, ROWS_B, STAGES_B>(
        {weights_b, rows, row_scale, partial + (i64)others * PARTIAL_BYTES<2, 256> / 4,
         arrived + groups, units_b, groups_b, run_b, 0},
        StoreFloat{y + n_rows, n_rows_b, stride, tokens}, shared, reversed_block_index());
}
