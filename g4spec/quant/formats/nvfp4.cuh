// NVFP4 in packed order (g4spec/runtime/cuda/weights/packing.py): a value is scale / 2 *
// E2M1[code].
#pragma once
#include "gemm_codebook.cuh"

template <int K>
using NVFP4 = Codebook<codebook::NVFP4, K>;
