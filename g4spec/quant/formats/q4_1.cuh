// Q4_1 in packed order (g4spec/runtime/cuda/weights/packing.py): a value is d * q + m.
#pragma once
#include "gemm_blocks32.cuh"

template <int K>
using Q41 = Blocks32<K, 4, true>;
