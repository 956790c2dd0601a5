"""A mix of quant types: one for most matrices, better ones in some places."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from g4spec.quant.format import Format


@dataclass(frozen=True, slots=True)
class TensorPosition:
    """Where a matrix is: the `i`-th of `n` of its kind. `gqa`: query heads for each key head.
    `imatrix`: errors are weighted by an importance matrix."""

    index: int
    count: int
    gqa: int
    imatrix: bool = False

    @property
    def first_eighth(self) -> bool:
        return self.index < self.count // 8

    @property
    def more_bits(self) -> bool:
        """The first and the last eighth, and every third in between."""
        i, n = self.index, self.count
        return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


@dataclass(frozen=True, slots=True)
class Override:
    """A type that a mix has in some places instead of its own.

    Attributes:
        part: of names, e.g. "ffn_down". `form`: the type.
        which: of these matrices, for people. `where`: the same as a condition.
    """

    name_part: Literal["attn_v.weight", "ffn_down", "attn_output.weight"]
    format: Format
    which: str = ""
    where: Callable[[TensorPosition], bool] = lambda position: True


@dataclass(frozen=True, slots=True)
class Mix:
    """What can be asked for: a type, or a type with better ones in some places.

    Attributes:
        name: as people type it. `base`: of most matrices.
        file_type: `general.file_type` of such a file, or None.
        better: the first that fits counts.
        named: types of tensors whose name a pattern is found in, whatever the mix has for them.
    """

    name: str
    base: Format
    file_type: int | None
    overrides: tuple[Override, ...] = ()
    tensor_types: tuple[tuple[re.Pattern[str], Format], ...] = ()
