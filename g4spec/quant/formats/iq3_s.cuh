// IQ3_S in packed order (g4spec/runtime/cuda/weights/packing.py): codes of 4 bits (held.py), a
// value is d * scale * table[code].
#pragma once
#include "gemm_codebook.cuh"

using IQ3S = Codebook<codebook::IQ3_S>;
