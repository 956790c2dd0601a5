"""Comparison of a GGUF file with the checkpoint it was converted from, tensor by tensor.

Tensors of a type that can represent the source's values must equal them exactly. For other types,
no error may exceed the rounding error of the format.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from g4spec.convert import derived, experts, provenance, sources
from g4spec.convert.plan import canonical_name
from g4spec.convert.rewrite import computed_tensor, stored_tensor
from g4spec.convert.tensors import StoredTensor, same_bytes, worker_pool
from g4spec.errors import InputError
from g4spec.gguf import GGUF
from g4spec.models.spec import TensorSpec, factors_name
from g4spec.quant import Format
from g4spec.validate import rounding

BLOCK_VALUES = 1 << 18

HOLDS = {"f32": ("f32", "f16", "bf16"), "f16": ("f16",), "bf16": ("bf16",)}
"""Type in the file -> source types whose values it holds exactly."""
IMATRIX_KEYS = ("quantize.imatrix.file", "quantize.imatrix.entries_count")


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference between one tensor and its source.

    Attributes:
        max_abs: largest error; `relative_rms`: RMS of the error over RMS of the source.
        usual_rms: see the function of this name; 0 if `exact`.
        first: index of the first value whose error exceeds the bound of its type, or None.
        expected, found: the source's and the file's value at `first`.
        exact: whether the type can represent the source's values, so no error is allowed.
    """

    name: str
    type: str
    source: str
    max_abs: float
    relative_rms: float
    exact: bool
    usual_rms: float | None = None
    first: tuple[int, ...] | None = None
    expected: float = 0.0
    found: float = 0.0

    def json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "type": self.type,
            "source": self.source,
            "exact": self.exact,
            "max_abs": self.max_abs,
            "relative_rms": self.relative_rms,
            "usual_rms": self.usual_rms,
            "first": self.first,
        }


@dataclass(slots=True)
class Comparison:
    """The comparison of all tensors.

    Attributes:
        other: what the source is if it is not the file's, as another kind of model; else "".
        unused: source tensors that are not in the file and are not dropped on purpose.
        sourceless: tensors of the file that are not in the source.
        shapes: name -> (shape in the source, shape in the file), where they differ.
        refused: tensor -> why its source is invalid.
        digest: digest of a checkpoint folder, as recorded by a conversion.
    """

    other: str = ""
    tensors: list[Difference] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    sourceless: list[str] = field(default_factory=list)
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    digest: str = ""


class Converted(Protocol):
    """A file and the checkpoint it was converted from (`g4spec.validate.subject.Subject`)."""

    source: Path | None
    progress: Callable[[int, int], None] | None

    @property
    def kind(self) -> ModuleType | None: ...
    @property
    def config(self) -> Any: ...
    @property
    def specs(self) -> Mapping[str, TensorSpec]: ...
    @property
    def open_file(self) -> GGUF: ...
    def shape(self, name: str) -> tuple[int, ...] | None: ...
    def numbers(self, key: str) -> Any: ...
    def text(self, key: str) -> str | None: ...


def compare(s: Converted) -> Comparison:
    """Compare the file of `s` with its source. Raise InputError if the source cannot be read."""
    assert s.source is not None and s.kind is not None
    found = sources.detect(s.source)
    out = Comparison()
    if found.kind is not s.kind:
        out.other = found.kind.TITLE
        return out
    if isinstance(found.source, GGUF):
        with found.source as file:
            tensors = {name: stored_tensor(file, name) for name in file.tensors}
            _Compare(s, tensors, True, out).run()
    else:
        out.digest = provenance.digest(found.source)
        names = {canonical_name(n, found.kind): t for n, t in found.source.tensors.items()}
        _Compare(s, names, False, out).run()
    out.other = _other_model(out, s.text(provenance.DIGEST) or "")
    return out


def _other_model(c: Comparison, recorded: str) -> str:
    """Describe a source of the file's kind that is another model; "" if it can be the file's own.

    More than half of the tensors must differ. Without a digest of the source in the file, only
    values that have nothing to do with each other count (independent ones have an error of 1.41):
    a conversion with a wrong scale differs everywhere and has the right source.
    """
    if recorded and recorded == c.digest:
        return ""
    differing = [t for t in c.tensors if t.first is not None]
    missing, reshaped = len(c.sourceless), len(c.shapes)
    total = len(c.tensors) + missing + reshaped
    known = recorded and c.digest
    counted = [t for t in differing if known or t.relative_rms > rounding.UNRELATED]
    if 2 * (len(counted) + missing + reshaped) <= total:
        return ""
    return (
        f"another model or revision: {len(differing) + missing + reshaped} of {total} tensors "
        f"differ ({missing} missing there, {reshaped} of another shape, {len(differing)} with "
        "other values)"
    )


