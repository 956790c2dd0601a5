"""GGUF files with one defect: tensors, ids or numbers that must not be computed with."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from g4spec import quant
from g4spec.gguf import GGUF, TensorData, ValueType, array, u32, write
from g4spec.models.assistant import CENTROIDS, ORDERING, TOP_K
from g4spec.runtime.tokenizer import SUPPRESS

F32, I32, I64 = 0, 26, 27
MASK, STOPS = "tokenizer.ggml.mask_token_id", "g4spec.stop_ids"
DEPTHS = "g4spec.eagle3.depths"
Change = Callable[[TensorData], Iterable[TensorData]]
Broken = tuple[str, Callable[[Path], Path]]
"""Description of the defect, and a function that writes such a file."""


def changed(
    path: Path, to: Path, tensor: str = "", change: Change = lambda t: [t], **keys: Any
) -> Path:
    """Write a copy of a file with one changed tensor and changed metadata (`__` stands for a
    dot)."""
    with GGUF(path) as g:
        kv = {key: g.value(key) for key in g}
        kv |= {name.replace("__", "."): value for name, value in keys.items()}
        data = []
        for name, t in g.tensors.items():
            made = TensorData(name, t.shape, t.type, [g.raw(name).tobytes()])
            data += change(made) if name == tensor else [made]
        write(to, kv, data)
    return to


def raw(t: TensorData) -> bytes:
    return bytes(next(iter(t.chunks)))


def bfloat16(t: TensorData) -> list[TensorData]:
    """Write a float32 tensor in BF16, its values cut off."""
    upper = np.frombuffer(raw(t), "<u2")[1::2]
    return [TensorData(t.name, t.shape, quant.get("bf16").type, [upper.tobytes()])]


def missing(t: TensorData) -> list[TensorData]:
    return []


def shorter(t: TensorData) -> list[TensorData]:
    """Drop the last row of a matrix or the last element of a vector."""
    rows = t.shape[0] - 1
    kept = raw(t)[: len(raw(t)) * rows // t.shape[0]]
    return [TensorData(t.name, (rows, *t.shape[1:]), t.type, [kept])]


def other_type(t: TensorData) -> list[TensorData]:
    """Replace floats by integers or integers by floats, of the same shape."""
    integers = t.type in (I32, I64)
    dtype, type = (np.float32, F32) if integers else (np.int32, I32)
    return [TensorData(t.name, t.shape, type, [np.ones(t.shape, dtype).tobytes()])]


def not_finite(t: TensorData) -> list[TensorData]:
    """Set the last element to NaN."""
    values = np.frombuffer(raw(t), np.float32).copy()
    values[-1] = math.nan
    return [TensorData(t.name, t.shape, t.type, [values.tobytes()])]


def bad_blocks(t: TensorData) -> list[TensorData]:
    """Set all bits, which is NaN in floats and in the scales of blocks."""
    return [TensorData(t.name, t.shape, t.type, [b"\xff" * len(raw(t))])]


def pointing(id: int) -> Change:
    """Return a change that sets the fourth entry of an index tensor to `id`."""

    def point(t: TensorData) -> list[TensorData]:
        ids = np.frombuffer(raw(t), np.int64).copy()
        ids[3] = id
        return [TensorData(t.name, t.shape, t.type, [ids.tobytes()])]

    return point


HOWS: tuple[Change, ...] = (missing, shorter, other_type, not_finite)


def unlike(names: Iterable[str]) -> list[str]:
    """Return the tensors outside the layers and those of the first two; later layers repeat
    these."""
    return [n for n in names if not re.match(r"blk\.([2-9]|\d\d)\.", n)]


def tensors(path: Path, how: Change, borrowed: Iterable[str] = ()) -> Iterator[Broken]:
    """Yield every tensor of a file with change `how`, where that makes the file invalid. Tensors in
    `borrowed` may be missing."""
    with GGUF(path) as g:
        found = {n: g.tensors[n] for n in unlike(g.tensors)}
    for name, t in found.items():
        if how is not_finite and (len(t.shape) != 1 or t.type != F32):
            continue
        if how is missing and name in borrowed:
            continue
        yield (f"{how.__name__}: {name}", lambda to, name=name: changed(path, to, name, how))


def borrowed(kind: str, path: Path) -> set[str]:
    """Return the tensors that this draft takes from its target if it has none."""
    with GGUF(path) as g:
        names = (
            {"token_embd.weight"} if "d2t" in g.tensors else {"token_embd.weight", "output.weight"}
        )
    return set() if kind in ("assistant", "centroids") else names


def numbers(path: Path) -> Iterator[Broken]:
    """Yield defects of every list of ids and of the centroids."""
    with GGUF(path) as g:
        keys, arch = set(g), str(g["general.architecture"])
        has_d2t = "d2t" in g.tensors
        lists = {key: g.number_array(key).tolist() for key in (ORDERING, CENTROIDS) if key in keys}
        heads = g.get(f"{arch}.attention.head_count")
    for id in (-1, 10**6, 2**40) if has_d2t else ():
        yield f"d2t names {id}", lambda to, id=id: changed(path, to, "d2t", pointing(id))
    changes: dict[str, dict[str, Any]] = {}
    if arch == "gemma4":
        for key in (SUPPRESS, STOPS):
            changes |= {
                f"{key} has {id}": {key: array(ValueType.I32, [7, id])} for id in (-1, 10**6)
            }
    if MASK in keys and keys & {f"{arch}.block_size", DEPTHS}:  # other drafts do not use it
        changes["mask token"] = {MASK: u32(10**6)}
    if ORDERING in lists:
        for id in (-1, 10**6):
            changes[f"ordering has {id}"] = {
                ORDERING: array(ValueType.I32, [id, *lists[ORDERING][1:]])
            }
    if CENTROIDS in lists:
        centres = lists[CENTROIDS]
        changes |= {
            "top k of centroids": {TOP_K: u32(10**5)},
            "centroids are short": {CENTROIDS: array(ValueType.F32, centres[:-1])},
            "centroid of inf": {CENTROIDS: array(ValueType.F32, [math.inf, *centres[1:]])},
        }
    if isinstance(heads, int):
        changes["heads"] = {f"{arch}.attention.head_count": u32(heads + 1)}
    for what, kv in changes.items():
        yield what, lambda to, kv=kv: changed(path, to, **kv)


def blocks(path: Path) -> list[str]:
    """Return the matrices of block types, whose blocks each have a scale."""
    with GGUF(path) as g:
        return [n for n in unlike(g.tensors) if quant.get(g.tensors[n].format.name).quantized]
