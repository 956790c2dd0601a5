// Two-pass LM head (screen.py): a GEMM with the upper bits of the codes selects candidate columns;
// these kernels quantize its activations to int8, pick the candidates, and recompute their logits
// in full.
#include "formats.cuh"
#include "logits.cuh"
#include "packed_rows.cuh"
#include "reduce.cuh"

DEVICE u32 bytes(float a, float b, float c, float d) {
  return pack_s8x4((int)rintf(a), (int)rintf(b), (int)rintf(c), (int)rintf(d));
}

// Quantize x [rows, 256 * units] to int8 with one scale per row and unit of 256 columns; padding
// rows are zero. Grid [units, tiles of 8 rows], one warp per row.
__global__ __launch_bounds__(LOGIT_THREADS) void byte_rows(const float* x, int rows, u8* out) {
  griddep_launch_dependents();
  const int m = blockIdx.y * 8 + threadIdx.x / 32, lane = threadIdx.x % 32, tiles = gridDim.y;
  const int k32 = lane / 4, t = lane % 4, at = m % 8 * 4 + t;
  const float4* from = (const float4*)x + ((i64)m * gridDim.x + blockIdx.x) * 64 + k32 * 8 + t;
  u8* unit = out + blockIdx.x * (BYTE_ROWS * tiles);
  griddep_wait();
  float4 even = {}, odd = {};  // the even and the odd group of 16 columns
  if (m < rows) even = __ldcg(from), odd = __ldcg(from + 4);
  const float most = warp_reduce(fmaxf(largest4(even), largest4(odd)), MaxNan());
  const float inverse = most > 0.0f ? 127.0f / most : 0.0f;
  even = mul4(even, inverse), odd = mul4(odd, inverse);
  *(uint2*)(unit + (tiles == 1 ? (k32 / 2 * 32 + at) * 16 + k32 % 2 * 8
                               : (k32 * 32 + at) * 16 + m / 8 * 8)) = {
      bytes(odd.x, even.x, odd.z, even.z), bytes(odd.y, even.y, odd.w, even.w)};
  if (lane == 0) ((float*)(unit + BYTE_SCALES * tiles))[m] = most / 127.0f;
}

// The N largest of each row's keys [rows, found], sorted, padded with 0. One block per row.
template <int N>
__global__ __launch_bounds__(LOGIT_THREADS) void largest(const u64* keys, int found, u64* out) {
  griddep_launch_dependents();
  __shared__ u64 list[N * SCREEN_KEYS], best[N];
  __shared__ int count;
  if (threadIdx.x < N) best[threadIdx.x] = 0;
  griddep_wait();
  u64 mine[SCREEN_KEYS];
#pragma unroll
  for (int i = 0; i < SCREEN_KEYS; ++i) {
    const int at = i * LOGIT_THREADS + threadIdx.x;
    mine[i] = at < found ? __ldcg(keys + (i64)blockIdx.x * found + at) : 0;
  }
  sort_top_k(list, collect_candidates(mine, N, list, &count), N, best);
  __syncthreads();
  if (threadIdx.x < N) out[blockIdx.x * N + threadIdx.x] = best[threadIdx.x];
}

// Recompute the logits of the candidate columns keys [rows, N] exactly, as x [rows, width] times
// rows of the packed matrix `table`, and write their new keys. Grid [N, rows].
template <class F, int UNIT>
__global__ __launch_bounds__(LOGIT_THREADS) void in_full(
    const u64* keys, const u8* table, const float* x, int width, int unit_bytes, float cap,
    u64* out) {
  griddep_launch_dependents();
  __shared__ float slots[LOGIT_THREADS / 32];
  const int units = width / UNIT, k = threadIdx.x % 32 * 4,
            at = blockIdx.y * gridDim.x + blockIdx.x;
  x += (i64)blockIdx.y * width;
  griddep_wait();
  u64 key = __ldcg(keys + at);
  const int id = column_of(key);
  const bool any = key && value_of(key) != NEG_INF;
  float sum = 0;
#pragma unroll 3
  for (int u = threadIdx.x / 32; any && u < units; u += LOGIT_THREADS / 32)
#pragma unroll
    for (int i = k; i < UNIT; i += 128) {
      const u8* unit = table + ((i64)(id / 128) * units + u) * unit_bytes;
      const float4 w = F::packed({unit, UNIT, id % 128, i});
      const float4 v = __ldcg((const float4*)(x + u * UNIT + i));
      sum += (w.x * v.x + w.y * v.y) + (w.z * v.z + w.w * v.w);
    }
  sum = block_reduce<LOGIT_THREADS / 32>(sum, slots, Sum());
  const Logits logits{nullptr, nullptr, nullptr, 0, 0, cap};
  if (threadIdx.x == 0) out[at] = any ? make_key(logits.value(sum), id) : key;
}
