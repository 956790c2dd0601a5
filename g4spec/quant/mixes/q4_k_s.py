"""Q4_K_S: mostly Q4_K, with Q5_K where llama.cpp's mix of that name has it."""

from g4spec.quant import get
from g4spec.quant.mix import Mix, Override

MIX = Mix(
    "q4_k_s",
    get("q4_k"),
    14,
    (
        Override("attn_v.weight", get("q5_k"), "the first four", lambda p: p.index < 4),
        Override("ffn_down", get("q5_k"), "the first eighth", lambda p: p.first_eighth),
    ),
)
