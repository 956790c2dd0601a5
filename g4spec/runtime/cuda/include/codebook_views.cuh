// All views of table-coded types, for their files in g4spec/quant/formats/.
#pragma once
#include "fragments.cuh"
#include "gemm_codebook.cuh"
#include "quads.cuh"
#include "raw_values.cuh"
