"""Q3_K_M: mostly Q3_K, with Q4_K and Q5_K where llama.cpp's mix of that name has them."""

from g4spec.quant import get
from g4spec.quant.mix import Better, Mix

MIX = Mix(
    "q3_k_m",
    get("q3_k"),
    12,
    (
        Better("attn_v.weight", get("q5_k"), "the first two", lambda p: p.i < 2),
        Better("attn_v.weight", get("q4_k")),
        Better("ffn_down", get("q5_k"), "the first sixteenth", lambda p: p.i < p.n // 16),
        Better("ffn_down", get("q4_k")),
        Better("attn_output.weight", get("q4_k")),
    ),
)
