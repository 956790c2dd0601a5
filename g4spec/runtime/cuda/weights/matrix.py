"""Weight matrices on the GPU, packed for the matmul that reads them.

A matrix is loaded as the file's bytes, possibly rewritten (`held`). It is packed at first use,
alone or together with the matrices that are multiplied with the same rows; the unpacked bytes are
then freed. If memory ends meanwhile, or the user interrupts it, they stay, and the next use packs
them. For kernels that read blocks in the file's order (portable.cu), matrices are only
concatenated.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from g4spec.runtime.cuda.build.constants import INTERLEAVE_ROWS, PACK_ROWS
from g4spec.runtime.cuda.weights import held, packing
from g4spec.runtime.cuda.weights.dequant import Weight


class Matrix:
    """One matrix [rows, columns], or several of one shape (experts).

    Args:
        type: quant type, e.g. "q4_k"; "" for 16-bit floats.
        raw: the file's bytes, uint8 [matrices * rows, bytes of a row], or float16 or bfloat16
            [matrices * rows, columns].
        file_order: keep rows as in the file: bytes are not packed, gate and up rows are not
            interleaved.
        factors: see `held`.

    Attributes:
        grouped: it is packed in groups of rows.
        interleaved: its rows are gate and up rows, interleaved.
    """

    def __init__(
        self,
        type: str,
        raw: torch.Tensor,
        rows: int,
        columns: int,
        matrices: int = 1,
        *,
        file_order: bool = False,
        factors: torch.Tensor | None = None,
    ) -> None:
        self.file_order, self.grouped = file_order, bool(type) and not file_order
        self.type, self.rows, self.columns, self.matrices = type, rows, columns, matrices
        raw = held.held(type, raw, factors) if type else raw
        self._raw: torch.Tensor | None = raw
        self._whole, self._first = raw, 0
        self.interleaved = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in PyTorch order."""
        stack = (self.matrices,) if self.matrices > 1 else ()
        return (*stack, self.rows, self.columns)

    @property
    def packed(self) -> bool:
        return self._raw is None

    @property
    def table(self) -> torch.Tensor:
        """The matrix in its current form: the file's bytes [rows, bytes], packed, or 16-bit floats.
        Empty if it is part of one of `GateUpPairs`."""
        if self._raw is not None:
            return self._raw
        return self._whole[self._first : self._first + self.groups]

    @property
    def groups(self) -> int:
        """Entries of the packed tensor, or rows of one that is not packed."""
        if not self.grouped:
            return self.matrices * self.rows
        return self.matrices * -(-self.rows // PACK_ROWS)

    @property
    def weight(self) -> Weight:
        """This matrix by itself; packed at first use."""
        if not self.packed:
            with _released([self]) as raws:
                self.place(_pack(self, raws[0], self.rows), 0)
        assert len(self.table) == self.groups, "part of a pair"
        return Weight(self.type, self.table, self.rows, self.columns, self.matrices)

    @property
    def raw(self) -> torch.Tensor:
        """The file's bytes [matrices * rows, bytes]."""
        assert self._raw is not None, "already packed, for another matmul"
        return self._raw.reshape(self.matrices * self.rows, -1)

    def release_raw(self) -> None:
        """Drop the reference to the file's bytes, so that the caller can free them."""
        self.place(self.raw.new_empty(0), 0)
        self._raw = None

    def give_back(self, raw: torch.Tensor) -> None:
        """Invert `release_raw`, and `interleave_experts`. `raw` may be a view [..., bytes] of any
        strides."""
        self.interleaved, self.rows = False, raw.shape[:-1].numel() // self.matrices
        self._raw = raw

    def place(self, whole: torch.Tensor, first: int) -> None:
        """Make this matrix the part of `whole` from group `first` on."""
        self._whole, self._first = whole, first

    def precedes(self, other: Matrix) -> bool:
        """Return whether `other` directly follows in memory, so that both are one matrix."""
        return (
            self._whole is other._whole
            and self._first + self.groups == other._first
            and (not self.grouped or self.rows % PACK_ROWS == 0)
        )

    def span_to(self, last: Matrix, rows: int) -> Weight:
        """Return the rows from this matrix to `last` after it, `rows` in all, as one weight."""
        data = self._whole[self._first : last._first + last.groups]
        return Weight(self.type, data, rows, self.columns)


def weight_of(w: Matrix | torch.Tensor) -> Weight:
    """Return the weight of a matrix, or of numbers [rows, columns] or [matrices, rows, columns]."""
    if isinstance(w, Matrix):
        return w.weight
    rows, columns = w.shape[-2:]
    return Weight("", w.flatten(0, -2), rows, columns, len(w) if w.dim() == 3 else 1)


@contextmanager
def _released(matrices: Sequence[Matrix]) -> Iterator[list[torch.Tensor]]:
    """Yield the released bytes of matrices. The block may replace them by equal ones in other
    memory; if memory ends in it, or Ctrl-C is pressed, the matrices get them back. So it stores
    what it makes of them: after it, Ctrl-C would lose them."""
    raws: list[torch.Tensor] = []
    try:
        for m in matrices:
            raws.append(m.raw)
            m.release_raw()
        yield raws
    except BaseException:
        for m, raw in zip(matrices, raws, strict=False):  # those released so far
            m.give_back(raw)
        raise
    finally:
        raws.clear()


def join(matrices: Sequence[Matrix]) -> None:
    """Pack matrices with the same columns, those of one type one after the other."""
    if any(m.packed for m in matrices):
        return
    kinds = [(m.type, m.table.dtype) for m in matrices]
    for kind in dict.fromkeys(kinds):
        same = [m for m, other in zip(matrices, kinds, strict=True) if other == kind]
        if any(m.grouped and m.rows % PACK_ROWS for m in same[:-1]):
            continue
        groups = [m.groups for m in same]
        with _released(same) as raws:
            whole = _pack(same[0], _joined(raws), sum(m.rows for m in same))
            for i, m in enumerate(same):
                m.place(whole, sum(groups[:i]))


def _joined(raws: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate bytes; `raws` become parts of the result."""
    if len(raws) == 1:
        return raws[0]
    whole = torch.cat(raws)
    raws[:] = whole.tensor_split(list(itertools.accumulate(map(len, raws)))[:-1])
    return whole


def concat_rows(matrices: Sequence[Matrix]) -> list[Weight]:
    """Concatenate matrices along rows, into as few weights as their layout allows."""
    out, at = list[Weight](), 0
    weights = [m.weight for m in matrices]
    while at < len(matrices):
        end = at + 1
        while end < len(matrices) and matrices[end - 1].precedes(matrices[end]):
            end += 1
        rows = sum(w.rows for w in weights[at:end])
        joined = matrices[at].span_to(matrices[end - 1], rows)
        out.append(weights[at] if end == at + 1 else joined)
        at = end
    return out


class GateUpPairs:
    """Gate and up projections as steps read them: interleaved by 16 rows as one matrix, or two
    matrices (in the file's order, one after the other)."""

    def __init__(self) -> None:
        self._pairs: dict[tuple[Matrix, Matrix], list[Weight]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the interleaved pairs; the matrices themselves no longer hold data."""
        return sum(p[0].data.nbytes for p in self._pairs.values() if len(p) == 1)

    def __call__(self, gate: Matrix, up: Matrix) -> list[Weight]:
        if gate.file_order and up.file_order:
            join([gate, up])
            return [gate.weight, up.weight]
        if (gate, up) not in self._pairs:
            self._store(gate, up)
        return self._pairs[gate, up]

    def _store(self, gate: Matrix, up: Matrix) -> None:
        """Store gate and up interleaved by 16 rows as one weight; two weights if their types
        differ."""
        if gate.packed or up.packed or gate.type != up.type or gate.rows % INTERLEAVE_ROWS:
            self._pairs[gate, up] = [gate.weight, up.weight]
            return
        with _released([gate, up]) as raws:
            data = _pack(gate, _interleaved(raws, 1), gate.rows * 2)
            self._pairs[gate, up] = [Weight(gate.type, data, 2 * gate.rows, gate.columns)]


def interleave_experts(gate: Matrix, up: Matrix | None) -> Weight | None:
    """Interleave gate and up rows of experts by 16, each matrix by itself. Return None if their
    rows do not divide, they keep the file's order, or they are already packed in another way.

    Args:
        up: None: each matrix of `gate` holds its gate rows, then its up rows. From now on they are
            interleaved.
    """
    if gate.interleaved:
        return gate.weight
    channels = gate.rows // 2 if up is None else gate.rows
    both = [m for m in (gate, up) if m is not None]
    if channels % INTERLEAVE_ROWS or len({m.type for m in both}) > 1:
        return None
    if any(m.packed or m.file_order for m in both):
        return None
    with _released(both) as raws:
        data = _pack(gate, _interleaved(raws, gate.matrices), 2 * channels)
        for m in both:
            m.place(data, 0)
        gate.interleaved, gate.rows = True, 2 * channels
    return gate.weight


def _interleaved(raws: list[torch.Tensor], matrices: int) -> torch.Tensor:
    """Interleave gate and up rows by 16; `raws` become views of the result.

    Args:
        raws: bytes [matrices * rows, bytes] of gates and of ups, or of both, in each matrix gates
            first.
    """
    each = 2 // len(raws)
    halves = [
        half
        for raw in raws
        for half in raw.view(matrices, each, -1, INTERLEAVE_ROWS, raw.shape[1]).unbind(1)
    ]
    pairs = torch.stack(halves, dim=2)
    by_half = pairs.transpose(1, 2)
    raws[:] = by_half.unbind(1) if each == 1 else [by_half]
    return pairs.flatten(0, 3)


def _pack(like: Matrix, raw: torch.Tensor, rows: int) -> torch.Tensor:
    """Pack file bytes [matrices * rows, bytes] of matrices like `like`; each matrix has groups of
    its own."""
    captured = raw.is_cuda and torch.cuda.is_current_stream_capturing()
    assert not captured, "weights are packed before a capture, which would not run"
    if not like.grouped:
        return raw
    type = like.type
    unit = packing.unit_of(type, like.columns)
    count = len(raw) // rows
    if count == 1 or rows % PACK_ROWS == 0:
        return packing.pack(type, raw, unit)
    return torch.cat([packing.pack(type, one, unit) for one in raw.view(count, rows, -1)])
