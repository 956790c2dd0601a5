"""Drafts to compare a draft file with: converted from its source, or copies with one change."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from g4spec import convert, gguf, quant
from g4spec.core import MAX_STEP_ROWS
from g4spec.gguf import GGUF, KV, TensorData, Value, ValueType, u32
from g4spec.measure.tensor_changes import TensorChange

DEFAULT_ROPE_BASE = 1e4
"""RoPE base of a DFlash draft without the key."""


def converted(file: GGUF, source: Path, target: Path, folder: Path) -> Path:
    """Return the draft that `convert` writes from `source` with the tensor types of `file`; a GGUF
    source in this program's own format is returned itself.

    Types that cannot be written become Q8_0.
    """
    with convert.detect(source) as found:
        if isinstance(found.source, GGUF) and found.dialect is None:
            return found.source.path
    names: dict[str, list[str]] = {}
    for name, t in file.tensors.items():
        if t.format.name in quant.writable_names():
            names.setdefault(t.format.name, []).append(re.escape(name))
    kept = [f"^({'|'.join(group)})$={form}" for form, group in names.items()]
    out = folder / "converted.gguf"
    convert.convert(source, out, target=target, tensor_types=kept)
    return out


def variants(file: GGUF) -> Iterator[tuple[str, KV]]:
    """Yield a description and the changed keys for each setting whose error would go unnoticed."""
    a = f"{file.get('general.architecture')}."
    ids = file.get(f"{a}target_layers")
    if isinstance(ids, list):
        for moved in _moved(ids):
            yield (
                f"{a}target_layers = {moved}",
                {f"{a}target_layers": Value(ValueType.ARRAY, moved, ValueType.I32)},
            )
    block = file.get(f"{a}block_size")
    if isinstance(block, int) and 2 * block <= MAX_STEP_ROWS:
        yield f"{a}block_size = {2 * block}", {f"{a}block_size": u32(2 * block)}
    base = file.get(f"{a}rope.freq_base", DEFAULT_ROPE_BASE)
    for other in (DEFAULT_ROPE_BASE, 1e6):
        if isinstance(base, float) and base != other:
            yield (
                f"{a}rope.freq_base = {other:g}",
                {f"{a}rope.freq_base": Value(ValueType.F32, other)},
            )
    causal = file.get("g4spec.dflash.layer_causal")
    if isinstance(causal, list):
        for value in (True, False):
            if causal != [value] * len(causal):
                key = "g4spec.dflash.layer_causal"
                yield (
                    f"{key} = all {str(value).lower()}",
                    {key: Value(ValueType.ARRAY, [value] * len(causal), ValueType.BOOL)},
                )
    scale, width = file.get(f"{a}embedding_scale", 1.0), file.get(f"{a}embedding_length")
    if a.startswith("dflash") and isinstance(width, int):
        other = 1.0 if scale != 1.0 else width**0.5
        yield (
            f"{a}embedding_scale = {other:g}",
            {f"{a}embedding_scale": Value(ValueType.F32, other)},
        )
    for key in (f"{a}norm_before_residual", f"{a}sample_from_anchor"):
        flag = file.get(key)
        if isinstance(flag, bool):
            yield f"{key} = {str(not flag).lower()}", {key: Value(ValueType.BOOL, not flag)}


def present_values(file: GGUF) -> dict[str, str]:
    """Return the value of each key that `variants` changes, as text."""
    out = {}
    for key in dict.fromkeys(key for _, changes in variants(file) for key in changes):
        value = file.get(key)
        shown = f"{value:g}" if isinstance(value, float) else str(value).lower()
        out[key] = "no value" if value is None else shown
    return out


def _moved(ids: list[int]) -> Iterator[list[int]]:
    """Yield target layers with all ids, then single ids, moved by one; ids stay unique and in
    order."""
    moves = [[step] * len(ids) for step in (1, -1)]
    moves += [
        [step * (i == k) for i in range(len(ids))] for k in range(len(ids)) for step in (1, -1)
    ]
    for move in moves:
        moved = [i + m for i, m in zip(ids, move, strict=True)]
        if min(moved) >= 1 and moved == sorted(set(moved)):
            yield moved


def write_changed(file: GGUF, changes: KV, path: Path, tensors: TensorChange | None = None) -> Path:
    """Write a copy of `file` with changed keys and tensors; these become F32."""
    kv = {key: file.value(key) for key in file} | changes
    changed = tensors.apply(lambda name: file.array(name).astype(np.float32)) if tensors else {}
    data = [
        TensorData(name, t.shape, t.format.type, [file.raw(name)])
        for name, t in file.tensors.items()
        if name not in changed
    ]
    f32 = quant.get("f32").type
    data += [TensorData(name, values.shape, f32, [values]) for name, values in changed.items()]
    gguf.write(path, kv, data)
    return path
