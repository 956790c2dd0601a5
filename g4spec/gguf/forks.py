"""ggml type numbers that mean different types in different forks of llama.cpp.

A file does not say which fork wrote it. But block sizes differ between types, so the sizes of a
file's tensors show which tables of type numbers are possible. The type is known if only one is.

Source: the `ggml_type` tables of upstream (late 2026) and of the forks named here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod

from g4spec import quant
from g4spec.errors import Unsupported
from g4spec.quant import FIRST_CLASHING_TYPE

UPSTREAM = "llama.cpp"
_TURBO = {"TURBO2_0": (128, 34), "TURBO3_0": (128, 50), "TURBO4_0": (128, 66)}
_Q1 = ("Q1_0", 128, 18)
_TQ3, _TQ4 = ("TQ3_1S", 32, 16), ("TQ4_1S", 32, 20)


def _turbo(first: int, *names: str) -> dict[int, tuple[str, int, int]]:
    return {first + i: (name, *_TURBO[name]) for i, name in enumerate(names)}


FORKS: dict[str, dict[int, tuple[str, int, int]]] = {
    "lucebox": {41: _Q1, 42: ("TQ3_0", 32, 14)},
    "beellama": {
        **_turbo(42, "TURBO3_0", "TURBO4_0", "TURBO2_0"),
        45: ("TURBO3_TCQ", 128, 52),
        46: ("TURBO2_TCQ", 128, 36),
    },
    "TheTom's first": {
        **_turbo(41, "TURBO3_0", "TURBO4_0", "TURBO2_0"),
        44: _TQ3,
        45: _TQ4,
        46: _Q1,
    },
    "TheTom's second": {
        41: _Q1,
        **_turbo(42, "TURBO2_0", "TURBO3_0", "TURBO4_0"),
        45: _TQ3,
        46: _TQ4,
    },
    "TheTom's third": {
        **_turbo(43, "TURBO2_0", "TURBO3_0"),
        45: _TQ3,
        46: _TQ4,
        **_turbo(47, "TURBO4_0"),
    },
    "turbo-tan's": {41: ("TQ3_0", 32, 14), 44: _TQ3, 46: ("TQ3_4S", 32, 16)},
    "ik_llama.cpp": {41: ("Q1_0_G128", 128, 18)},
}
"""Fork -> type number -> (name, values per block, bytes per block)."""

_OWN = """
97:Q8_0_X4 98:Q8_1_X4 99:Q8_2_X4 133:Q6_0 134:IQ1_BN 135:IQ2_BN 136:Q8_K64 137:IQ2_K 138:IQ3_K
139:IQ4_K 140:IQ5_K 141:IQ6_K 142:IQ2_TN 143:IQ1_TN 144:IQ4_KS 145:IQ2_KS 146:IQ4_KSS 147:Q8_K16
148:Q8_K32 149:Q8_KR8 150:Q8_K128 151:Q8_KV 152:IQ5_KS 153:IQ2_KT 154:IQ3_KT 155:IQ4_KT
156:IQ3_KS 157:IQ2_KL 158:IQ1_KT 202:Q4_0_R8 206:Q5_0_R4 208:Q8_0_R8 210:Q2_K_R4 211:Q3_K_R4
212:Q4_K_R4 213:Q5_K_R4 214:Q6_K_R4 216:IQ2_XXS_R4 217:IQ2_XS_R4 218:IQ3_XXS_R4 219:IQ1_S_R4
220:IQ4_NL_R4 221:IQ3_S_R4 222:IQ2_S_R4 223:IQ4_XS_R8 229:IQ1_M_R4 230:BF16_R16 233:Q6_0_R4
335:IQ2_BN_R4 337:IQ2_K_R4 338:IQ3_K_R4 339:IQ4_K_R4 340:IQ5_K_R4 344:IQ4_KS_R4 352:IQ5_KS_R4
353:MXFP4_R8 397:Q8_K_R16 398:Q8_KV_R8 399:Q8_K_R8
"""
IK_TYPES = {int(n): name for n, _, name in (entry.partition(":") for entry in _OWN.split())}
"""Type numbers that only ik_llama.cpp has -> names; those with R and a number at the end are
repacked, for CPUs."""

TensorEntry = tuple[str, Sequence[int], int, int]
"""Name, shape, type number and offset of a tensor."""


def tensor_sizes(
    tensors: Sequence[TensorEntry], data_size: int, alignment: int, where: str
) -> dict[str, int]:
    """Return name -> bytes of the tensors with a clashing type number if only upstream's types fit.

    Args:
        tensors: all tensors of a file.
        data_size: bytes of its data section.
        where: description of the file for the error.

    Raises Unsupported, naming the possible types, if types of a fork fit.
    """
    offsets = sorted({t[3] for t in tensors} | {data_size})
    after = dict(pairwise(offsets))
    gaps = [(t, after.get(t[3], data_size) - t[3]) for t in tensors if t[2] >= FIRST_CLASHING_TYPE]
    if not gaps:
        return {}
    upstream = _upstream(gaps)
    fitting = {
        fork: first
        for fork, table in {UPSTREAM: upstream, **FORKS}.items()
        if (first := _fits(table, gaps, alignment))
    }
    # Types of the same name and size are the same type in all forks.
    meanings = {name: fork for fork, name in reversed(fitting.items())}
    (name, _, number, _), _ = gaps[0]
    if UPSTREAM in fitting and len({n.removesuffix("_G128") for n in meanings}) == 1:
        return {p[0]: _bytes(p[1], *upstream[p[2]][1:]) for p, _ in gaps}
    candidates = " or ".join(f"{n} of {fork}" for n, fork in meanings.items())
    found = f"{candidates}, by its size" if candidates else "a size that no known type has"
    if own := next(((n, t) for (n, _, t, _), _ in gaps if t in IK_TYPES), None):
        (name, number), found = own, f"{IK_TYPES[own[1]]} of ik_llama.cpp"
    raise Unsupported(
        f"{where}: tensor {name!r} has type number {number}",
        found=found,
        fix="type numbers from 41 on differ between forks of llama.cpp; use a file with types "
        "below 41, such as Q4_K_M",
    )


def _upstream(gaps: Sequence[tuple[TensorEntry, int]]) -> Mapping[int, tuple[str, int, int]]:
    table = {}
    for (_, _, number, _), _ in gaps:
        form = quant.find_type(number)
        if form is not None:
            table[number] = (form.name.upper(), form.block, form.block_bytes)
    return table


def _fits(
    table: Mapping[int, tuple[str, int, int]],
    gaps: Sequence[tuple[TensorEntry, int]],
    alignment: int,
) -> str:
    """Return the type of the first tensor if this table fits the sizes of all tensors, else ""."""
    for (_, shape, number, _), gap in gaps:
        if number not in table or (shape[-1] if shape else 1) % table[number][1]:
            return ""
        if not 0 <= gap - _bytes(shape, *table[number][1:]) < alignment:
            return ""
    return table[gaps[0][0][2]][0]


def _bytes(shape: Sequence[int], block: int, block_bytes: int) -> int:
    return prod(shape) // block * block_bytes
