"""Runs a pair on a few shipped prompts and compares acceptance with what drafts of its kind reach.

Then single settings that no tensor and no other key can show to be wrong are tried the other way:
one that raises acceptance clearly names a fault, also in a draft that is still fairly good.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from g4spec import gguf, models
from g4spec.gguf import GGUF, KV, TensorData, Value, ValueType
from g4spec.measure.prompts import prompts
from g4spec.runtime.engine import Engine
from g4spec.runtime.request import Options

CATEGORIES = ("code", "chat", "maths")
REACHED = {"dflash": 2.08, "gemma4-assistant": 2.3}
"""Fewest tokens a step that are published for right Gemma 4 drafts of a kind (z-lab beside the
26B-A4B; an assistant beside a quantized 31B). Of other kinds no such figure is known."""
LEAST = 1.1
"""Tokens a step below which any draft is of no use."""
BETTER = 1.15
"""A setting is named if it commits so many times the tokens."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class AcceptanceCounts:
    """What a draft did: counts by position of the proposal, the first token first."""

    drafted: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def per_step(self) -> float:
        """Tokens committed in a step, the target's own included."""
        return 1 + sum(self.accepted) / max(self.drafted[0], 1)

    def shares(self) -> list[float]:
        """Share of the tokens drafted at each position that was accepted."""
        return [a / d for a, d in zip(self.accepted, self.drafted, strict=True) if d]


@dataclass(slots=True)
class ProbeResult:
    """What a probe found.

    Attributes:
        kind: of draft. reached: fewest tokens a step of right drafts of the kind, or LEAST.
        run: of the file as it is. others: setting -> run of the file with it, best first.
    """

    kind: str
    reached: float
    run: AcceptanceCounts
    others: dict[str, AcceptanceCounts] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether the draft does what its kind does, and no other setting does better."""
        return self.run.per_step >= self.reached and not self.better

    @property
    def better(self) -> list[str]:
        """Settings with which the draft commits clearly more."""
        return [
            name for name, run in self.others.items() if run.per_step >= BETTER * self.run.per_step
        ]

    def json(self) -> dict[str, Any]:
        others = {name: run.per_step for name, run in self.others.items()}
        return {
            "kind": self.kind,
            "ok": self.ok,
            "tokens_per_step": self.run.per_step,
            "reached": self.reached,
            "by_position": self.run.shares(),
            "others": others,
            "better": self.better,
        }


def probe(
    target: Path,
    draft: Path,
    *,
    n_predict: int = 48,
    count: int = 2,
    device: str = "cpu",
    progress: Progress = lambda done, total: None,
) -> ProbeResult:
    """Measure a pair, and the same draft with single settings changed.

    Args:
        n_predict: tokens of each text. count: prompts of each of CATEGORIES.
    """
    measured = _measure(target, draft, n_predict, count, device)
    kind = _kind(draft)
    found = ProbeResult(kind, REACHED.get(kind, LEAST), measured)
    with GGUF(draft) as file, tempfile.TemporaryDirectory() as folder:
        made = list(variants(file))
        for i, (name, changes) in enumerate(made):
            path = _written(file, changes, Path(folder) / "variant.gguf")
            found.others[name] = _measure(target, path, n_predict, count, device)
            progress(i + 1, len(made))
    order = sorted(found.others.items(), key=lambda item: -item[1].per_step)
    found.others = dict(order)
    return found


def variants(file: GGUF) -> Iterator[tuple[str, KV]]:
    """Each setting that may be wrong in silence, the other way: what to call it, and its keys."""
    a = f"{file.get('general.architecture')}."
    ids = file.get(f"{a}target_layers")
    if isinstance(ids, list):
        for step in (1, -1):
            moved = [i + step for i in ids]
            if min(moved) >= 1:
                yield (
                    f"{a}target_layers = {moved}",
                    {f"{a}target_layers": Value(ValueType.ARRAY, moved, ValueType.I32)},
                )
    base = file.get(f"{a}rope.freq_base")
    for other in (1e4, 1e6):
        if isinstance(base, float) and base != other:
            yield (
                f"{a}rope.freq_base = {other:g}",
                {f"{a}rope.freq_base": Value(ValueType.F32, other)},
            )
    causal = file.get("g4spec.dflash.layer_causal")
    if isinstance(causal, list):
        for value in (True, False):
            if causal != [value] * len(causal):
                key = "g4spec.dflash.layer_causal"
                yield (
                    f"{key} = all {str(value).lower()}",
                    {key: Value(ValueType.ARRAY, [value] * len(causal), ValueType.BOOL)},
                )
    scale, width = file.get(f"{a}embedding_scale", 1.0), file.get(f"{a}embedding_length")
    if a.startswith("dflash") and isinstance(width, int):
        other = 1.0 if scale != 1.0 else width**0.5
        yield (
            f"{a}embedding_scale = {other:g}",
            {f"{a}embedding_scale": Value(ValueType.F32, other)},
        )
    for key in (f"{a}norm_before_residual", f"{a}sample_from_anchor"):
        flag = file.get(key)
        if isinstance(flag, bool):
            yield f"{key} = {str(not flag).lower()}", {key: Value(ValueType.BOOL, not flag)}


def _measure(
    target: Path, draft: Path, n_predict: int, count: int, device: str
) -> AcceptanceCounts:
    engine = Engine.load(target, draft, n_ctx=None, device=device)
    try:
        assert engine.draft is not None
        most = engine.draft.max_tokens
        options = Options(n_predict, draft_max=most, ignore_eos=True)
        drafted, accepted = [0] * most, [0] * most
        for prompt in prompts(engine.tokenizer, CATEGORIES, count):
            run = engine.generate(prompt.encode(engine.tokenizer), options)
            for _ in run:
                pass
            for i in range(most):
                drafted[i] += run.stats.drafted_by_position[i]
                accepted[i] += run.stats.accepted_by_position[i]
    finally:
        engine.close()
    return AcceptanceCounts(tuple(drafted), tuple(accepted))


def _kind(draft: Path) -> str:
    with GGUF(draft) as file:
        kind = models.find_kind(file.get("general.architecture"), file.tensors)
    assert kind is not None
    return str(getattr(kind, "NAME", kind.ARCH))


def _written(file: GGUF, changes: KV, path: Path) -> Path:
    kv = {key: file.value(key) for key in file} | changes
    data = [
        TensorData(name, t.shape, t.format.type, [file.raw(name)])
        for name, t in file.tensors.items()
    ]
    gguf.write(path, kv, data)
    return path
