// All quant types. The file of a type X (g4spec/quant/formats/) defines its four views, or the file
// of its family in this folder does:
//   X or X<UNIT>   MMA operands of a GEMM (gemm_tile.cuh)
//   raw::X         eight values of a block before packing (raw_values.cuh): portable.cu
//   quad::X        four values of a block or of a packed unit (quads.cuh): embed.cu, screen.cu
//   fragment::X    a lane's 16-bit values of a packed unit (fragments.cuh): dequant.cu
// In packed order (g4spec/runtime/cuda/weights/packing.py) units may have several sizes: UNIT.
#pragma once
#include "iq1_m.cuh"
#include "iq1_s.cuh"
#include "iq2_s.cuh"
#include "iq2_xs.cuh"
#include "iq2_xxs.cuh"
#include "iq3_s.cuh"
#include "iq3_xxs.cuh"
#include "iq4_nl.cuh"
#include "iq4_xs.cuh"
#include "mxfp4.cuh"
#include "nvfp4.cuh"
#include "q2_k.cuh"
#include "q3_k.cuh"
#include "q4_0.cuh"
#include "q4_1.cuh"
#include "q4_k.cuh"
#include "q5_0.cuh"
#include "q5_1.cuh"
#include "q5_k.cuh"
#include "q6_k.cuh"
#include "q8_0.cuh"
#include "tq1_0.cuh"
#include "tq2_0.cuh"
