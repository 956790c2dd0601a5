"""Q4_K_M: mostly Q4_K, with Q6_K where llama.cpp's mix of that name has it."""

from g4spec.quant import get
from g4spec.quant.mix import Mix, Override

SOME = "more bits in some layers"
MIX = Mix(
    "q4_k_m",
    get("q4_k"),
    15,
    (
        Override("attn_v.weight", get("q6_k"), SOME, lambda p: p.more_bits),
        Override("ffn_down", get("q6_k"), SOME, lambda p: p.more_bits),
    ),
)
