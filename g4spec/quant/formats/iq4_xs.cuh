// IQ4_XS in packed order (g4spec/runtime/cuda/weights/packing.py): a value is d * (scale - 32) *
// LINEAR_4[code].
#pragma once
#include "gemm_codebook.cuh"

using IQ4XS = Codebook<codebook::IQ4_XS>;
