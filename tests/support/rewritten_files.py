"""Files of targets with tensors as other programs write them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from g4spec.gguf import GGUF, KV, TensorData, write
from g4spec.gguf.header import TensorInfo

Change = Callable[[GGUF, TensorInfo], list[TensorData]]


def rewritten(path: Path, to: Path, change: Change, keys: KV | None = None) -> Path:
    """Write a file with `change(file, tensor)` in place of each tensor, and with `keys` changed."""
    with GGUF(path) as file:
        data = [new for info in file.tensors.values() for new in change(file, info)]
        write(to, {key: file.value(key) for key in file} | (keys or {}), data)
    return to


def same(file: GGUF, info: TensorInfo) -> list[TensorData]:
    return [TensorData(info.name, info.shape, info.type, [file.raw(info.name)])]


def apart(file: GGUF, info: TensorInfo) -> list[TensorData]:
    """Store gate and up projections of experts as two tensors."""
    if not info.name.endswith("ffn_gate_up_exps.weight"):
        return same(file, info)
    shape = (info.shape[0], info.shape[1] // 2, info.shape[2])
    halves = np.split(file.raw(info.name).reshape(*info.shape[:2], -1), 2, axis=1)
    return [
        TensorData(
            info.name.replace("gate_up", name), shape, info.type, [np.ascontiguousarray(half)]
        )
        for name, half in zip(("gate", "up"), halves, strict=True)
    ]


def by_ollama(file: GGUF, info: TensorInfo) -> list[TensorData]:
    """Store vision and audio beside the text model, and factors of experts under an older name."""
    name = info.name.replace(".ffn_down_exps.scale", ".ffn_gate_inp.per_expert_scale")
    out = [TensorData(name, info.shape, info.type, [file.raw(info.name)])]
    if name == "output_norm.weight":
        vision = [(f"v.blk.{i}.attn_v.weight", 32, 32) for i in range(12)]
        for name, *shape in (("mm.a.fc.bias", 64), *vision):
            out.append(TensorData(name, tuple(shape), 0, [np.ones(shape, np.float32)]))
    return out


def fused(file: GGUF, info: TensorInfo) -> list[TensorData]:
    """Store queries, keys and values of a layer in one tensor where it has all three, as upstream's
    `--fuse-qkv` does."""
    layer, _, rest = info.name.rpartition(".attn_")
    parts = [f"{layer}.attn_{x}.weight" for x in "qkv"]
    if info.name not in parts or not file.tensors.keys() >= set(parts):
        return same(file, info)
    if rest != "q.weight":
        return []
    rows = sum(file.tensors[name].shape[0] for name in parts)
    data = np.concatenate([file.raw(name) for name in parts])
    return [TensorData(f"{layer}.attn_qkv.weight", (rows, info.shape[1]), info.type, [data])]
