"""Steps of more than 16 rows, computed 16 at a time: a row has the same bits in any company."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from g4spec.runtime.cuda.step import packed_rows as rows
from g4spec.runtime.cuda.step.packed_rows import Rows, RowTiles

Tile = torch.Tensor | Rows
"""At most 16 rows."""
Value = Tile | RowTiles
Op = TypeVar("Op", bound=Callable[..., Any])


def in_tiles(*places: int) -> Callable[[Op], Op]:
    """Compute an op 16 rows at a time. Its arguments at `places` have a row for each token; the
    others, and those given by name, are the same for all rows."""

    def decorate(op: Op) -> Op:
        @functools.wraps(op)
        def call(self: Any, *args: Any, **more: Any) -> Any:
            count = len(args[places[-1]])
            if count <= rows.MOST:
                return op(self, *args, **more)
            parts = []
            for i, begin in enumerate(range(0, count, rows.MOST)):
                tile = slice(begin, min(begin + rows.MOST, count))
                given = [_tile(a, i, tile) if at in places else a for at, a in enumerate(args)]
                parts.append(op(self, *given, **more))
            return _joined(parts)

        return cast(Op, call)

    return decorate


def _tile(x: Value, index: int, rows_: slice) -> Tile:
    """Rows `rows_` of x, which are its tile `index`; of sums [S, T, N] of each."""
    if isinstance(x, RowTiles):
        return x.parts[index]
    assert isinstance(x, torch.Tensor)
    return x[rows_] if x.dim() == 2 else x[..., rows_, :].contiguous()


def _joined(parts: list[Any]) -> Any:
    """What tiles gave, below each other."""
    first = parts[0]
    if isinstance(first, tuple):
        return tuple(_joined(list(each)) for each in zip(*parts, strict=True))
    if isinstance(first, Rows):
        return RowTiles(tuple(parts))
    return None if first is None else torch.cat(parts, dim=-2)
