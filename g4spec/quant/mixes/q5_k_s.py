"""Q5_K_S: Q5_K, as llama.cpp's mix of that name."""

from g4spec.quant import get
from g4spec.quant.mix import Mix

MIX = Mix("q5_k_s", get("q5_k"), 16)
