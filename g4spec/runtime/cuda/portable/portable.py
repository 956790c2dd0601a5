"""Matmuls in float32 from matrices in the file's order: for GPUs without the tensor-core kernels.

sm_70 and sm_75 lack the `mma` instruction for 16 columns of half precision and asynchronous copies,
which the fast kernels need. These kernels need neither, nor any packing. They run on every GPU, so
they can be tested and compared with the fast ones on any of them.

A row has the same bits in a launch with other rows as alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from g4spec.runtime.cuda.build import launch
from g4spec.runtime.cuda.build.constants import PORTABLE_WARPS
from g4spec.runtime.cuda.build.units import Unit
from g4spec.runtime.cuda.weights import packing, samples
from g4spec.runtime.cuda.weights.dequant import FILE_TYPES, Weight, in_file_order
from g4spec.runtime.cuda.weights.packing import spelt

PLAIN = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
FORMATS = (*PLAIN.values(), *FILE_TYPES)
ROWS = {1: 2, 4: 4, 8: 4}
"""Rows of x that an instance multiplies -> rows of the matrix per warp. More than 8 rows of x take
several launches."""


def format_of(weight: Weight) -> str:
    """Return the name of the type of the weight's values, one of :data:`FORMATS`."""
    return weight.type or PLAIN[weight.data.dtype]


def takes(weight: Weight) -> bool:
    """Return whether a kernel supports the matrix: it has the file's order, a multiple of 8
    columns, and rows at addresses that a warp can read."""
    data = weight.data
    if weight.type and not in_file_order(weight):
        return False
    size = packing.PARTS[weight.type][0].itemsize if weight.type else 16
    align = next(n for n in (16, 8, 4, 2, 1) if size % n == 0)
    return weight.columns % 8 == 0 and data.is_contiguous() and data.data_ptr() % align == 0


def instance(name: str, tokens: int) -> str:
    """Return the kernel for a type and this number of rows of x."""
    return f"portable<raw::{spelt(name)}, {tokens}, {ROWS[tokens]}>"


def instance_of_visits(name: str) -> str:
    """Return the kernel for a type in which each row has a matrix of its own."""
    return f"portable_visits<raw::{spelt(name)}, {ROWS[1]}>"


def linear(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Return x [T, K] times W [N, K] transposed, [T, N], all float32.

    A row's result depends on that row alone, not on T or its index.
    """
    assert takes(weight) and weight.matrices == 1, weight
    count, columns = x.shape
    assert x.dtype is torch.float32 and columns == weight.columns, (x.dtype, x.shape)
    x, n = x.contiguous(), weight.rows
    y = x.new_empty(count, n)
    for at in range(0, count, max(ROWS)):
        rows = x[at : at + max(ROWS)]
        tokens = next(t for t in ROWS if t >= len(rows))
        launch.kernel("portable.cu", instance(format_of(weight), tokens))(
            -(-n // (ROWS[tokens] * PORTABLE_WARPS)),
            32 * PORTABLE_WARPS,
            weights=weight.data,
            x=rows,
            y=y[at : at + len(rows)],
            n_rows=n,
            k=columns,
            tokens=len(rows),
        )
    return y


def visits(x: torch.Tensor, ids: torch.Tensor, stack: Weight) -> torch.Tensor:
    """Multiply rows of x with the matrices that they chose, all float32.

    Args:
        x: [T, K], each row for `len(ids) / T` consecutive visits.
        ids: int64 [V], the matrix of each visit.
        stack: matrices [N, K].

    Returns:
        [V, N]; a row's result depends on that row and its matrix alone.
    """
    assert takes(stack) and ids.dtype is torch.int64 and ids.is_contiguous(), (stack, ids.dtype)
    count, n = len(ids), stack.rows
    assert x.dtype is torch.float32 and count % len(x) == 0, (x.shape, ids.shape)
    assert x.shape[1] == stack.columns, (x.shape, stack.columns)
    y = x.new_empty(count, n)
    launch.kernel("portable.cu", instance_of_visits(format_of(stack)))(
        (-(-n // (ROWS[1] * PORTABLE_WARPS)), count),
        32 * PORTABLE_WARPS,
        weights=stack.data,
        x=x.contiguous(),
        ids=ids,
        y=y,
        n_rows=n,
        k=stack.columns,
        share=count // len(x),
    )
    return y


_MORE = (*samples.SAMPLES, *samples.ALIKE)


def _all(types: Sequence[str]) -> tuple[str, ...]:
    return (*(instance(f, t) for f in types for t in ROWS), *map(instance_of_visits, types))


_SAMPLE = instance("q3_k", max(ROWS))


def list_units() -> list[Unit]:
    """Return the instances that tests compile."""
    return [
        Unit(
            "portable.cu",
            (*_all([f for f in FORMATS if f not in _MORE]), _SAMPLE),
            max_registers=168,
            max_spill=24,  # IQ3_S and IQ3_XXS with 8 rows on sm_120 and sm_121
            more=tuple(name for name in _all(_MORE) if name != _SAMPLE),
        )
    ]
