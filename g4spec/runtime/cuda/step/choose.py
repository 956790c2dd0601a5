"""From logits to tokens as `g4spec.ops.sampling` defines it, and what a cycle commits.

Numbers of the sampler lie in device memory, so that a CUDA graph serves every seed, temperature,
top-k (up to 128 candidates), top-p and min-p. Which kernels run depends on `Choice.mode`: a graph
that was recorded in one mode is not valid in another.

The noise is the CPU's (`Sampler`), but for the rounding of two logarithms in float32.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import numpy as np
import torch

from g4spec.ops.sampling import Sampler
from g4spec.runtime.cuda.build import launch
from g4spec.runtime.cuda.build.units import Unit

SPAN, THREADS = 4096, 256
"""Columns and threads of a block."""

MOST = 128
"""Largest top-k that has a kernel; and room for each block's candidates."""

LAST = 512
"""Threads that choose among the candidates of a row, 16 each."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """What was chosen in each of T rows.

    Attributes:
        ids: int64 [T]. `values`: the logit of each, float32 [T].
        bad: int32 [T], 1 where there is no largest logit: NaN, or nothing but -inf.
    """

    ids: torch.Tensor
    values: torch.Tensor
    bad: torch.Tensor


class Choice:
    """Chooses tokens from raw logits.

    Args:
        columns: of the logits.
        suppress: tokens that are never chosen.
    """

    def __init__(
        self,
        columns: int,
        device: torch.device | str,
        *,
        suppress: tuple[int, ...] = (),
    ) -> None:
        self.columns = columns
        self._suppressed = _mask(columns, suppress, device)
        self._sampling = torch.zeros(24, dtype=torch.uint8, device=device)
        self.sampler = Sampler()

    def set(self, sampler: Sampler) -> None:
        """Take the numbers of another sampler, all but its suppressed tokens."""
        s = self.sampler = sampler
        data = struct.pack("<Qfffi", s.seed, s.temperature, s.top_p, s.min_p, s.top_k)
        self._sampling.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    @property
    def mode(self) -> tuple[str, ...]:
        """What a recorded graph is valid for."""
        s = self.sampler
        if s.temperature == 0:
            return ("greedy",)
        if not s.top_k and s.top_p == 1 and not s.min_p:
            return ("sampled",)
        if 1 <= s.top_k <= MOST and self._blocks * MOST <= 16 * LAST:
            return ("top",)
        return ("sorted", *map(str, (s.top_k, s.top_p, s.min_p)))

    @property
    def _blocks(self) -> int:
        return -(-self.columns // SPAN)

    def __call__(
        self,
        logits: torch.Tensor,
        positions: torch.Tensor,
        ahead: int = 1,
        into: Chosen | None = None,
        cap: float = 0.0,
    ) -> Chosen:
        """A token for each row.

        Args:
            logits: float32 [T, columns], raw.
            positions: int64 [T]; the token of row t stands at positions[t] + ahead.
            into: where the answer goes, and what is returned.
            cap: a logit is cap * tanh(raw / cap); 0: raw.
        """
        assert logits.shape == (len(positions), self.columns), (logits.shape, self.columns)
        mode = self.mode[0]
        if mode == "sorted":
            return self._sorted(logits, positions, ahead, into, cap)
        return self._launch(mode, self._given(logits, positions, ahead, cap), len(logits), into)

    def top(self, logits: torch.Tensor, k: int) -> torch.Tensor:
        """Keys (see logits.cuh) of the `k` largest raw logits of each span of columns, int64
        [T, spans * k]."""
        keys = torch.empty(len(logits), self._blocks * k, dtype=torch.int64, device=logits.device)
        launch.kernel("choose.cu", f"top<{k}>")(
            (self._blocks, len(logits)), THREADS, *self._given(logits), None, keys
        )
        return keys

    def end(self, keys: torch.Tensor, into: Chosen) -> Chosen:
        """`into`: the column of each row's largest key; `keys` int64 [T, n]."""
        return self._end(0, self._given(), keys, len(keys), into)

    def _given(
        self,
        logits: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        ahead: int = 1,
        cap: float = 0.0,
    ) -> tuple[object, ...]:
        """What all kernels are given first."""
        return (
            logits, positions, self._suppressed, np.int32(self.columns), np.int32(ahead),
            np.float32(cap),
        )  # fmt: skip

    def _launch(
        self, mode: str, given: tuple[object, ...], rows: int, into: Chosen | None
    ) -> Chosen:
        device, blocks = self._sampling.device, self._blocks
        chosen = into or Chosen(
            torch.empty(rows, dtype=torch.int64, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
            torch.empty(rows, dtype=torch.int32, device=device),
        )
        grid, room = (blocks, rows), MOST if mode == "top" else 1
        keys = torch.empty(rows * blocks * room, dtype=torch.int64, device=device)
        if mode == "top":
            launch.kernel("choose.cu", f"top<{MOST}>")(grid, THREADS, *given, self._sampling, keys)
            launch.kernel("choose.cu", f"top_end<{MOST}>")(
                rows, LAST, *given, self._sampling, keys, np.int32(blocks),
                chosen.ids, chosen.values, chosen.bad,
            )  # fmt: skip
            return chosen
        sampled = int(mode == "sampled")
        launch.kernel("choose.cu", f"best<{sampled}>")(grid, THREADS, *given, self._sampling, keys)
        return self._end(sampled, given, keys, rows, chosen)

    def _end(
        self, sampled: int, given: tuple[object, ...], keys: torch.Tensor, rows: int, into: Chosen
    ) -> Chosen:
        launch.kernel("choose.cu", f"best_end<{sampled}>")(
            -(-rows // 8), 256, *given, keys, np.int32(keys.numel() // rows), np.int32(rows),
            into.ids, into.values, into.bad,
        )  # fmt: skip
        return into

    def _sorted(
        self,
        logits: torch.Tensor,
        positions: torch.Tensor,
        ahead: int,
        into: Chosen | None,
        cap: float,
    ) -> Chosen:
        """Other filters: torch sorts each row by itself, so that no row depends on another."""
        z = cap * torch.tanh(logits / cap) if cap else logits
        if self._suppressed is not None:
            bits = torch.arange(32, device=z.device, dtype=torch.int32)
            out = (self._suppressed[:, None] >> bits & 1).flatten()[: self.columns]
            z = z.masked_fill(out.bool(), -math.inf)
        z = torch.stack([self._filtered(row) for row in z])
        common = z, positions, None, np.int32(self.columns), np.int32(ahead), np.float32(0.0)
        return self._launch("sampled", common, len(z), into)

    def _filtered(self, z: torch.Tensor) -> torch.Tensor:
        """`Sampler._filtered` without a look at values on the host. NaN stays the largest."""
        s = self.sampler
        values, ids = z.sort(descending=True, stable=True)
        rank = torch.arange(len(z), device=z.device)
        keep = rank < (s.top_k or len(z))
        if s.top_p < 1:
            mass = values.masked_fill(~keep, -math.inf).softmax(0).cumsum(0)
            keep &= rank <= (mass < s.top_p).sum()
        if s.min_p:
            keep &= values >= values[0] + math.log(s.min_p)
        keep |= values.isnan()
        return torch.full_like(z, -math.inf).scatter(0, ids, values.masked_fill(~keep, -math.inf))


def _mask(
    columns: int, suppress: tuple[int, ...], device: torch.device | str
) -> torch.Tensor | None:
    """Bit per column, int32 [columns / 32], or None where nothing is suppressed."""
    out = torch.isin(torch.arange(columns), torch.tensor(suppress, dtype=torch.int64))
    if not bool(out.any()):
        return None
    bits = np.packbits(np.pad(out.numpy(), (0, -columns % 32)), bitorder="little")
    return torch.from_numpy(bits.view(np.int32)).to(device)


class CycleState:
    """Where a sequence stands, in device memory, so that cycles follow each other unseen.

    Attributes:
        values: int64 [SIZE or more]: position of the next step's row 0; the token of that row, the
            anchor; how many drafted tokens held in the last cycle; rows of the step that count;
            which row of `seen` is next (see `accept`); and whatever else is to be seen there.
    """

    SIZE = 5

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def set(self, position: int, anchor: int, rows: int) -> None:
        """Begin at `position` with token `anchor`, steps of `rows` rows."""
        self.values[:4].copy_(torch.tensor([position, anchor, 0, rows]))

    def place(self, ids: torch.Tensor, positions: torch.Tensor, mask: int = 0) -> None:
        """`ids` become the anchor and then masks; `positions` (as many, 32 at most) position,
        position + 1 ... . Whatever follows this kernel may read them early."""
        assert len(ids) == len(positions) <= 32, (len(ids), len(positions))
        launch.kernel("accept.cu", "place")(
            1, 32, self.values, ids, positions, np.int32(len(ids)), np.int64(mask), pdl=False
        )

    def accept(
        self,
        chosen: torch.Tensor,
        ids: torch.Tensor,
        *,
        forced: torch.Tensor | None = None,
        seen: torch.Tensor | None = None,
    ) -> None:
        """Commit the choices of a step up to the first one that was not drafted, included.

        Args:
            chosen: int64 [T], T <= 16: choices of the step's rows.
            ids: int64 [T]: what the step read, the anchor and drafted tokens.
            forced: int64 [1] or None: accept so many drafts, whatever they are.
            seen: int64 [turns, n], pinned memory of the host, or None: the first n of `values` go
                to its rows in turn.
        """
        assert len(chosen) == len(ids) <= 16, (len(chosen), len(ids))
        turns, size = (0, 0) if seen is None else seen.shape
        assert size <= len(self.values), (size, len(self.values))
        launch.kernel("accept.cu", "accept")(
            1, 32, chosen, ids, self.values, forced,
            np.int32(len(chosen)), seen, np.int32(turns), np.int32(size),
        )  # fmt: skip


UNITS = [
    Unit(
        "choose.cu",
        (
            "best<0>",
            "best<1>",
            "best_end<0>",
            "best_end<1>",
            *(f"top<{k}>" for k in (16, MOST)),
            f"top_end<{MOST}>",
        ),
        max_registers=80,
    ),
    Unit("accept.cu", ("accept", "place"), max_registers=40),
]
