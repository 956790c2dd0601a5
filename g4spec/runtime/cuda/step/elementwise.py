"""Elementwise kernels between matmuls: activations, per-layer inputs, the softcap."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch

from g4spec.core import Batch, Reach
from g4spec.ops.reference import Spans
from g4spec.ops.spans import Span
from g4spec.runtime.cuda.build import launch
from g4spec.runtime.cuda.build.constants import GATED_SCALE, GROUP_ROWS
from g4spec.runtime.cuda.build.constants import Activation as KernelActivation
from g4spec.runtime.cuda.build.units import Unit
from g4spec.runtime.cuda.step.packed_rows import PackedRows, address
from g4spec.runtime.cuda.step.packed_rows import empty as empty_rows

Activation = Literal["gelu_tanh", "silu"]
ACTIVATIONS: dict[Activation, KernelActivation] = {
    "gelu_tanh": KernelActivation.GELU,
    "silu": KernelActivation.SILU,
}
"""Activation function of the kernels for each activation."""

THREADS = 128

MAX_REACHES = 4
"""Maximum number of ranges of one launch of `spans`."""


MAX_ROWS = 1 << 16
"""Maximum number of rows of packed results."""


@functools.cache
def _gated_scales(device: torch.device) -> torch.Tensor:
    """Return `GATED_SCALE` for each of MAX_ROWS rows. Must not be called first during a capture,
    which would not write them."""
    return torch.full((MAX_ROWS,), GATED_SCALE, dtype=torch.float32, device=device)


def gated_scale(device: torch.device, groups: int = 1) -> torch.Tensor:
    """Return `GATED_SCALE` for each row of groups of 16."""
    assert groups <= MAX_ROWS // GROUP_ROWS, groups
    return _gated_scales(device)[: GROUP_ROWS * groups]


def gated_rows(gate: torch.Tensor, by: torch.Tensor, activation: Activation) -> PackedRows:
    """Return activation(gate) * by as packed rows. Both are float32 [T, I] with any row stride:
    parts of one matmul's result, or one layer's part of the per-layer inputs."""
    out = empty_rows(len(gate), gate.shape[1], gate.device)
    _gated(gate, by, activation, out.data, padded=out.padded)
    return replace(out, scale=gated_scale(gate.device, out.groups))


def gated(gate: torch.Tensor, by: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return activation(gate) * by, float32 [T, I]; any T."""
    out = torch.empty(gate.shape, dtype=torch.float32, device=gate.device)
    _gated(gate, by, activation, out)
    return out


def _gated(
    gate: torch.Tensor,
    by: torch.Tensor,
    activation: Activation,
    out: torch.Tensor,
    padded: int = 0,
) -> None:
    """Launch `gated`. `padded`: rows of packed `out` with padding; 0 if `out` is float32."""
    (count, width) = gate.shape
    assert by.shape == gate.shape and width % 4 == 0, (gate.shape, by.shape)
    grid = (-(-width // (4 * THREADS)), padded or count)
    name = f"gated<{int(ACTIVATIONS[activation])}, {int(padded > 0)}>"
    launch.kernel("elementwise.cu", name)(
        grid,
        THREADS,
        gate=address(gate),
        gate_stride=gate.stride(0),
        by=address(by),
        by_stride=by.stride(0),
        out=out,
        rows=count,
        width=width,
    )


def per_layer_inputs(
    y: torch.Tensor, tokens: torch.Tensor, weight: torch.Tensor, width: int, eps: float
) -> torch.Tensor:
    """Compute Gemma's per-layer inputs: (rms_norm(y / sqrt(width)) * weight + tokens) / sqrt(2).

    Args:
        y: product of the embeddings [T, width] and the projection, float32 [T, L * P].
        tokens: scaled rows of the per-layer table, [T, L * P].
        weight: [P].

    Returns:
        [T, L, P].
    """
    size = len(weight)
    assert tokens.shape == y.shape and y.shape[1] % size == 0, (tokens.shape, y.shape, size)
    out = torch.empty(len(y), y.shape[1] // size, size, dtype=torch.float32, device=y.device)
    n = out.shape[0] * out.shape[1]
    launch.kernel("elementwise.cu", f"per_layer_inputs<{THREADS // 32}>")(
        -(-n * 32 // THREADS),
        THREADS,
        y=y,
        tokens=tokens,
        weight=weight,
        out=out,
        n=n,
        size=size,
        root=math.sqrt(width),
        eps=eps,
    )
    return out


def softcap(x: torch.Tensor, cap: float, scale: float = 1.0) -> torch.Tensor:
    """Compute cap * tanh(scale * x / cap), or scale * x if cap is 0, in place; x must start at a
    multiple of 16 bytes."""
    assert x.data_ptr() % 16 == 0
    launch.kernel("elementwise.cu", f"softcap<{str(bool(cap)).lower()}>")(
        -(-x.numel() // 1024),
        256,
        x=x,
        n=x.numel(),
        cap=cap,
        scale=scale,
    )
    return x


def spans(batch: Batch, reaches: Sequence[Reach]) -> Spans:
    """Compute `Ops.spans` for sequences with the same number of rows."""
    if len(reaches) > MAX_REACHES:
        return spans(batch, reaches[MAX_REACHES:]) | spans(batch, reaches[:MAX_REACHES])
    positions = batch.positions
    assert batch.rows_per_sequence and positions.is_contiguous(), batch.sizes
    out = torch.empty(len(reaches), 2, len(positions), dtype=torch.int64, device=positions.device)
    back = [-1 if r.back is None else r.back for r in reaches]
    back += [0] * (MAX_REACHES - len(reaches))
    flags = sum((r.from_first + 2 * r.to_last) << 2 * i for i, r in enumerate(reaches))
    launch.kernel("elementwise.cu", "spans")(
        (-(-len(positions) // THREADS), len(reaches)),
        THREADS,
        positions=positions,
        out=out,
        rows=len(positions),
        tokens=batch.rows_per_sequence,
        a=back[0],
        b=back[1],
        c=back[2],
        d=back[3],
        flags=flags,
        pdl=False,
    )
    return {reach: Span(batch, *ends) for reach, ends in zip(reaches, out, strict=True)}


def list_units() -> list[Unit]:
    """Return the instances that tests compile."""
    return [
        Unit(
            "elementwise.cu",
            (
                *(f"gated<{a}, {r}>" for a in (0, 1) for r in (0, 1)),
                f"per_layer_inputs<{THREADS // 32}>",
                "softcap<true>",
                "softcap<false>",
                "spans",
            ),
            max_registers=48,
        ),
    ]
