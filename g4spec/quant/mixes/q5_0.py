"""Q5_0; with an imatrix Q5_1 where llama.cpp's mix of that name has it."""

from g4spec.quant import get
from g4spec.quant.mix import Mix, Override

MIX = Mix(
    "q5_0",
    get("q5_0"),
    get("q5_0").file_type,
    (
        Override(
            "ffn_down",
            get("q5_1"),
            "the first eighth, with an imatrix",
            lambda p: p.first_eighth and p.imatrix,
        ),
    ),
)
