"""Stack experts that a checkpoint stores as separate 2-D tensors, as quantizing tools write them.

The results are the 3-D tensors of the model, with gate rows before up rows. They are read lazily:
no more than a block of rows is in memory. Files by llama.cpp may have gate and up rows apart.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, islice
from math import prod

import numpy as np

from g4spec import quant
from g4spec.convert.tensors import LazyTensor, StoredTensor
from g4spec.errors import InputError
from g4spec.quant.format import Bytes

EXPERT = re.compile(r"(.*\.experts)\.(\d{1,9})\.(gate|up|down)_proj\.weight")
HALF = re.compile(r"(.*\.experts\.|.*\.ffn_)(gate|up)(_proj|_exps\.weight)")
"""Name of gate or up projections alone, in a checkpoint or a GGUF."""


def stacked(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Replace `experts.N.{gate,up,down}_proj.weight` by `experts.gate_up_proj` and
    `experts.down_proj`. Raises InputError if an expert is missing."""
    out = dict(tensors)
    found: dict[str, dict[tuple[int, str], str]] = {}
    for name in tensors:
        if match := EXPERT.fullmatch(name):
            found.setdefault(match[1], {})[int(match[2]), match[3]] = name
    for base, names in found.items():
        count = 1 + max(i for i, _ in names)
        for result, halves in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
            # A hostile name may have a number of billions: stop at the first that are missing.
            wanted = ((i, half) for i in range(count) for half in halves)
            absent = (key for key in wanted if key not in names)
            missing = [f"{base}.{i}.{half}_proj" for i, half in islice(absent, 8)]
            if missing:
                raise InputError(f"{base}: experts are missing", found=missing)
            parts = [out.pop(names[i, half]) for i in range(count) for half in halves]
            out[f"{base}.{result}"] = _joined(f"{base}.{result}", parts, count)
    return out


def fused_name(name: str) -> str:
    """Return the name of the tensor that may hold gate or up projections `name`, "" for others."""
    found = HALF.fullmatch(name)
    return f"{found[1]}gate_up{found[3]}" if found else ""


def half(name: str, fused: StoredTensor) -> StoredTensor | None:
    """Return the gate or up projections `name` of a tensor that holds both, None if it cannot."""
    found = HALF.fullmatch(name)
    if found is None or fused.format is None or len(fused.shape) != 3 or fused.shape[1] % 2:
        return None
    n, both, columns = fused.shape
    count = both // 2
    offset = count if found[2] == "up" else 0

    def read(a: int, b: int) -> Bytes:
        blocks, at = [], a
        while at < b:
            expert, row = divmod(at, count)
            stop, first = min(b, (expert + 1) * count), expert * both + offset + row
            blocks.append(fused.rows(first, first + stop - at))
            at = stop
        return np.concatenate(blocks)

    shape = (n, count, columns)
    return LazyTensor(name, shape, fused.dtype, fused.format, read, fused.note, fused.nbytes // 2)


def _joined(name: str, parts: Sequence[StoredTensor], count: int) -> StoredTensor:
    """Concatenate matrices of one shape along rows, as a lazy tensor [count, rows, columns]."""
    shape = parts[0].shape
    odd = next((p for p in parts if p.shape != shape or p.format is None), None)
    if odd is not None or len(shape) != 2:
        raise InputError(
            f"{name}: experts of different shapes",
            expected=list(shape),
            found=f"{odd.name} {list(odd.shape)}" if odd else None,
        )
    same = all(p.format is parts[0].format for p in parts)
    form = parts[0].format if same and parts[0].format else quant.get("f32")
    ends = list(accumulate(shape[0] for _ in parts))

    def rows(part: StoredTensor, a: int, b: int) -> Bytes:
        raw = part.rows(a, b)
        if part.format is form or part.format is None:
            return raw
        return part.format.dequantize(raw).view(np.uint8)

    def read(a: int, b: int) -> Bytes:
        blocks, at = [], a
        while at < b:
            i = bisect_right(ends, at)
            start, stop = ends[i] - shape[0], min(b, ends[i])
            blocks.append(rows(parts[i], at - start, stop - start))
            at = stop
        return np.concatenate(blocks)

    notes = sorted({p.note for p in parts} - {""})
    total = (count, len(parts) // count * shape[0], shape[1])
    assert prod(total) == len(parts) * prod(shape)
    return LazyTensor(
        name, total, parts[0].dtype, form, read, "; ".join(notes), sum(p.nbytes for p in parts)
    )
