// Activation functions. Each exists once per kind of kernel, which rounds in its own way: a row must
// have the same bits wherever it is computed, so a kernel cannot take another's.
#pragma once
#include "math.cuh"

// Steps, in kernels after a GEMM (elementwise.cu) and in those of experts.
DEVICE float gelu(float x) {
  const float inner = 0.7978845608028654f * (x + 0.044715f * (x * x * x));
  return 0.5f * x * (1.0f + tanhf(inner));
}
DEVICE float silu(float x) { return __fdiv_rn(x, 1.0f + expf(-x)); }

// Prefill.
DEVICE float gelu_by_exp(float x) {
  const float inner = 0.7978845608028654f * (x + 0.044715f * (x * x * x));
  return x / (1.0f + __expf(-2.0f * inner));  // = 0.5 x (1 + tanh(inner))
}

// Steps, in the epilogue of a GEMM: x * sigmoid(y), in approximate instructions. SiLU for y = x, GELU
// for y = gelu_sigmoid_arg(x).
DEVICE float times_sigmoid(float x, float y) {
  return x * rcp_approx(1.0f + exp2_approx(y * -LOG2E));
}
DEVICE float gelu_sigmoid_arg(float x) {
  return 1.5957691216057308f * (x + 0.044715f * (x * x * x));
}
