// Q4_0 in packed order (g4spec/runtime/cuda/weights/packing.py): a value is d * (q - 8).
#pragma once
#include "gemm_blocks32.cuh"

template <int K>
using Q40 = Blocks32<K, 4, false>;
