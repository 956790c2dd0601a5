// y = x W^T for 1 to 16 rows x and a quantized W in packed order, one product a launch. One warp
// feeds a ring of stages in shared memory, the others multiply (see consume.cuh).
#include "linear.cuh"
#include "q4_0.cuh"
#include "q4_1.cuh"
#include "q4_k.cuh"
#include "q5_0.cuh"
#include "q5_1.cuh"
#include "q5_k.cuh"
#include "q6_k.cuh"
#include "q8_0.cuh"

// y [T, N], or its partial sums [slices, T, N]
template <class F, int NT, int ROWS, int STAGES>
__global__ __launch_bounds__(THREADS, 1) void linear(WORK, float* y, int n_rows, int slices,
                                                     int tokens) {
  extern __shared__ __align__(128) u8 shared[];
  const int cta = last_first();
  if (slices) y += (i64)(cta % slices) * tokens * n_rows;
  multiply<F, NT, ROWS, STAGES>(
      {weights, rows, row_scale, partial, arrived, units, groups, run, slices},
      Plain{y, n_rows, n_rows, tokens}, shared, cta);
}

// gelu(gate x) or silu(gate x), times up x, as input of the next product
template <class F, int NT, int ROWS, int STAGES>
__global__ __launch_bounds__(THREADS, 1) void gate_up(WORK, u8* y, int channels, int silu,
                                                      int tokens) {
  extern __shared__ __align__(128) u8 shared[];
  multiply<F, NT, ROWS, STAGES>({weights, rows, row_scale, partial, arrived, units, groups, run, 0},
                                Gated{y, channels, tokens, silu != 0}, shared, last_first());
}

// Two products of the same rows, side by side in y: CTAs from `others` on have the second.
template <class A, class B, int NT, int ROWS_A, int STAGES_A, int ROWS_B, int STAGES_B>
__global__ __launch_bounds__(THREADS, 1) void linear_two(
    WORK, const u8* weights_b, int units_b, int groups_b, int run_b, int others, float* y,
    int n_rows, int n_rows_b, int stride, int tokens) {
  extern __shared__ __align__(128) u8 shared[];
  if (blockIdx.x < others)
    multiply<A, NT, ROWS_A, STAGES_A>(
        {weights, rows, row_scale, partial, arrived, units, groups, run, 0},
        Plain{y, n_rows, stride, tokens}, shared, others - 1 - blockIdx.x);
  else
    multiply<B, NT, ROWS_B, STAGES_B>(
        {weights_b, rows, row_scale, partial + (i64)others * LEFT<2, 256> / 4, arrived + groups,
         units_b, groups_b, run_b, 0},
        Plain{y + n_rows, n_rows_b, stride, tokens}, shared, last_first());
}