Job = tuple[str, Format, NDArray[np.uint8], StoredTensor, NDArray[np.float32] | None]
"""Arguments of `difference`."""


class _Compare:
    """`same_names`: the source is a GGUF, whose tensors need no translation."""

    def __init__(
        self, s: Converted, source: Mapping[str, StoredTensor], same_names: bool, out: Comparison
    ) -> None:
        self.s, self.source, self.same_names, self.out = s, source, same_names, out
        self.weighted = any(key in s.open_file for key in IMATRIX_KEYS)

    def run(self) -> None:
        left = set(self.source)
        jobs: list[Job] = []
        for spec in self.s.specs.values():
            info = self.s.open_file.tensors.get(spec.name)
            name = spec.name if self.same_names else spec.source
            left -= {name or "", experts.fused_name(name or "")}
            source = self._source(spec, name)
            if info is None or self._is_factor(spec.name):
                continue  # reported by G4-TNS-001, or compared with the weight
            if source is None or source.format is None:
                if spec.name not in self.out.refused:
                    self.out.sourceless.append(spec.name)
            elif source.shape != info.shape:
                self.out.shapes[spec.name] = (source.shape, info.shape)
            else:
                factors = self._factors(spec.name, source)
                raw = self.s.open_file.raw(spec.name)
                form = info.format
                if self.weighted and form.weighted and form is not source.format:
                    form = replace(form, bound=None)  # an encoder may prefer other values
                jobs.append((spec.name, form, raw, source, factors))
        jobs += list(self._arrays(left))
        self.out.unused = sorted(n for n in left if not self._dropped(n))
        self._differences(jobs)

    def _source(self, spec: TensorSpec, name: str | None) -> StoredTensor | None:
        """Return the source tensor, transformed as a conversion would."""
        tensor = self.source.get(name or "")
        fused = self.source.get(experts.fused_name(name or ""))
        if tensor is None and name and fused is not None:
            tensor = experts.half(name, fused)
        if not self.same_names and spec.make == "rope_freqs":
            return _made(spec.name, derived.rope_freqs(self.s.config))
        if self.same_names or tensor is None or tensor.format is None:
            return tensor
        if spec.make == "absolute_d2t":
            return self._d2t(spec.name, tensor)
        if spec.pairs and tensor.shape == spec.shape:
            return derived.interleave_head_rows(tensor, spec.pairs)
        rows = (self.s.shape(spec.name) or (0,))[0]
        if spec.role in ("embed", "output") and 0 < rows < tensor.shape[0]:
            return tensor.first_rows(rows)  # token tables are cut to the tokenizer
        return tensor

    def _is_factor(self, name: str) -> bool:
        """Return True for gains of experts of type NVFP4: converters multiply them by factors."""
        weight = self.s.open_file.tensors.get(f"{name.removesuffix('scale')}weight")
        return name.endswith("_exps.scale") and weight is not None and weight.format.name == "nvfp4"

    def _factors(self, name: str, source: StoredTensor) -> NDArray[np.float32] | None:
        """Return by what the values of each matrix of an NVFP4 tensor are multiplied, without the
        gains of the source; None for other tensors."""
        file, scale = self.s.open_file, factors_name(name)
        if file.tensors[name].format.name != "nvfp4" or source.format is file.tensors[name].format:
            return None
        if scale not in file.tensors:
            return None
        found: NDArray[np.float32] = file.array(scale).reshape(-1)
        own = self.s.specs.get(scale)
        gains = self.source.get((scale if self.same_names else own.source or "") if own else "")
        with np.errstate(divide="ignore", invalid="ignore"):
            return found if gains is None else found / gains.array().reshape(-1)

    def _d2t(self, name: str, tensor: StoredTensor) -> StoredTensor | None:
        try:
            ids = derived.absolute_d2t(tensor, self.source.get("t2d"), self.s.config.n_vocab)
        except InputError as error:
            self.out.refused[name] = str(error)
            return None
        return _made(name, ids)

    def _arrays(self, left: set[str]) -> Iterator[Job]:
        """Yield comparison jobs of source tensors that are stored as metadata."""
        rule = getattr(self.s.kind, "metadata_tensors", None)
        for name, (key, shape) in (rule(self.s.config) if rule else {}).items():
            source, values = self.source.get(name), self.s.numbers(key)
            left.discard(name)
            if source is None or source.format is None or values is None:
                if not self.same_names:
                    self.out.sourceless.append(key)
                continue
            if values.size != prod(source.shape):
                self.out.shapes[key] = (source.shape, shape)
                continue
            if source.format.integer:
                values, source = values.astype(np.int64), _made(name, source.array())
            mine = _made(key, values.reshape(source.shape))
            assert mine.format is not None
            yield key, mine.format, mine.raw, source, None

    def _dropped(self, name: str) -> bool:
        """Return True if a conversion drops this source tensor; it refuses a copy that differs."""
        drops = () if self.same_names else getattr(self.s.kind, "DROPS", ())
        drop = next((d for d in drops if re.fullmatch(d.pattern, name)), None)
        if drop is None:
            return False
        original = self.source.get(drop.same_as or "")
        return original is None or same_bytes(self.source[name], original)

    def _differences(self, jobs: list[Job]) -> None:
        total, done = sum(job[2].size for job in jobs), 0
        pool: ThreadPoolExecutor
        with worker_pool() as pool:
            for job, found in zip(jobs, pool.map(lambda j: difference(*j), jobs), strict=True):
                self.out.tensors.append(found)
                done += job[2].size
                if self.s.progress is not None:
                    self.s.progress(done, total)


