"""Q2_K: mostly Q2_K, with Q3_K and Q4_K where llama.cpp's mix of that name has them."""

from g4spec.quant import get
from g4spec.quant.mix import Mix, Override

MIX = Mix(
    "q2_k",
    get("q2_k"),
    10,
    (
        Override("attn_v.weight", get("q4_k"), "shared by many heads", lambda p: p.gqa >= 4),
        Override("attn_v.weight", get("q3_k")),
        Override("ffn_down", get("q3_k")),
        Override("attn_output.weight", get("q3_k")),
    ),
)
