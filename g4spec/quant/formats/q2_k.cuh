// Q2_K in packed order (g4spec/runtime/cuda/weights/packing.py): a value is d * scale * code - dmin
// * minimum.
#pragma once
#include "gemm_codebook.cuh"

using Q2K = Codebook<codebook::Q2_K>;
