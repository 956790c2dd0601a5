"""Q3_K_L: mostly Q3_K, with Q5_K where llama.cpp's mix of that name has it."""

from g4spec.quant import get
from g4spec.quant.mix import Better, Mix

MIX = Mix(
    "q3_k_l",
    get("q3_k"),
    13,
    (
        Better("attn_v.weight", get("q5_k")),
        Better("ffn_down", get("q5_k")),
        Better("attn_output.weight", get("q5_k")),
    ),
)