def _made(name: str, values: NDArray[Any]) -> StoredTensor:
    """Wrap computed values as a stored tensor."""
    if values.dtype.kind == "f":
        return computed_tensor(name, values.astype(np.float32), "f32")
    return computed_tensor(name, values.astype(np.int64), "i64")


def difference(
    name: str,
    form: Format,
    raw: NDArray[np.uint8],
    source: StoredTensor,
    factors: NDArray[np.float32] | None = None,
) -> Difference:
    """Compare one tensor with its source, in blocks of rows. `factors`: [M], by what the values of
    each of its M matrices are multiplied."""
    assert source.format is not None
    exact = form.integer or source.format.name in HOLDS.get(form.name, ()) or form is source.format
    width = source.shape[-1] if source.shape else 1
    rows = prod(source.shape[:-1])
    mine = raw.reshape(rows, -1)
    step = max(1, BLOCK_VALUES // max(width, 1))
    worst = error = power = 0.0
    first: tuple[int, float, float] | None = None
    largest = (0, 0.0, 0.0)
    by = None if factors is None else np.repeat(factors, rows // len(factors))[:, None]
    for start in range(0, rows, step):
        shape = (min(step, rows - start), width)
        got = form.array(mine[start : start + step], shape)
        got = got if by is None else got * by[start : start + step]
        want = source.format.array(source.rows(start, start + shape[0]), shape)
        off = np.abs(got - want) if not form.integer else np.abs(got.astype(float) - want)
        allowed = 0.0 if exact else rounding.allowed(form, want, source.format)
        error += float(np.square(off, dtype=np.float64).sum())
        power += float(np.square(want, dtype=np.float64).sum())
        if off.size and float(off.max()) > worst:
            at = int(np.argmax(off))
            worst = float(off.reshape(-1)[at])
            largest = _values(start * width, at, want, got)
        bad = ~(off <= allowed)  # also where an error is NaN
        if exact:
            bad &= ~(np.isnan(got) & np.isnan(want)) & (got != want)
        if first is None and bad.any():
            first = _values(start * width, int(np.argmax(bad)), want, got)
    rms = math.sqrt(error / power) if power else (0.0 if not error else math.inf)
    if first is None and not exact and rms > rounding.largest_rms(form):
        first = largest
    where = None
    if first is not None:
        where = tuple(int(i) for i in np.unravel_index(first[0], source.shape or (1,)))
    return Difference(
        name,
        form.name.upper(),
        source.dtype,
        worst,
        rms,
        exact,
        0.0 if exact else rounding.usual_rms(form),
        where,
        *(first[1:] if first else ()),
    )


def _values(start: int, at: int, want: NDArray[Any], got: NDArray[Any]) -> tuple[int, float, float]:
    """Return the index and both values of entry `at` of a block that begins at `start`."""
    return start + at, float(want.reshape(-1)[at]), float(got.reshape(-1)[at])
