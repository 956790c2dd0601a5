"""IQ4_XS: mostly IQ4_XS, with Q5_K where llama.cpp's mix of that name has it."""

from g4spec.quant import get
from g4spec.quant.mix import Mix, Override

MIX = Mix(
    "iq4_xs",
    get("iq4_xs"),
    30,
    (
        Override("attn_v.weight", get("q5_k"), "shared by many heads", lambda p: p.gqa >= 4),
        Override(
            "ffn_down",
            get("q5_k"),
            "the first eighth, without an imatrix",
            lambda p: p.first_eighth and not p.imatrix,
        ),
    ),
)
