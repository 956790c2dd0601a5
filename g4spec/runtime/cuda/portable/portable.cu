// y = x W^T for up to 8 rows x in float32, directly from the file's blocks of W: the GEMV for GPUs
// without the tensor-core path (sm_70, sm_75). It runs on all others too.
//
// A warp computes ROWS rows of W. In each step lane l takes values 8 l .. 8 l + 7 of the next 256
// columns, dequantizes them once, and multiplies them with every row of x. The order of additions
// depends on the number of columns only. W is read once, x once per block.
//
// Also: expert GEMVs (each row with the matrix it chose), and dequantization to half for cuBLAS.
#include "formats.cuh"
#include "half_rows.cuh"

template <class F>
DEVICE i64 row_bytes(int k) {
  return (i64)(k / F::VALUES) * F::BYTES;
}

// Warp sums of ROWS * T values per lane. Each lane returns one of the sums; lanes exchange halves
// of their values, so the number of shuffles is about ROWS * T instead of 5 * ROWS * T. Each sum is
// added in the same order for every ROWS and T.
template <int T, int ROWS>
DEVICE float transpose_reduce(float (&v)[ROWS][T], int lane) {
  float* flat = &v[0][0];
  int step = 16;
#pragma unroll
  for (int n = ROWS * T / 2; n; n /= 2, step /= 2) {
    const bool upper = lane & step;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const float other = __shfl_xor_sync(FULL_MASK, upper ? flat[i] : flat[i + n], step);
      flat[i] = (upper ? flat[i + n] : flat[i]) + other;
    }
  }
#pragma unroll
  for (; step; step /= 2) flat[0] += __shfl_xor_sync(FULL_MASK, flat[0], step);
  return flat[0];
}

// weights: [n_rows][k / F::VALUES * F::BYTES], x: [tokens, k], y: [tokens, n_rows]; tokens <= T,
// k a multiple of 8 and of F::VALUES. Each warp computes ROWS rows.
template <class F, int T, int ROWS>
DEVICE void multiply(const u8* weights, const float* x, float* y, int n_rows, int k, int tokens) {
  const int lane = threadIdx.x % 32;
  const int first = (blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) * ROWS;
  if (first >= n_rows) return;
  float acc[ROWS][T] = {};
#pragma unroll(T == 1 ? 2 : 1)
  for (int at = lane * 8; at < k; at += 256) {
    float w[ROWS][8];
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
      F::values(w[r], weights + min(first + r, n_rows - 1) * row_bytes<F>(k), at);
#pragma unroll
    for (int m = 0; m < T; ++m) {
      const float4* p = (const float4*)(x + (i64)min(m, tokens - 1) * k + at);
      const float4 a = p[0], b = p[1];
      const float v[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
      for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int i = 0; i < 8; ++i) acc[r][m] = fmaf(w[r][i], v[i], acc[r][m]);
    }
  }
  constexpr int SHARE = 32 / (ROWS * T);  // lanes that end with the same sum
  const int i = lane / SHARE, r = i / T, m = i % T;
  const float sum = transpose_reduce(acc, lane);
  if (lane % SHARE == 0 && m < tokens && first + r < n_rows) y[(i64)m * n_rows + first + r] = sum;
}

template <class F, int T, int ROWS>
__global__ __launch_bounds__(32 * PORTABLE_WARPS, 3) void portable(
    const void* weights, const float* x, float* y, int n_rows, int k, int tokens) {
  griddep_launch_dependents();
  griddep_wait();
  multiply<F, T, ROWS>((const u8*)weights, x, y, n_rows, k, tokens);
}

// Row v of y [visits, n_rows]: row v / share of x times matrix ids[v] of the stack `weights`.
// blockIdx.y is v.
template <class F, int ROWS>
__global__ __launch_bounds__(32 * PORTABLE_WARPS, 3) void portable_visits(
    const void* weights, const float* x, const i64* ids, float* y, int n_rows, int k, int share) {
  griddep_launch_dependents();
  griddep_wait();
  const i64 visit = blockIdx.y;
  const u8* matrix = (const u8*)weights + ids[visit] * n_rows * row_bytes<F>(k);
  multiply<F, 1, ROWS>(matrix, x + visit / share * k, y + visit * n_rows, n_rows, k, 1);
}

// Dequantize `count` * 8 values, of rows of k values, to half.
template <class F>
__global__ __launch_bounds__(DEQUANT_THREADS) void portable_halves(
    const u8* weights, u16* out, u32 count, int k) {
  griddep_launch_dependents();
  griddep_wait();
  const u32 i = blockIdx.x * DEQUANT_THREADS + threadIdx.x, row = i / (k / 8);
  if (i >= count) return;
  float w[8];
  F::values(w, weights + row * row_bytes<F>(k), (i - row * (k / 8)) * 8);
  pack_row(out + (i64)i * 8, w);
}
