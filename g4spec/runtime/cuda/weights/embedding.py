"""Rows of a token table as the model reads them, from any layout of the table.

The token table is also the matrix of the last matmul. It is stored once, in the layout of that
matmul.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from g4spec.runtime.cuda.build import launch
from g4spec.runtime.cuda.build.units import Unit
from g4spec.runtime.cuda.weights import held_size, packing, samples
from g4spec.runtime.cuda.weights.dequant import MAX_GRID_Y

THREADS = 128
"""Threads of a block; four values each."""


def embed(
    table: torch.Tensor, name: str, ids: torch.Tensor, width: int, scale: float
) -> torch.Tensor:
    """Return rows `ids` of a table, dequantized and times `scale`, float32 [T, width].

    Args:
        table: bytes as `held`, uint8 [N, bytes of a row], or packed, uint8 [groups, units, bytes].
        name: the table's quant type.
        ids: int64 [T]; any T.
    """
    assert table.dtype is torch.uint8 and ids.dtype is torch.int64, (table.dtype, ids.dtype)
    out = torch.empty(len(ids), width, dtype=torch.float32, device=table.device)
    for at in range(0, len(ids), MAX_GRID_Y):
        rows = slice(at, at + MAX_GRID_Y)
        _launch(table, name, ids[rows], out[rows], scale)
    return out


def _launch(
    table: torch.Tensor, name: str, ids: torch.Tensor, out: torch.Tensor, scale: float
) -> None:
    """Write the rows of at most `MAX_GRID_Y` ids to `out`."""
    width = out.shape[1]
    grid = (-(-width // (4 * THREADS)), len(ids))
    common: dict[str, Any] = {
        "table": table,
        "ids": ids,
        "out": out,
        "width": width,
        "scale": scale,
    }
    if table.dim() == 2:
        assert table.shape[1] == held_size.row_bytes(name, width), (table.shape, name, width)
        launch.kernel("embed.cu", f"embed<quad::{packing.spelt(name)}>")(grid, THREADS, **common)
        return
    columns = width // table.shape[1]
    assert table.shape[2] == packing.unit_bytes(name, columns), (table.shape, name, width)
    launch.kernel("embed.cu", f"embed_packed<quad::{packing.spelt(name)}>")(
        grid, THREADS, **common, columns=columns, unit_bytes=table.shape[2]
    )


def _all(types: Iterable[str]) -> tuple[str, ...]:
    return tuple(
        f"{kernel}<quad::{packing.spelt(n)}>" for kernel in ("embed", "embed_packed") for n in types
    )


def list_units() -> list[Unit]:
    """Return the instances that tests compile."""
    return [
        Unit(
            "embed.cu",
            (
                *_all((*samples.COMPILED, "iq4_xs")),
                *(f"embed<quad::{n.upper()}>" for n in ("f16", "bf16", "f32")),
            ),
            max_registers=64,
            more=_all(n for n in (*samples.SAMPLES, *samples.ALIKE) if n != "iq4_xs"),
        ),
    ]
