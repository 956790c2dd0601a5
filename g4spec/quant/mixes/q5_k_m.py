"""Q5_K_M: mostly Q5_K, with Q6_K for the tensors for which llama.cpp's mix of that name uses it."""

from g4spec.quant import get
from g4spec.quant.mix import Mix, Override

SOME = "more bits in some layers"
MIX = Mix(
    "q5_k_m",
    get("q5_k"),
    17,
    (
        Override("attn_v.weight", get("q6_k"), SOME, lambda p: p.more_bits),
        Override("ffn_down", get("q6_k"), SOME, lambda p: p.more_bits),
    ),
)
