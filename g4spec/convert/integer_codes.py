"""Integer weights of quantized checkpoints, repacked without loss where a GGUF type holds them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from g4spec import quant
from g4spec.convert.tensors import BLOCK_VALUES, LazyTensor, RowReader
from g4spec.quant import Format
from g4spec.quant.format import Bytes, Floats

BLOCK = 32
"""Number of values of a block of Q4_0, Q4_1 and Q8_0."""


@dataclass(frozen=True, slots=True)
class IntegerCodes:
    """A matrix of integer codes; a value is scale * (code - zero).

    Attributes:
        shape: [N, K].
        bits: width of a code.
        group: number of consecutive values of a row that share a scale (but see `order`).
        label: description of the layout for messages.
        codes: reads codes of a range of rows, uint8 [n, K].
        scales, zeros: read scales and zero points of a range of rows, float32 [n, groups].
        order: group of each column, [K]; None if the columns of a group are consecutive.
    """

    shape: tuple[int, int]
    bits: int
    group: int
    label: str
    codes: RowReader
    scales: RowReader
    zeros: RowReader
    order: NDArray[np.int64] | None = None

    def values(self, a: int, b: int) -> Floats:
        """Dequantize rows a .. b - 1 to float32 [b - a, K]."""
        spread = (
            (lambda x: x[:, self.order])
            if self.order is not None
            else (lambda x: np.repeat(x, self.group, axis=1)[:, : self.shape[1]])
        )
        out: Floats = spread(self.scales(a, b)) * (self.codes(a, b) - spread(self.zeros(a, b)))
        return out

    def lossless_type(self) -> Format | None:
        """Return the type that holds all values exactly, or None."""
        if self.group % BLOCK or self.shape[1] % BLOCK or self.order is not None:
            return None
        middle, halves = 1 << (self.bits - 1), True
        for a, b in _row_blocks(self.shape):
            scales, zeros = self.scales(a, b), self.zeros(a, b)
            if not _is_exact_in_half(scales):
                return None
            if not (zeros == middle).all():
                halves = False
                if self.bits != 4 or not _is_exact_in_half(-zeros * scales):
                    return None
        return quant.get("q8_0" if self.bits == 8 else "q4_0" if halves else "q4_1")

    def blocks(self, form: Format, a: int, b: int) -> Bytes:
        """Pack rows a .. b - 1 into blocks of `form`, which holds them exactly."""
        n, count = b - a, self.shape[1] // BLOCK
        spread = self.group // BLOCK  # the last group may be shorter
        scales = np.repeat(self.scales(a, b), spread, axis=1)[:, :count]
        codes = self.codes(a, b).reshape(n, count, BLOCK)
        heads = [scales]
        if form.name == "q4_1":
            zeros = np.repeat(self.zeros(a, b), spread, axis=1)[:, :count]
            heads.append(-zeros * scales)
        if form.name == "q8_0":
            body = (codes ^ 0x80).astype(np.uint8)
        else:
            body = codes[..., : BLOCK // 2] | codes[..., BLOCK // 2 :] << 4
        head = [h[..., None].astype("<f2").view(np.uint8) for h in heads]
        out: Bytes = np.concatenate([*head, body], axis=-1).reshape(n, -1)
        return out

    def to_tensor(self, name: str, size: int) -> LazyTensor:
        """Return a lazy tensor: in `lossless_type` if there is one, otherwise F32.

        Args:
            size: bytes of the source tensors.
        """
        form = self.lossless_type()
        if form is None:
            note = f"{self.label}: no type holds them exactly, dequantized"
            return float_tensor(name, self.shape, self.label, self.values, note, size)
        return LazyTensor(
            name,
            self.shape,
            self.label,
            form,
            lambda a, b: self.blocks(form, a, b),
            f"{self.label}, exact",
            size,
        )


def _is_exact_in_half(x: Floats) -> bool:
    """True if every number is exact in half precision."""
    with np.errstate(over="ignore"):
        return bool((x.astype(np.float16).astype(np.float32) == x).all())


def float_tensor(
    name: str, shape: tuple[int, ...], label: str, values: RowReader, note: str, size: int
) -> LazyTensor:
    def read(a: int, b: int) -> Bytes:
        out: Bytes = np.ascontiguousarray(values(a, b), np.float32).view(np.uint8)
        return out

    return LazyTensor(name, shape, label, quant.get("f32"), read, note, size)


def _row_blocks(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    rows, step = prod(shape[:-1]), max(1, BLOCK_VALUES // max(shape[-1], 1))
    return ((a, min(a + step, rows)) for a in range(0, rows, step))
