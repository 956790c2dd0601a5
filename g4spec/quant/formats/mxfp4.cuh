// MXFP4 in packed order (g4spec/runtime/cuda/weights/packing.py): a value is 2 ** (e - 128) *
// E2M1[code].
#pragma once
#include "gemm_codebook.cuh"

template <int K>
using MXFP4 = Codebook<codebook::MXFP4, K>;
