// Dequantization of packed weights (g4spec/runtime/cuda/weights/packing.py) to 16-bit floats [N,
// K], for cuBLAS in prefill. Values are computed in float32 and rounded once.
//
// One CTA per unit of 128 rows; one warp per tile of 16 rows. Lane 4 g + t handles rows g and g +
// 8, columns 4 t .. 4 t + 3 of each k16 step, so a warp's store fills a 32-byte sector in each of
// eight rows.
#include "formats.cuh"
#include "half_rows.cuh"

static_assert(DEQUANT_THREADS / 32 * 16 == PACK_ROWS, "a warp dequantizes 16 rows");

// `packed`: matrices of `groups` groups of 128 rows, the first `rows` of which are used. Grid:
// (units of K, groups of all matrices). out: [matrices * rows, K].
template <class F, class T>
__global__ void __launch_bounds__(DEQUANT_THREADS)
dequant(const u8* packed, u16* out, int rows, int groups) {
  griddep_launch_dependents();
  const int tile = threadIdx.x / 32, lane = threadIdx.x % 32, k = gridDim.x * F::UNIT;
  const int matrix = blockIdx.y / groups,
            first = blockIdx.y % groups * PACK_ROWS + tile * 16 + lane / 4;
  griddep_wait();
  const F f(packed + ((i64)blockIdx.y * gridDim.x + blockIdx.x) * F::BYTES, tile, lane);
  u16* to = out + ((i64)matrix * rows + first) * k + blockIdx.x * F::UNIT + lane % 4 * 4;
#pragma unroll
  for (int k64 = 0; k64 < F::UNIT / 64; ++k64) {
    Values v;
    f.values(k64, v);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (first + r * 8 >= rows) continue;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint2 w = {T::pack(v[r][j][0], v[r][j][1]), T::pack(v[r][j][2], v[r][j][3])};
        __stcs((uint2*)(to + (i64)r * 8 * k + k64 * 64 + j * 16), w);
      }
    }
  }
}
