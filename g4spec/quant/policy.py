"""Which tensor gets which type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from g4spec.quant import get
from g4spec.quant.format import Format

Role = Literal["matrix", "embed", "output", "vector", "index"]

KEPT = (".ffn_gate_inp.weight", "per_layer_model_proj.weight")
"""Ends of names that llama-quantize never quantizes either: small, and routing depends on them."""


def choose(name: str, shape: Sequence[int], role: Role, asked: Format) -> tuple[Format, str]:
    """The type of a tensor when the user asked for `asked`, and why it is that one.

    Args:
        shape: PyTorch order.
        role: see `g4spec.models.spec.Role`.

    Returns:
        The format, and a reason that is empty when it is simply what was asked.
    """
    if role == "index":
        return get("i64"), "token ids"
    if role == "vector" or len(shape) <= 1:
        return get("f32"), "vectors stay F32" if asked.name != "f32" else ""
    if name.endswith(KEPT) and asked.quantized:
        return get("f32"), "never quantized"
    if shape[-1] % asked.block:
        return get("f16"), f"rows of {shape[-1]} do not divide into blocks of {asked.block}"
    return asked, ""
