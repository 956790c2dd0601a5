// Q5_0 in packed order (g4spec/runtime/cuda/weights/packing.py): a value is d * (q - 16).
#pragma once
#include "gemm_blocks32.cuh"

template <int K>
using Q50 = Blocks32<K, 5, false>;
