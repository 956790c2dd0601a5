"""Type numbers that mean different things in different forks of llama.cpp.

A file does not say which fork wrote it. But a block's size differs from type to type, so the room
that each tensor takes tells which forks' tables fit; one that fits alone is the answer.

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
"""Fork -> type number -> name, values in a block, bytes of a block."""

Place = tuple[str, Sequence[int], int, int]
"""Name, shape, type number and offset of a tensor."""


def sizes(places: Sequence[Place], room: int, alignment: int, where: str) -> dict[str, int]:
    """Bytes of every tensor with a clashing number, if upstream's types fit and no fork's do.

    Args:
        places: all tensors of a file. `room`: bytes of its data section.

    Raises Unsupported, naming the type, when they are a fork's, or may be.
    """
    offsets = sorted({p[3] for p in places} | {room})
    after = dict(pairwise(offsets))
    gaps = [(p, after.get(p[3], room) - p[3]) for p in places if p[2] >= FIRST_CLASHING_TYPE]
    if not gaps:
        return {}
    upstream = _upstream(gaps)
    fitting = {
        fork: first
        for fork, table in {UPSTREAM: upstream, **FORKS}.items()
        if (first := _fits(table, gaps, alignment))
    }
    # Types of the same name and size are the same type, wherever they come from.
    meanings = {name: fork for fork, name in reversed(fitting.items())}
    (name, _, number, _), _ = gaps[0]
    if UPSTREAM in fitting and len({n.removesuffix("_G128") for n in meanings}) == 1:
        return {p[0]: _bytes(p[1], *upstream[p[2]][1:]) for p, _ in gaps}
    told = " or ".join(f"{n} of {fork}" for n, fork in meanings.items())
    raise Unsupported(
        f"{where}: tensor {name!r} has type number {number}",
        found=f"{told}, by its size" if told else "a size that no known type has",
        fix="numbers from 41 on mean different types in different forks of llama.cpp; get the "
        "file in a type below 41",
    )


def _upstream(gaps: Sequence[tuple[Place, int]]) -> Mapping[int, tuple[str, int, int]]:
    table = {}
    for (_, _, number, _), _ in gaps:
        form = quant.find_type(number)
        if form is not None:
            table[number] = (form.name.upper(), form.block, form.block_bytes)
    return table


def _fits(
    table: Mapping[int, tuple[str, int, int]], gaps: Sequence[tuple[Place, int]], alignment: int
) -> str:
    """Name of the first tensor's type, if every tensor has the size that this table gives it."""
    for (_, shape, number, _), gap in gaps:
        if number not in table or (shape[-1] if shape else 1) % table[number][1]:
            return ""
        if not 0 <= gap - _bytes(shape, *table[number][1:]) < alignment:
            return ""
    return table[gaps[0][0][2]][0]


def _bytes(shape: Sequence[int], block: int, block_bytes: int) -> int:
    return prod(shape) // block * block_bytes
