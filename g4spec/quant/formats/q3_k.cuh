// Q3_K in packed order (g4spec/runtime/cuda/weights/packing.py): a value is d * scale * (code - 4).
#pragma once
#include "gemm_codebook.cuh"

using Q3K = Codebook<codebook::Q3_K>;
