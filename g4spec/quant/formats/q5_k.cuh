// Q5_K in packed order (g4spec/runtime/cuda/weights/packing.py): Q4_K with a fifth bit.
#pragma once
#include "q4_k.cuh"

using Q5K = Affine<5>;
