"""From logits to tokens as `g4spec.ops.sampling` defines it, for rows of several sequences at once.

The parameters of the samplers are in device memory, one set for each sequence, so that a CUDA graph
serves every seed, temperature, top-k (up to 128 candidates), top-p and min-p. Which kernels run
depends on `Choice.modes`: a graph is valid only for the set of modes with which it was recorded.

The noise is that of the CPU (`Sampler`), except for the rounding of two logarithms in float32.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from g4spec.ops.sampling import Sampler, least_logit
from g4spec.runtime.cuda.build import launch
from g4spec.runtime.cuda.build.constants import (
    LOGIT_SPAN,
    LOGIT_THREADS,
    SAMPLER_BYTES,
    TOP_KEYS,
    TOP_THREADS,
    SampleMode,
)
from g4spec.runtime.cuda.build.units import Unit

NUMBERS = {
    "seed": "Q",
    "temperature": "f",
    "top_p": "f",
    "min_p": "f",
    "top_k": "i",
    "top_n_sigma": "f",
}
"""Fields of `Sampler` that kernels read, in the order of `Sampling` in choose.cu, and their types
in the syntax of `struct`. `suppress` becomes a mask of columns. Samplers with fields of
`sampling.EDITS` do not use these kernels. A filter that is missing here would be ignored on a GPU
without an error."""

MAX_TOP_K = 128
"""Largest top-k of the kernels, and candidates that each block stores."""

Mode = Literal["greedy", "sampled", "top", "sorted"]

CODES: dict[Mode, SampleMode] = {
    "greedy": SampleMode.GREEDY,
    "sampled": SampleMode.SAMPLED,
    "top": SampleMode.TOP,
    "sorted": SampleMode.SAMPLED,
}
"""Mode of the kernels for each mode: torch filters sorted rows, which are then sampled."""


def mode_of(sampler: Sampler, columns: int) -> Mode:
    """Return how tokens are chosen from logits of so many columns. "sorted" sorts every row with
    torch, with values on the host: a graph could not serve other values, so it is not recorded."""
    s = sampler
    if s.temperature == 0:
        return "greedy"
    if not s.filters:
        return "sampled"
    few = 1 <= s.top_k <= MAX_TOP_K and not s.top_n_sigma
    if few and blocks(columns) * MAX_TOP_K <= TOP_KEYS * TOP_THREADS:
        return "top"
    return "sorted"


def blocks(columns: int) -> int:
    """Return the number of spans of columns in a row of logits."""
    return -(-columns // LOGIT_SPAN)


@dataclass(frozen=True, slots=True)
class Chosen:
    """Choices for T rows.

    Attributes:
        ids: int64 [T].
        values: the logit of each, float32 [T].
        bad: int32 [T], the `RowFault` of each row. With a pitch (see `Choice.__call__`) [S,
            pitch].
    """

    ids: torch.Tensor
    values: torch.Tensor
    bad: torch.Tensor


class Choice:
    """Chooses tokens from raw logits, with a sampler for each sequence.

    Args:
        columns: columns of the logits.
        suppress: tokens that are never chosen.
        room: maximum number of sequences.

    Attributes:
        samplers: samplers of the sequences, as given to `set`. Further sequences have the first
            one.
        modes: modes that occur; a recorded graph is valid for one set of them.
    """

    def __init__(
        self,
        columns: int,
        device: torch.device | str,
        *,
        suppress: tuple[int, ...] = (),
        room: int = 1,
    ) -> None:
        self.columns, self.suppress, self.room = columns, suppress, room
        self._suppressed = _mask(columns, suppress, device)
        self._sampling = torch.zeros(room, SAMPLER_BYTES, dtype=torch.uint8, device=device)
        self.samplers: tuple[Sampler, ...] = (Sampler(),)
        self.modes: tuple[Mode, ...] = ("greedy",)

    def set(self, *samplers: Sampler) -> None:
        """Upload the samplers, without their suppressed tokens."""
        if samplers == self.samplers:
            return
        assert 1 <= len(samplers) <= self.room, (len(samplers), self.room)
        self.samplers = ()  # until all of this is done, in case Ctrl-C ends it
        data = b"".join(
            struct.pack(
                f"<{''.join(NUMBERS.values())}i",
                *(getattr(s, n) for n in NUMBERS),
                CODES[mode_of(s, self.columns)],
            )
            for s in (*samplers, *samplers[:1] * (self.room - len(samplers)))
        )
        packed = torch.frombuffer(bytearray(data), dtype=torch.uint8).view_as(self._sampling)
        self._sampling.copy_(packed.pin_memory(), non_blocking=True)
        self.modes = tuple(sorted({mode_of(s, self.columns) for s in samplers}))
        self.samplers = samplers

    def __call__(
        self,
        logits: torch.Tensor,
        positions: torch.Tensor,
        ahead: int = 1,
        into: Chosen | None = None,
        cap: float = 0.0,
        sequences: int = 1,
        pitch: int = 0,
    ) -> Chosen:
        """Choose a token for each row.

        Args:
            logits: float32 [T, columns], raw; the rows of each sequence are consecutive.
            positions: int64 [T]; the token of row t has position positions[t] + ahead.
            into: output, which is returned; by default a new one.
            cap: a logit is cap * tanh(raw / cap); 0: raw.
            sequences: S, each with T / S rows.
            pitch: if given, `positions` and `into.bad` have so many entries per sequence, of which
                the first T / S are used; the last sequence may have only these.
        """
        rows = RowLayout(len(logits), sequences, pitch)
        assert logits.shape[1] == self.columns, (logits.shape, self.columns)
        assert len(positions) >= rows.reach and sequences <= self.room, (len(positions), rows)
        if "sorted" in self.modes:
            return self._sorted(logits, positions, ahead, into, cap, rows)
        common = self._common_arguments(logits, positions, ahead, cap, rows)
        chosen = into or self._new(rows)
        for mode in self.modes:
            self._launch(mode, common, rows, chosen)
        return chosen

    def top(self, logits: torch.Tensor, k: int) -> torch.Tensor:
        """Return the keys (see logits.cuh) of the `k` largest raw logits of each span of columns,
        int64 [T, spans * k]."""
        count = blocks(self.columns)
        keys = torch.empty(len(logits), count * k, dtype=torch.int64, device=logits.device)
        launch.kernel("choose.cu", f"top<{k}>")(
            (count, len(logits)),
            LOGIT_THREADS,
            **self._common_arguments(logits),
            sampling=None,
            keys=keys,
        )
        return keys

    def end(self, keys: torch.Tensor, into: Chosen, sequences: int = 1, pitch: int = 0) -> Chosen:
        """Write the column of each row's largest key to `into` and return it; `keys`: int64 [T, n].
        `sequences` and `pitch`: as in `__call__`."""
        rows = RowLayout(len(keys), sequences, pitch)
        self._end("greedy", self._common_arguments(rows=rows), None, keys, rows, into)
        return into

    def _common_arguments(
        self,
        logits: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        ahead: int = 1,
        cap: float = 0.0,
        rows: RowLayout | None = None,
    ) -> dict[str, Any]:
        """Return the arguments that all kernels share (`LOGITS` in logits.cuh)."""
        each, pitch = (rows.each, rows.distance) if rows else (1, 1)
        return {
            "z": logits,
            "positions": positions,
            "suppressed": self._suppressed,
            "columns": self.columns,
            "ahead": ahead,
            "cap": cap,
            "each": each,
            "pitch": pitch,
        }

    def _new(self, rows: RowLayout) -> Chosen:
        device = self._sampling.device
        return Chosen(
            torch.empty(rows.count, dtype=torch.int64, device=device),
            torch.empty(rows.count, dtype=torch.float32, device=device),
            torch.empty(rows.reach, dtype=torch.int32, device=device),
        )

    def _launch(self, mode: Mode, common: dict[str, Any], rows: RowLayout, chosen: Chosen) -> None:
        """Choose in the rows of one mode."""
        assert len(chosen.ids) == rows.count and len(chosen.bad) >= rows.reach, rows
        spans = blocks(self.columns)
        grid, room = (spans, rows.count), MAX_TOP_K if mode == "top" else 1
        keys = torch.empty(rows.count * spans * room, dtype=torch.int64, device=chosen.ids.device)
        if mode == "top":
            launch.kernel("choose.cu", f"top<{MAX_TOP_K}>")(
                grid,
                LOGIT_THREADS,
                **common,
                sampling=self._sampling,
                keys=keys,
            )
            launch.kernel("choose.cu", f"top_end<{MAX_TOP_K}>")(
                rows.count,
                TOP_THREADS,
                **common,
                sampling=self._sampling,
                keys=keys,
                blocks=spans,
                ids=chosen.ids,
                values=chosen.values,
                bad=chosen.bad,
            )
            return
        # Where all rows are greedy, no sampler is looked at.
        sampling = None if self.modes == ("greedy",) else self._sampling
        best = f"best<{int(CODES[mode])}>"
        launch.kernel("choose.cu", best)(
            grid,
            LOGIT_THREADS,
            **common,
            sampling=sampling,
            keys=keys,
        )
        self._end(mode, common, sampling, keys, rows, chosen)

    def _end(
        self,
        mode: Mode,
        common: dict[str, Any],
        sampling: torch.Tensor | None,
        keys: torch.Tensor,
        rows: RowLayout,
        into: Chosen,
    ) -> None:
        count = rows.count
        launch.kernel("choose.cu", f"best_end<{int(CODES[mode])}>")(
            -(-count // 8),
            256,
            **common,
            sampling=sampling,
            keys=keys,
            blocks=keys.numel() // count,
            rows=count,
            ids=into.ids,
            values=into.values,
            bad=into.bad,
        )

    def _sorted(
        self,
        logits: torch.Tensor,
        positions: torch.Tensor,
        ahead: int,
        into: Chosen | None,
        cap: float,
        rows: RowLayout,
    ) -> Chosen:
        """Apply other filters: torch sorts each row by itself, so that no row depends on
        another."""
        assert self.modes == ("sorted",), self.modes
        z = cap * torch.tanh(logits / cap) if cap else logits
        if self._suppressed is not None:
            bits = torch.arange(32, device=z.device, dtype=torch.int32)
            out = (self._suppressed[:, None] >> bits & 1).flatten()[: self.columns]
            z = z.masked_fill(out.bool(), -math.inf)
        z = torch.stack([_filtered(row, self.samplers[t // rows.each]) for t, row in enumerate(z)])
        common = self._common_arguments(z, positions, ahead, rows=rows) | {"suppressed": None}
        chosen = into or self._new(rows)
        self._launch("sorted", common, rows, chosen)
        return chosen


@dataclass(frozen=True, slots=True)
class RowLayout:
    """`count` rows of logits of several sequences; see `Choice.__call__`."""

    count: int
    sequences: int
    pitch: int

    def __post_init__(self) -> None:
        assert self.count % self.sequences == 0, self
        assert not self.pitch or self.pitch >= self.each, self

    @property
    def each(self) -> int:
        """Rows of a sequence."""
        return self.count // self.sequences

    @property
    def distance(self) -> int:
        """Entries from one sequence to the next in arrays with a pitch."""
        return self.pitch or self.each

    @property
    def reach(self) -> int:
        """Entries of such an array up to the last row."""
        return (self.sequences - 1) * self.distance + self.each


def _filtered(z: torch.Tensor, s: Sampler) -> torch.Tensor:
    """Compute `Sampler._filtered` without reading values on the host. NaN stays the largest."""
    values, ids = z.sort(descending=True, stable=True)
    rank = torch.arange(len(z), device=z.device)
    keep = rank < (s.top_k or len(z))
    if s.top_n_sigma:
        keep &= values >= least_logit(values, s.top_n_sigma)
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
    """Return one bit per column, int32 [columns / 32], or None if nothing is suppressed."""
    out = torch.isin(torch.arange(columns), torch.tensor(suppress, dtype=torch.int64))
    if not bool(out.any()):
        return None
    bits = np.packbits(np.pad(out.numpy(), (0, -columns % 32)), bitorder="little")
    return torch.from_numpy(bits.view(np.int32)).to(device)


def list_units() -> list[Unit]:
    """Return the instances that tests compile."""
    return [
        Unit(
            "choose.cu",
            (
                "best<0>",
                "best<1>",
                "best_end<0>",
                "best_end<1>",
                *(f"top<{k}>" for k in (16, MAX_TOP_K)),
                f"top_end<{MAX_TOP_K}>",
            ),
            max_registers=80,
        ),
    ]
