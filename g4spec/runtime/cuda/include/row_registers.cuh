// A row of float32 values in the registers of a block, for norm.cu and experts_finish.cu.
#pragma once
#include "reduce.cuh"

// A row in the registers of a block: element e of v[j] is value 4 at(j) + e. WHOLE: the row has
// exactly as many values as the block holds, so there are no bounds checks.
template <int WARPS, int V, bool WHOLE>
struct RowRegisters {
  float4 v[V];

  static DEVICE int at(int j) { return j * 32 * WARPS + threadIdx.x; }
  static DEVICE bool valid(int j, int n4) { return WHOLE || at(j) < n4; }
  DEVICE void load(const float* p, int n4) {
#pragma unroll
    for (int j = 0; j < V; ++j)
      v[j] = valid(j, n4) ? __ldcg((const float4*)p + at(j)) : float4{0, 0, 0, 0};
  }
  // v[part] without dynamic indexing, which would need local memory.
  DEVICE float4 select(int part) const {
    float4 own = v[0];
#pragma unroll
    for (int j = 1; j < V; ++j)
      if (part == j) own = v[j];
    return own;
  }
  DEVICE float squares() const {
    float s = 0;
#pragma unroll
    for (int j = 0; j < V; ++j) s += square4(v[j]);
    return s;
  }
};
