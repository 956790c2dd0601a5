"""A mix of quant types: one type for most matrices, larger types for some."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from g4spec.quant.format import Format


@dataclass(frozen=True, slots=True)
class TensorPosition:
    """Position of a matrix in the model.

    Attributes:
        index: index of its layer among the layers that have such a matrix.
        count: number of these layers.
        gqa: query heads per key head.
        imatrix: an importance matrix is used.
    """

    index: int
    count: int
    gqa: int
    imatrix: bool = False

    @property
    def first_eighth(self) -> bool:
        return self.index < self.count // 8

    @property
    def more_bits(self) -> bool:
        """True in the first and last eighth of the layers, and in every third in between."""
        i, n = self.index, self.count
        return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


@dataclass(frozen=True, slots=True)
class Override:
    """Another type that a mix uses for some matrices.

    Attributes:
        name_part: substring of the names of the matrices, e.g. "ffn_down".
        format: the type.
        which: description of the condition `where`, for the plan.
        where: condition on the position of the matrix.
    """

    name_part: Literal["attn_v.weight", "ffn_down", "attn_output.weight"]
    format: Format
    which: str = ""
    where: Callable[[TensorPosition], bool] = lambda position: True


@dataclass(frozen=True, slots=True)
class Mix:
    """A choice of `--type`: a base type, with other types for some matrices.

    Attributes:
        name: lower-case name for `--type`.
        base: type of most matrices.
        file_type: `general.file_type` of such a file, or None.
        overrides: types for some matrices; the first match is used.
        tensor_types: (pattern, type) pairs of `--tensor-type`, which precede all other rules.
    """

    name: str
    base: Format
    file_type: int | None
    overrides: tuple[Override, ...] = ()
    tensor_types: tuple[tuple[re.Pattern[str], Format], ...] = ()
