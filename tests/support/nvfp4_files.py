"""Targets with NVFP4 weights and a factor for each matrix, as llama.cpp's converter writes them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from g4spec import quant
from g4spec.gguf import GGUF, TensorData, write
from tests.support.malformed import F32

WEIGHTS = re.compile(r"blk\.\d+\.(attn_(q|k|v|output)|ffn_(gate|up|down|gate_up)(_exps)?)\.weight")


def with_nvfp4(source: Path, to: Path, *, dequantized: bool = False) -> Path:
    """Write a copy of a target with random NVFP4 weights and factors, or with their products.

    Factors of `ffn_down_exps`, which every file with experts has, stay as they are.
    """
    draw, form = np.random.default_rng(1), quant.get("nvfp4")
    with GGUF(source) as g:
        tensors = []
        for name, t in g.tensors.items():
            if not WEIGHTS.fullmatch(name) or t.shape[-1] % 64:
                tensors.append(TensorData(name, t.shape, t.type, [g.raw(name).tobytes()]))
                continue
            blocks = draw.integers(0, 256, (np.prod(t.shape) // 64, 36), np.uint8)
            blocks[:, :4] = draw.integers(0x30, 0x40, (len(blocks), 4))  # scales 0.5 to 1.875
            own = name.removesuffix("weight") + "scale"
            factors = draw.uniform(0.02, 0.08, t.shape[:-2] or 1).astype(np.float32)
            if own in g.tensors:
                factors[:] = 1
            elif not dequantized:
                tensors.append(TensorData(own, factors.shape, F32, [factors.tobytes()]))
            if dequantized:
                values = form.dequantize(blocks).reshape(len(factors), -1) * factors[:, None]
                tensors.append(TensorData(name, t.shape, F32, [values.tobytes()]))
            else:
                tensors.append(TensorData(name, t.shape, form.type, [blocks.tobytes()]))
        write(to, {key: g.value(key) for key in g}, tensors)
    return to
