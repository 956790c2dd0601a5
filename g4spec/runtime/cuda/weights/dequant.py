"""Packed matrices as 16-bit floats, for matmuls of more rows than a step has.

Half precision where possible, not bf16: it is as fast and has three more bits; values that would
not fit are scaled by powers of two (see `prefill`). bf16 for stacks of experts, because torch's
grouped matmul supports nothing else without synchronizing with the host. Each value is computed in
float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from g4spec.runtime.cuda.build import launch
from g4spec.runtime.cuda.build.constants import DEQUANT_THREADS, PACK_ROWS
from g4spec.runtime.cuda.build.units import Unit
from g4spec.runtime.cuda.weights.packing import PARTS, format_name, spelt, units_of
from g4spec.runtime.cuda.weights.samples import ALIKE, COMPILED, SAMPLES

MAX_GRID_Y = 65535
"""Maximum of the second dimension of a CUDA grid."""

FILE_TYPES = tuple(PARTS)
"""Quantized types that kernels read in the file's order (portable.cu)."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix [rows, columns], or several of one shape.

    Attributes:
        type: type of a quantized matrix, e.g. "q4_k"; "" for floats.
        data: packed (see `packing`), uint8 [matrices * groups, units, bytes of a unit]; bytes as
            `held`, uint8 [matrices * rows, bytes of a row]; or float16, bfloat16 or float32
            [matrices * rows, columns].
    """

    type: str
    data: torch.Tensor
    rows: int
    columns: int
    matrices: int = 1


def in_file_order(weight: Weight) -> bool:
    """Return whether a quantized matrix has the file's order of rows."""
    return weight.data.dim() == 2


def instance(type: str, unit: int, dtype: torch.dtype) -> str:
    """Return the name of a kernel of dequant.cu."""
    to = "Half" if dtype == torch.float16 else "Bfloat"
    return f"dequant<fragment::{format_name(type, unit)}, {to}>"


def file_instance(type: str) -> str:
    """Return the name of a kernel of portable.cu that reads a matrix in the file's order."""
    return f"portable_halves<raw::{spelt(type)}>"


