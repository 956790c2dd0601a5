"""The files that a conversion writes, or would write in a dry run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from g4spec import gguf, quant
from g4spec.convert.plan import Plan, PlannedTensor
from g4spec.gguf import KV, TensorData
from g4spec.gguf.writer import Progress


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a conversion or of a dry run.

    Attributes:
        plan: what was done with every tensor.
        notes: remarks for the user.
        files: the file, or all parts of a split model, with their sizes in bytes.
        seconds: duration.
        written: false after a dry run.
    """

    plan: Plan
    notes: list[str]
    files: dict[Path, int]
    seconds: float
    written: bool

    @property
    def out(self) -> Path:
        """Return the file, or the first part of a split model."""
        return next(iter(self.files))

    @property
    def nbytes(self) -> int:
        """Return the size of all files in bytes."""
        return sum(self.files.values())


@dataclass(frozen=True, slots=True)
class Output:
    """Destination of a conversion.

    Attributes:
        path: the file to write.
        max_size: split the model into parts of at most this many bytes; None for one file.
        dry_run: make the plan only.
        progress: called with bytes done and bytes in total.
        unchanged: called before the file appears; raises if a source has changed.
    """

    path: Path
    max_size: int | None = None
    dry_run: bool = False
    progress: Progress | None = None
    unchanged: Callable[[], None] | None = None

    def write(self, kv: KV, data: list[TensorData]) -> dict[Path, int]:
        """Write the model; return its files with their sizes in bytes."""
        paths = [self.path]
        if self.max_size is None:
            gguf.write(self.path, kv, data, self.progress, self.unchanged)
        else:
            paths, _ = gguf.write_split(
                self.path, kv, data, self.max_size, self.progress, self.unchanged
            )
        return {path: path.stat().st_size for path in paths}

    def planned(self, kv: KV, rows: Iterable[PlannedTensor]) -> dict[Path, int]:
        """Return what `write` would return; raise InputError if it would not fit."""
        data = [TensorData(r.name or "", r.shape, quant.get(r.type).type, ()) for r in rows]
        return gguf.planned_sizes(self.path, kv, data, self.max_size)
