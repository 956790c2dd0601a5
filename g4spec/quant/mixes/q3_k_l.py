"""Q3_K_L: mostly Q3_K, with Q5_K where llama.cpp's mix of that name has it."""

from g4spec.quant import get
from g4spec.quant.mix import Mix, Override

MIX = Mix(
    "q3_k_l",
    get("q3_k"),
    13,
    (
        Override("attn_v.weight", get("q5_k")),
        Override("ffn_down", get("q5_k")),
        Override("attn_output.weight", get("q5_k")),
    ),
)