def dequantize(weight: Weight, out: torch.Tensor) -> None:
    """Dequantize all matrices of `weight` to `out` [matrices * rows, columns], contiguous, float16
    or bfloat16; from the file's order only float16."""
    assert out.dtype in (torch.float16, torch.bfloat16) and out.is_contiguous()
    assert out.shape == (weight.matrices * weight.rows, weight.columns), (out.shape, weight)
    if not weight.type:
        out.copy_(weight.data.view(out.shape))
        return
    if in_file_order(weight):
        assert out.dtype is torch.float16 and weight.columns % 8 == 0, (out.dtype, weight.columns)
        count = out.numel() // 8
        launch.kernel("portable.cu", file_instance(weight.type))(
            -(-count // DEQUANT_THREADS),
            DEQUANT_THREADS,
            weights=weight.data,
            out=out,
            count=count,
            k=weight.columns,
            pdl=False,
        )
        return
    groups = -(-weight.rows // PACK_ROWS)
    count, units = weight.data.shape[:2]
    assert count == weight.matrices * groups, (weight.data.shape, weight)
    kernel = launch.kernel("dequant.cu", instance(weight.type, weight.columns // units, out.dtype))
    most = MAX_GRID_Y // groups
    for first in range(0, weight.matrices, most):
        n = min(most, weight.matrices - first)
        kernel(
            (units, n * groups),
            DEQUANT_THREADS,
            packed=weight.data[first * groups : (first + n) * groups],
            out=out[first * weight.rows : (first + n) * weight.rows],
            rows=weight.rows,
            groups=groups,
            pdl=False,
        )


def plain(weight: Weight) -> torch.Tensor:
    """Return all matrices as floats [matrices * rows, columns]; quantized ones in half
    precision."""
    shape = weight.matrices * weight.rows, weight.columns
    if not weight.type:
        return weight.data.view(shape)
    out = torch.empty(shape, dtype=torch.float16, device=weight.data.device)
    dequantize(weight, out)
    return out


RUNS = (8, 4, 2, 1)
"""Numbers of blocks that may be multiplied at once."""

Multiply = Callable[[torch.Tensor, torch.Tensor], None]
"""(rows [n, K], output [n, N]): multiplies rows into the output."""


class Products:
    """Computes x W^T for rows of prompts, with a scratch buffer for one dequantized matrix at a
    time.

    A row has the bits that it has in a matmul of one block of rows, whatever rows come with it:
    torch may choose another kernel for another number of rows. So several blocks are multiplied at
    once only if that changes no bit. To find out, the first matmul of so many blocks with a matrix
    of this shape is compared with the blocks one by one, on this GPU and the given data. A kernel
    that sums in another order differs in nearly every value.

    A second scratch buffer, filled on another stream during the previous matmul, gained nothing:
    the GPU's power limits these matmuls, not its memory.

    Args:
        scratch: float16, as long as the largest matrix or stack of matrices.
        block: rows multiplied at a time, a divisor of the number of rows.
    """

    def __init__(self, scratch: torch.Tensor, block: int) -> None:
        self._scratch, self.block = scratch, block
        self._same: dict[tuple[object, ...], bool] = {}

    def matrix(self, weights: Sequence[Weight], dtype: torch.dtype = torch.float16) -> torch.Tensor:
        """Return matrices with the same columns, concatenated along rows, as [rows, columns] of a
        16-bit type; valid until the next call."""
        columns = weights[0].columns
        count = sum(w.matrices * w.rows for w in weights)
        out, at = self._scratch[: count * columns].view(dtype).view(count, columns), 0
        for w in weights:
            dequantize(w, out[at : at + w.matrices * w.rows])
            at += w.matrices * w.rows
        return out

    def halves(
        self, x: torch.Tensor, weights: Sequence[Weight], out: torch.Tensor, factor: float
    ) -> None:
        """Compute out [T, N] float16 = factor * x [T, K] float16 times the matrices transposed."""
        matrix = self.matrix(weights).t()

        def multiply(rows: torch.Tensor, to: torch.Tensor) -> None:
            torch.addmm(to, rows, matrix, beta=0, alpha=factor, out=to)

        self.in_runs(("halves", matrix.shape), x, out, multiply)

    def floats(self, x: torch.Tensor, weights: Sequence[Weight], out: torch.Tensor) -> None:
        """Compute the same as float32, without a factor."""
        matrix = self.matrix(weights).t()

        def multiply(rows: torch.Tensor, to: torch.Tensor) -> None:
            torch.mm(rows, matrix, out_dtype=torch.float32, out=to)

        self.in_runs(("floats", matrix.shape), x, out, multiply)

    def plain(self, x: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor) -> None:
        """Compute the same for x and a matrix [N, K] in float32."""

        def multiply(rows: torch.Tensor, to: torch.Tensor) -> None:
            torch.mm(rows, matrix.t(), out=to)

        self.in_runs(("plain", matrix.shape), x, out, multiply)

    def in_runs(
        self, what: tuple[object, ...], x: torch.Tensor, out: torch.Tensor, multiply: Multiply
    ) -> None:
        """Multiply x into out in as few runs of blocks as change no bit. `what`: kind and shape of
        the matmul."""
        size = min(self.block, len(x))
        assert len(x) % size == 0 and len(out) == len(x), (len(x), len(out), size)
        at = 0
        while at < len(x):
            for blocks in RUNS:
                rows = slice(at, at + blocks * size)
                if rows.stop > len(x):
                    continue
                key = (*what, size, blocks)
                if blocks > 1 and key not in self._same:
                    self._same[key] = _same_bits(x[rows], out[rows], size, multiply)
                if blocks == 1 or self._same[key]:
                    multiply(x[rows], out[rows])
                    at = rows.stop
                    break


def _same_bits(x: torch.Tensor, out: torch.Tensor, size: int, multiply: Multiply) -> bool:
    """Return whether all rows of x at once give the bits of blocks of `size`, which are written to
    `out`."""
    for at in range(0, len(x), size):
        multiply(x[at : at + size], out[at : at + size])
    other = torch.empty_like(out)
    multiply(x, other)
    return torch.equal(other.view(torch.uint8), out.contiguous().view(torch.uint8))


def _instances(types: Iterable[str]) -> tuple[str, ...]:
    return tuple(
        instance(type, unit, dtype)
        for type in types
        for unit in units_of(type)
        for dtype in (torch.float16, torch.bfloat16)
    )


_SAMPLE = instance("q2_k", 256, torch.float16)
_MORE = (*SAMPLES, *ALIKE)


def list_units() -> list[Unit]:
    """Return the instances that tests compile."""
    return [
        Unit(
            "dequant.cu",
            (*_instances(COMPILED), _SAMPLE),
            max_registers=80,
            more=tuple(name for name in _instances(_MORE) if name != _SAMPLE),
        ),
        Unit(
            "portable.cu",
            tuple(map(file_instance, COMPILED)),
            max_registers=48,
            more=tuple(map(file_instance, _MORE)),
        ),
    ]
