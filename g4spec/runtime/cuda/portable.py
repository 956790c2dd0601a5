"""Products in float32 from a matrix as its file holds it: GPUs without the tensor-core path.

sm_70 and sm_75 have no `mma` with 16 columns of half precision and no asynchronous copies, which
the fast path is made of. This path needs neither, nor any packing. It runs on every GPU, so it can
be tested, and compared with the fast one, on any of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from g4spec import quant
from g4spec.runtime.cuda import launch
from g4spec.runtime.cuda.units import Unit

FORMATS = ("f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k")
ROWS = {1: 2, 4: 4, 8: 4}
"""Rows of x that an instance computes -> rows of the matrix a warp takes. More than 8 rows of x
take several launches."""
WARPS = 4
"""Of a block."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """W [N, K] on a GPU.

    Attributes:
        format: name of its type, one of :data:`FORMATS`.
        data: the file's bytes, uint8 [N, bytes of a row].
    """

    format: str
    data: torch.Tensor

    def __post_init__(self) -> None:
        assert self.format in FORMATS, self.format
        assert self.data.dtype is torch.uint8 and self.data.dim() == 2, self.data.shape
        assert self.data.shape[1] % quant.get(self.format).block_bytes == 0, self.data.shape
        assert self.columns % 8 == 0 and self.data.data_ptr() % 16 == 0, self.columns

    @property
    def columns(self) -> int:
        """K."""
        kind = quant.get(self.format)
        return self.data.shape[1] // kind.block_bytes * kind.block


def instance(name: str, tokens: int) -> str:
    """The kernel for a type and this number of rows of x."""
    return f"portable<{name.upper().replace('_', '')}, {tokens}, {ROWS[tokens]}>"


def linear(x: torch.Tensor, weight: Matrix) -> torch.Tensor:
    """x [T, K] times W [N, K] transposed -> [T, N], all float32.

    A row's result depends on that row alone, not on T nor on its place.
    """
    count, columns = x.shape
    assert x.dtype is torch.float32 and columns == weight.columns, (x.dtype, x.shape)
    n = len(weight.data)
    y = x.new_empty(count, n)
    for at in range(0, count, max(ROWS)):
        rows = x[at : at + max(ROWS)]
        tokens = next(t for t in ROWS if t >= len(rows))
        launch.kernel("portable.cu", instance(weight.format, tokens))(
            -(-n // (ROWS[tokens] * WARPS)), 32 * WARPS, weight.data, rows, y[at : at + len(rows)],
            np.int32(n), np.int32(columns), np.int32(len(rows)),
        )  # fmt: skip
    return y


UNITS = [
    Unit("portable.cu", tuple(instance(f, t) for f in FORMATS for t in ROWS), max_registers=168)
]
