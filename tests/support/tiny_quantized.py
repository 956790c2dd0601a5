"""Tiny checkpoints that are already quantized, in the published layouts.

Each function rewrites a folder of `tests.support.tiny` and returns the dequantized value of every
quantized weight.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from tests.support.tiny import save
from tests.support.tiny_tokenizer import dump

LINEAR = re.compile(r".*\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)\.weight")
E4M3 = np.array(
    [
        (1 - 2 * (c >> 7))
        * (
            (c & 7) / 8 * 2.0**-6
            if not c >> 3 & 15
            else (1 + (c & 7) / 8) * 2.0 ** ((c >> 3 & 15) - 7)
        )
        if c & 127 < 127
        else np.nan
        for c in range(256)
    ],
    np.float32,
)
Tensors = dict[str, tuple[np.ndarray, str]]


def _open(folder: Path) -> Tensors:
    return {name: (x, "F32") for name, x in load_file(folder / "model.safetensors").items()}


def _close(folder: Path, tensors: Tensors, settings: dict[str, Any]) -> None:
    save(folder / "model.safetensors", tensors)
    config = json.loads((folder / "config.json").read_text())
    dump(folder / "config.json", config | {"quantization_config": settings})


def _bf16(x: np.ndarray) -> np.ndarray:
    return (np.asarray(x, np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)


def _words(codes: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """Pack codes into 32-bit words along `axis`, lowest bits first; the last word is padded."""
    codes = np.moveaxis(codes.astype(np.uint32), axis, -1)
    per = 32 // bits
    codes = np.pad(codes, [(0, 0), (0, -codes.shape[-1] % per)])
    codes = codes.reshape(len(codes), -1, per)
    words = (codes << np.arange(0, 32, bits, dtype=np.uint32)).sum(-1, dtype=np.uint32)
    return np.moveaxis(words.view(np.int32), -1, axis)


def _codes(
    x: np.ndarray, bits: int, group: int, symmetric: bool, half: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return codes [N, K], scales and zero points [N, K / group]; scales are BF16, or FP16 if
    `half`."""
    x = x.reshape(len(x), -1, group)
    top = (1 << bits) - 1
    low, high = x.min(-1), x.max(-1)
    scale = np.abs(x).max(-1) / (top // 2) if symmetric else (high - low) / top
    scale = scale.astype(np.float16).astype(np.float32) if half else _bf16(scale)
    zero = np.full_like(scale, top // 2 + 1)
    if not symmetric:
        zero = np.clip(np.rint(-low / scale), 0, top)
    codes = np.clip(np.rint(x / scale[..., None]) + zero[..., None], 0, top)
    return codes.reshape(len(x), -1).astype(np.uint8), scale, zero


def _value(codes: np.ndarray, scale: np.ndarray, zero: np.ndarray, group: int) -> np.ndarray:
    wide = [np.repeat(v, group, axis=1).astype(np.float32) for v in (scale, zero)]
    return wide[0] * (codes.astype(np.float32) - wide[1])


def compressed(
    folder: Path,
    *,
    bits: int = 4,
    group: int = 32,
    symmetric: bool = True,
    tiny_scale: bool = False,
    powers: bool = False,
) -> dict[str, np.ndarray]:
    """Quantize as compressed-tensors, "pack-quantized".

    Args:
        tiny_scale: use scales below the range of FP16.
        powers: use powers of two as scales.
    """
    out: Tensors = {}
    meant = {}
    for name, (x, dtype) in _open(folder).items():
        if not LINEAR.fullmatch(name):
            out[name] = (x, dtype)
            continue
        base = name.removesuffix(".weight")
        codes, scale, zero = _codes(x, bits, group, symmetric, half=False)
        scale = _bf16(scale * np.float32(1e-7)) if tiny_scale else scale
        scale = np.exp2(np.rint(np.log2(scale))) if powers else scale
        meant[name] = _value(codes, scale, zero, group)
        out[base + ".weight_packed"] = (_words(codes, bits, 1), "I32")
        out[base + ".weight_scale"] = (scale, "BF16")
        out[base + ".weight_shape"] = (np.array(x.shape), "I64")
        if not symmetric:
            out[base + ".weight_zero_point"] = (_words(zero, bits, 0), "I32")
    weights = {
        "num_bits": bits,
        "group_size": group,
        "strategy": "group",
        "type": "int",
        "symmetric": symmetric,
    }
    _close(
        folder,
        out,
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
        },
    )
    return meant


def autoround(
    folder: Path, *, group: int = 32, symmetric: bool = True, shuffled: bool = False
) -> dict[str, np.ndarray]:
    """Quantize as AutoRound in GPTQ's packing; `shuffled` assigns columns to groups out of order
    (g_idx)."""
    out: Tensors = {}
    meant = {}
    rng = np.random.default_rng(0)
    for name, (x, dtype) in _open(folder).items():
        if not LINEAR.fullmatch(name):
            out[name] = (x, dtype)
            continue
        base, k = name.removesuffix(".weight"), x.shape[1]
        order = rng.permutation(k) if shuffled else np.arange(k)
        codes, scale, zero = _codes(x[:, order], 4, group, symmetric, half=True)
        if not symmetric:
            zero[::3] = 0  # stored as -1: a borrow from the next zero point
        back = np.argsort(order)
        meant[name] = _value(codes, scale, zero, group)[:, back]
        out[base + ".qweight"] = (_words(codes[:, back].T, 4, 0), "I32")
        out[base + ".qzeros"] = (_words(zero.T, 4, 1) - 0x11111111, "I32")
        out[base + ".scales"] = (scale.T, "F16")
        out[base + ".g_idx"] = ((np.arange(k) // group)[back], "I32")
    _close(
        folder,
        out,
        {
            "quant_method": "auto-round",
            "packing_format": "auto_round:auto_gptq",
            "bits": 4,
            "group_size": group,
            "sym": symmetric,
        },
    )
    return meant


def fp8(
    folder: Path, *, block: tuple[int, int] | None = None, per_tensor: bool = False
) -> dict[str, np.ndarray]:
    """Quantize to FP8 with one scale per row, per block (as DeepSeek) or per tensor."""
    out: Tensors = {}
    meant = {}
    for name, (x, dtype) in _open(folder).items():
        if not LINEAR.fullmatch(name):
            out[name] = (x, dtype)
            continue
        tall, wide = block or (x.shape if per_tensor else (1, x.shape[1]))
        rows, columns = -(-x.shape[0] // tall), -(-x.shape[1] // wide)
        padded = np.zeros((rows * tall, columns * wide), np.float32)
        padded[: x.shape[0], : x.shape[1]] = np.abs(x)
        scale = _bf16(padded.reshape(rows, tall, columns, wide).max((1, 3)) / 440)
        spread = np.repeat(np.repeat(scale, tall, 0), wide, 1)[: x.shape[0], : x.shape[1]]
        codes = np.abs((x / spread)[..., None] - E4M3[np.r_[0:127, 128:255]]).argmin(-1)
        codes = np.where(codes >= 127, codes + 1, codes).astype(np.uint8)
        meant[name] = E4M3[codes] * spread
        out[name] = (codes, "F8_E4M3")
        ending = "_scale_inv" if block else "_scale"
        out[name + ending] = (scale.reshape(1) if per_tensor else scale, "BF16")
    settings: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": list(block or ())}
    if block is None:
        weights = {
            "num_bits": 8,
            "type": "float",
            "strategy": "tensor" if per_tensor else "channel",
        }
        settings = {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"group_0": {"weights": weights}},
        }
    _close(folder, out, settings)
    return meant


def one_by_one(folder: Path) -> None:
    """Split experts into separate matrices, as quantizing tools do."""
    out: Tensors = {}
    for name, (x, dtype) in _open(folder).items():
        base = name.removesuffix(".gate_up_proj").removesuffix(".down_proj")
        if base == name:
            out[name] = (x, dtype)
            continue
        for i, matrix in enumerate(x):
            parts = {"down": matrix}
            if name.endswith("gate_up_proj"):
                parts = dict(zip(("gate", "up"), np.split(matrix, 2), strict=True))
            out |= {f"{base}.{i}.{k}_proj.weight": (v, dtype) for k, v in parts.items()}
    save(folder / "model.safetensors", out)
