"""Packed rows (packed_rows.py) read and written by torch: for GPUs without the kernels that read
them, to join the rows of several sequences, and for tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from g4spec.runtime.cuda.build.constants import (
    ACT_BYTES,
    ACT_COLUMNS,
    GROUP_ROWS,
    SPLIT16,
    SPLIT32,
    SUMS32,
)
from g4spec.runtime.cuda.step.packed_rows import PackedRows, tiles


def concat_rows(parts: Sequence[PackedRows]) -> PackedRows:
    """Concatenate the rows of several sequences, which must not have scales; each row keeps its
    bits."""
    assert all(part.scale is None for part in parts)
    if len(parts) == 1:
        return parts[0]
    raw = [[x[: len(part)] for x in _fields(part)] for part in parts]
    fields, count = [torch.cat(x) for x in zip(*raw, strict=True)], sum(map(len, parts))
    swizzled = count > GROUP_ROWS
    data = [
        _packed([x[at : at + GROUP_ROWS] for x in fields], tiles(count), swizzled)
        for at in range(0, count, GROUP_ROWS)
    ]
    whole = torch.stack(data) if swizzled else data[0]
    return PackedRows(whole, count, parts[0].width, swizzled=swizzled)


def _fields(rows: PackedRows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what is stored, row by row, for R rows including padding and B blocks: the values,
    half [R, B, 64]; the sums of 16 columns, half [R, B, 2, (sum, error), 2], and of 32, half [R, B,
    (sum, error), 2]; -1024 times the sums of 32, float32 [R, B, 2]."""
    n, blocks, several = rows.tiles, rows.width // ACT_COLUMNS, rows.groups
    whole = blocks if rows.swizzled else 1  # blocks whose parts of the same kind are adjacent
    data = rows.data.view(several, blocks // whole, -1)

    def part(first: int, last: int, dtype: torch.dtype) -> torch.Tensor:
        return data[..., first * n * whole : last * n * whole].contiguous().view(dtype)

    halves = part(0, SPLIT16, torch.float16)
    if rows.swizzled:
        halves = _swizzled(halves.view(several, 2, blocks, 8, 8, 8))
        # tile, block, row, k16, e / 2, t, e % 2
        halves = halves.view(several, 2, blocks, 8, 4, 2, 4, 2).permute(0, 1, 3, 2, 4, 6, 5, 7)
    elif n == 1:  # k16 / 2, row, t, k16 % 2, e
        halves = halves.view(several, blocks, 2, 8, 4, 2, 4).permute(0, 3, 1, 2, 5, 4, 6)
    else:  # k16, row % 8, t, row / 8, e
        halves = halves.view(several, blocks, 4, 8, 4, 2, 4).permute(0, 5, 3, 1, 2, 4, 6)
    of16 = part(SPLIT16, SUMS32, torch.float16).view(several, blocks, 2, 8 * n, 2, 2)
    of32 = part(SPLIT32, ACT_BYTES, torch.float16)
    if rows.swizzled:  # unit, tile, part, row, block, pair
        of32 = torch.cat(
            [
                of32.view(several, -1)[:, 64 * at : 64 * (at + 4)]
                .reshape(several, 2, 2, 8, -1, 2)
                .permute(0, 4, 1, 3, 2, 5)
                .flatten(2, 3)
                for at in range(0, blocks, 4)
            ],
            dim=1,
        )
    else:
        of32 = of32.view(several, blocks, 8 * n, 2, 2)
    floats = part(SUMS32, SPLIT32, torch.float32).view(several, blocks, 2, 8 * n)
    return (
        halves.reshape(rows.padded, blocks, ACT_COLUMNS),
        of16.permute(0, 3, 1, 2, 4, 5).flatten(0, 1),
        of32.permute(0, 2, 1, 3, 4).flatten(0, 1),
        floats.permute(0, 3, 1, 2).flatten(0, 1),
    )


def _swizzled(tiles: torch.Tensor) -> torch.Tensor:
    """Return tiles [..., 8 rows, 8 chunks, 8] with chunk p of row r at position p ^ r, or undo
    this."""
    r = torch.arange(8, device=tiles.device)
    return tiles[..., r[:, None], r[:, None] ^ r, :]


def _packed(fields: Sequence[torch.Tensor], n: int, swizzled: bool) -> torch.Tensor:
    """Pack a group of `n` tiles from the `_fields` of its rows, without padding."""
    count, blocks = fields[0].shape[:2]
    halves, of16, of32, floats = (
        torch.cat([x, x.new_zeros(8 * n - count, *x.shape[1:])]) for x in fields
    )
    if swizzled:  # tile, row, block, k16, t, e / 2, e % 2
        halves = halves.view(2, 8, blocks, 4, 4, 2, 2).permute(0, 2, 1, 3, 5, 4, 6)
        halves = _swizzled(halves.reshape(2, blocks, 8, 8, 8))
    elif n == 1:
        halves = halves.view(8, blocks, 2, 2, 4, 4).permute(1, 2, 0, 4, 3, 5)
    else:
        halves = halves.view(2, 8, blocks, 4, 4, 4).permute(2, 3, 1, 4, 0, 5)
    if swizzled:  # tile, row, block, part, pair
        units = (of32[:, at : at + 4].reshape(2, 8, -1, 2, 2) for at in range(0, blocks, 4))
        of32 = torch.cat([unit.permute(0, 3, 1, 2, 4).reshape(-1) for unit in units])
    else:
        of32 = of32.permute(1, 0, 2, 3)
    parts = (halves, of16.permute(1, 2, 0, 3, 4), floats.permute(1, 2, 0), of32)
    raw = [x.reshape(1 if swizzled else blocks, -1).view(torch.uint8) for x in parts]
    return torch.cat(raw, dim=1).view(blocks, -1)


def unpack(rows: PackedRows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what is stored, padding included and scales ignored.

    Returns:
        The values, half [R, K], where R is `padded`; the sums of 16 and of 32 columns, rounding
            errors added, float32 [R, K / 16] and [R, K / 32]; -1024 times the sums of 32 columns,
            float32 [R, K / 32].
    """
    halves, of16, of32, floats = _fields(rows)
    sums = of16.float().sum(3), of32.float().sum(2), floats
    return (halves.reshape(len(halves), -1), *(x.reshape(len(x), -1) for x in sums))  # type: ignore[return-value]
