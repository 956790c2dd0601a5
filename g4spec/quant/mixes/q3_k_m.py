"""Q3_K_M: mostly Q3_K, with Q4_K and Q5_K where llama.cpp's mix of that name has them."""

from g4spec.quant import get
from g4spec.quant.mix import Mix, Override

MIX = Mix(
    "q3_k_m",
    get("q3_k"),
    12,
    (
        Override("attn_v.weight", get("q5_k"), "the first two", lambda p: p.index < 2),
        Override("attn_v.weight", get("q4_k")),
        Override("ffn_down", get("q5_k"), "the first sixteenth", lambda p: p.index < p.count // 16),
        Override("ffn_down", get("q4_k")),
        Override("attn_output.weight", get("q4_k")),
    ),
)
