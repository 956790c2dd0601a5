"""Block sizes of the ggml types that this package cannot decode, to compute sizes of tensors.

Source: ggml `ggml.c` type table of late 2026. Forks give the numbers from 41 on other meanings.
"""

from g4spec.quant.format import Format

FIRST_CLASHING_TYPE = 41
"""First type number that has different meanings in forks of llama.cpp."""

_BLOCKS = (
    ("q8_1", 9, 32, 36, None),
    ("q8_k", 15, 256, 292, None),
    ("q1_0", 41, 128, 18, 40),
    ("q2_0", 42, 64, 18, 41),
)
_NUMBERS = (
    ("i8", 24, "<i1"),
    ("i16", 25, "<i2"),
    ("i32", 26, "<i4"),
    ("i64", 27, "<i8"),
    ("f64", 28, "<f8"),
)

REMOVED = {
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}
"""Types that upstream no longer has in files: rows repacked for CPUs."""

FORMATS = tuple(Format(*row) for row in _BLOCKS) + tuple(
    Format(name, type=number, block=1, block_bytes=int(dtype[2]), stored=dtype)
    for name, number, dtype in _NUMBERS
)
