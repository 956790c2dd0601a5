// Embedding lookup: dequantized rows of a token table, as stored in the file or packed. A thread
// produces four consecutive values; blockIdx.y is the token.
#include "formats.cuh"

// Rows ids [T] of a table in the file's block layout, times `scale` -> out [T, width].
template <class F>
__global__ void embed(const u8* table, const i64* ids, float* out, int width, float scale) {
  griddep_launch_dependents();
  griddep_wait();
  const int k = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
  if (k >= width) return;
  const i64 block = ids[blockIdx.y] * (width / F::BLOCK) + k / F::BLOCK;
  const float4 v = F::raw(table + block * F::BYTES, k % F::BLOCK);
  ((float4*)out)[((i64)blockIdx.y * width + k) / 4] = {
      __fmul_rn(v.x, scale), __fmul_rn(v.y, scale), __fmul_rn(v.z, scale), __fmul_rn(v.w, scale)};
}

// The same for a packed table with units of `columns` columns.
template <class F>
__global__ void embed_packed(const u8* table, const i64* ids, float* out, int width, float scale,
                             int columns, int unit_bytes) {
  griddep_launch_dependents();
  griddep_wait();
  const int k = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
  if (k >= width) return;
  const i64 id = ids[blockIdx.y], unit = id / PACK_ROWS * (width / columns) + k / columns;
  const float4 v =
      F::packed({table + unit * unit_bytes, columns, (int)(id % PACK_ROWS), k % columns});
  ((float4*)out)[((i64)blockIdx.y * width + k) / 4] = {
      __fmul_rn(v.x, scale), __fmul_rn(v.y, scale), __fmul_rn(v.z, scale), __fmul_rn(v.w, scale)};
}
