// IQ1_M in packed order (g4spec/runtime/cuda/weights/packing.py): codes of 3 bits (held.py), a
// value is d * scale / 8 * table[code].
#pragma once
#include "gemm_codebook.cuh"

using IQ1M = Codebook<codebook::IQ1_M>;
