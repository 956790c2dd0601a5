"""A mix of quant types: one for most matrices, better ones in some places."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from g4spec.quant.format import Format


@dataclass(frozen=True, slots=True)
class Place:
    """Where a matrix is: the `i`-th of `n` of its kind. `gqa`: query heads for each key head.
    `imatrix`: errors are weighted by an importance matrix."""

    i: int
    n: int
    gqa: int
    imatrix: bool = False

    @property
    def first_eighth(self) -> bool:
        return self.i < self.n // 8

    @property
    def more_bits(self) -> bool:
        """The first and the last eighth, and every third in between."""
        i, n = self.i, self.n
        return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


@dataclass(frozen=True, slots=True)
class Better:
    """A type that a mix has in some places instead of its own.

    Attributes:
        part: of names, e.g. "ffn_down". `form`: the type.
        which: of these matrices, for people. `where`: the same as a condition.
    """

    part: Literal["attn_v.weight", "ffn_down", "attn_output.weight"]
    form: Format
    which: str = ""
    where: Callable[[Place], bool] = lambda place: True


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
    better: tuple[Better, ...] = ()
    named: tuple[tuple[re.Pattern[str], Format], ...] = ()
