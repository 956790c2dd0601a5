// IQ3_XXS in packed order (g4spec/runtime/cuda/weights/packing.py): codes of 4 bits (held.py), a
// value is d * scale / 4 * table[code].
#pragma once
#include "gemm_codebook.cuh"

using IQ3XXS = Codebook<codebook::IQ3_XXS>;
