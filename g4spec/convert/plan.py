"""The plan of a conversion: what happens to every source tensor and where every result comes from.

A plan is made before anything is written. Source tensors without a rule, missing tensors and
unexpected shapes are reported together in one error.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from types import ModuleType
from typing import Any, Literal

from g4spec.convert import prequantized
from g4spec.convert.tensors import StoredTensor, same_bytes
from g4spec.errors import InputError, Unsupported
from g4spec.models.spec import Drop, TensorSpec
from g4spec.quant import policy
from g4spec.quant.mix import Mix

MAX_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """The planned conversion of one tensor.

    Attributes:
        action: copy (maybe into another type), make (compute the values), metadata (store as an
            array in a key), or drop.
        source: name in the source, None if there is no source tensor.
        name: name in the result, None if dropped.
        shape: shape in the result (in the source, if dropped), PyTorch order.
        type: type in the result, e.g. "Q8_0"; empty if dropped.
        note: reason for the action or the type, may be empty.
        nbytes: size in the result.
        pairs: head size if rows are reordered, see `TensorSpec.pairs`.
    """

    action: Literal["copy", "make", "metadata", "drop"]
    source: str | None
    name: str | None
    shape: tuple[int, ...]
    type: str
    note: str = ""
    nbytes: int = 0
    pairs: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """All planned tensors, in the order of the result, dropped ones last, and what chose their
    types."""

    tensors: tuple[PlannedTensor, ...]
    chooser: policy.Policy = field(compare=False, repr=False)

    def with_action(self, action: str) -> list[PlannedTensor]:
        """Return the tensors with this action."""
        return [r for r in self.tensors if r.action == action]

    def type_counts(self) -> dict[str, int]:
        """Return type -> number of tensors of the result that have it."""
        kept = [r.type for r in self.tensors if r.action in ("copy", "make")]
        return {t: kept.count(t) for t in sorted(set(kept))}

    def notes(self) -> list[str]:
        """Return a note for a type that is a mix in llama.cpp, and for each type that was asked for
        and that tensors do not have, because their rows do not divide into its blocks."""
        name, counts = self.chooser.mix.name, Counter[tuple[str, str, str]]()
        mix, own = f"{name}_m", list[str]()
        if mix in policy.names():
            own = [f"{name}: one type for all layers; in llama.cpp {name.upper()} is the mix {mix}"]
        for row in self.with_action("copy"):
            if found := self.chooser.replaced(row.name or "", row.shape, row.type):
                counts[found[0], row.type, found[1]] += 1
        return own + [
            f"{asker}: {f'{n} tensors are' if n > 1 else '1 tensor is'} {type}, not {asked}"
            for (asker, type, asked), n in counts.items()
        ]


def build(
    kind: ModuleType,
    config: Any,
    tensors: Mapping[str, StoredTensor],
    mix: Mix,
    n_tokens: int,
    canonical_names: Mapping[str, str] | None = None,
) -> Plan:
    """Plan the conversion of a checkpoint of `kind`.

    Args:
        config: the kind's parsed configuration.
        mix: the requested type or mix for matrices.
        n_tokens: number of tokenizer entries; token tables are cut to this many rows.
        canonical_names: source name -> name in the words of the kind, for sources whose names
            differ by more than a prefix.

    Raises InputError if a tensor is missing, unknown or of another shape.
    """
    return _Builder(kind, config, tensors, mix, n_tokens, canonical_names).build()


class _Builder:
    def __init__(
        self,
        kind: ModuleType,
        config: Any,
        tensors: Mapping[str, StoredTensor],
        mix: Mix,
        n_tokens: int,
        canonical_names: Mapping[str, str] | None,
    ) -> None:
        self.kind, self.config, self.tensors = kind, config, tensors
        self.n_tokens, self.problems, self.rows = n_tokens, list[str](), list[PlannedTensor]()
        self.names: dict[str, str] = {}
        for name in tensors:
            short = canonical_names[name] if canonical_names else canonical_name(name, kind)
            if short in self.names:
                self.problems.append(f"{name} and {self.names[short]} are the same tensor")
            self.names[short] = name
        self.specs = [self._cut_table(spec) for spec in kind.tensors(config)]
        shapes = {s.name: s.shape for s in self.specs if s.source is None or s.source in self.names}
        self.policy = policy.Policy(mix, shapes)

    def build(self) -> Plan:
        if self.config.n_vocab < self.n_tokens:
            raise InputError(
                "the tokenizer has more entries than the token table has rows",
                expected=f"at most {self.config.n_vocab}",
                found=self.n_tokens,
                fix="use the tokenizer that belongs to this model",
            )
        unused = dict(self.names)
        for spec in self.specs:
            unused.pop(spec.source or "", None)
            self._tensor(spec)
        for short, (key, shape) in self._metadata().items():
            unused.pop(short, None)
            self._array(short, key, shape)
        for short, name in unused.items():
            self._plan_unused(short, name)
        if self.problems:
            self._fail()
        return Plan(tuple(self.rows), self.policy)

    def _metadata(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        rule = getattr(self.kind, "metadata_tensors", None)
        return rule(self.config) if rule else {}

    def _cut_table(self, spec: TensorSpec) -> TensorSpec:
        """Cut token tables to one row per token of the tokenizer, as upstream does."""
        if spec.role in ("embed", "output") and spec.shape[0] == self.config.n_vocab:
            return replace(spec, shape=(self.n_tokens, *spec.shape[1:]))
        return spec

    def _tensor(self, spec: TensorSpec) -> None:
        form, note = self.policy.choose(spec.name, spec.shape, spec.role)
        size = form.nbytes(spec.shape, spec.name)
        if spec.source is None:
            self.rows.append(
                PlannedTensor(
                    "make",
                    None,
                    spec.name,
                    spec.shape,
                    form.name.upper(),
                    f"{spec.make} from the configuration",
                    size,
                )
            )
            return
        name = self.names.get(spec.source)
        if name is None:
            if not spec.optional:
                self.problems.append(f"{spec.source} {list(spec.shape)} is missing")
            return
        rows, source_shape = self._source_shape(spec)
        if self._is_usable(name, source_shape, recoded=not spec.make):
            if rows:
                note = f"first {self.n_tokens} of {rows} rows, one per token; {note}".rstrip("; ")
            action: Literal["copy", "make"] = "copy"
            stored = self.tensors[name].format
            if spec.make:
                action, note = "make", "target ids, computed from the offsets to them"
            elif stored and stored.quantized and stored is not form and spec.role != "vector":
                form, note, size = (
                    stored,
                    "quantized already, kept",
                    stored.nbytes(source_shape, name),
                )
            note = "; ".join(
                x for x in (prequantized.loss_note(self.tensors[name], form), note) if x
            )
            if spec.pairs:
                note = f"rows of each head in pairs; {note}".rstrip("; ")
            self.rows.append(
                PlannedTensor(
                    action, name, spec.name, spec.shape, form.name.upper(), note, size, spec.pairs
                )
            )

    def _source_shape(self, spec: TensorSpec) -> tuple[int, tuple[int, ...]]:
        """Return the number of source rows if the table is cut (else 0), and the source shape."""
        cut = spec.role in ("embed", "output") and spec.shape[0] == self.n_tokens
        rows = self.config.n_vocab if cut and self.n_tokens < self.config.n_vocab else 0
        return rows, (rows or spec.shape[0], *spec.shape[1:]) if spec.shape else ()

    def _is_usable(self, name: str, shape: Sequence[int], recoded: bool = False) -> bool:
        """Return whether a source tensor has this shape and a type that can be read; note the
        problem otherwise. `recoded`: its values are converted to another type, unless they are
        quantized already."""
        tensor = self.tensors[name]
        form = tensor.format
        if tensor.shape != tuple(shape):
            self.problems.append(f"{name}: expected {list(shape)}, found {list(tensor.shape)}")
        elif form is None or (recoded and form.decode is None and not form.quantized):
            self.problems.append(f"{name}: type {tensor.dtype} cannot be read")
        else:
            return True
        return False

    def _array(self, short: str, key: str, shape: tuple[int, ...]) -> None:
        name = self.names.get(short)
        if name is None:
            self.problems.append(f"{short} {list(shape)} is missing")
        elif self._is_usable(name, shape):
            integer = self.tensors[name].format.integer  # type: ignore[union-attr]
            self.rows.append(
                PlannedTensor(
                    "metadata",
                    name,
                    key,
                    shape,
                    "I32" if integer else "F32",
                    "upstream has no tensor for it",
                    4 * prod(shape),
                )
            )

    def _plan_unused(self, short: str, name: str) -> None:
        """Plan a source tensor that the kind does not use: drop it by a rule, or report it."""
        drop = next((d for d in self.kind.DROPS if re.fullmatch(d.pattern, short)), None)
        if drop is None:
            self.problems.append(f"{name} {list(self.tensors[name].shape)}: no rule for it")
            return
        self._check_copy(name, drop)
        self.rows.append(
            PlannedTensor("drop", name, None, self.tensors[name].shape, "", drop.reason)
        )

    def _check_copy(self, name: str, drop: Drop) -> None:
        original = self.names.get(drop.same_as or "")
        if original and not same_bytes(self.tensors[name], self.tensors[original]):
            raise Unsupported(f"{name} differs from {original}; only tied tables are supported")

    def _fail(self) -> None:
        shown = self.problems[:MAX_PROBLEMS]
        more = len(self.problems) - len(shown)
        raise InputError(
            f"the tensors do not fit a {self.kind.TITLE} of this configuration: "
            + "; ".join(shown)
            + (f"; and {more} more" if more else "")
        )


def canonical_name(name: str, kind: ModuleType) -> str:
    """Return `name` without the prefix from the kind's PREFIXES, and with a beginning from its
    ALIASES (other trainers' names of the same tensors) replaced."""
    name = name.removeprefix(next((p for p in kind.PREFIXES if name.startswith(p)), ""))
    for alias, usual in getattr(kind, "ALIASES", {}).items():
        if name.startswith(alias):
            return str(usual) + name.removeprefix(alias)
    return name
