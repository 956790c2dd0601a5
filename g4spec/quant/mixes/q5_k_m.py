"""Q5_K_M: mostly Q5_K, with Q6_K where llama.cpp's mix of that name has it."""

from g4spec.quant import get
from g4spec.quant.policy import Mix

MIX = Mix("q5_k_m", get("q5_k"), 17, get("q6_k"))
