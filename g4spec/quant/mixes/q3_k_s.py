"""Q3_K_S: Q3_K, as llama.cpp's mix of that name."""

from g4spec.quant import get
from g4spec.quant.mix import Mix

MIX = Mix("q3_k_s", get("q3_k"), 11)
