// IQ4_NL in packed order (g4spec/runtime/cuda/weights/packing.py): a value is d * LINEAR_4[code].
#pragma once
#include "gemm_codebook.cuh"

template <int K>
using IQ4NL = Codebook<codebook::IQ4_NL, K>;
