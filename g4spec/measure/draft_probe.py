"""Runs a pair on a few built-in prompts and compares acceptance with published drafts of its kind.

It also changes, one at a time, settings that cannot be verified from the tensors or other keys: one
that clearly raises acceptance is wrong in the file, even if the draft works fairly well.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
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
"""Lowest published tokens per step of correct Gemma 4 drafts by kind (z-lab with the 26B-A4B; an
assistant with a quantized 31B). No such figure is known for other kinds."""
LEAST = 1.1
"""Tokens per step below which a draft is useless."""
BETTER = 1.15
"""Factor in tokens per step from which a changed setting counts as better."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class AcceptanceCounts:
    """Numbers of drafted and accepted tokens by position in the proposal."""

    drafted: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def per_step(self) -> float:
        """Mean tokens committed per step, the target's own included."""
        return 1 + sum(self.accepted) / max(self.drafted[0], 1)

    @classmethod
    def total(cls, texts: Sequence[AcceptanceCounts]) -> AcceptanceCounts:
        """Return the sum over texts."""
        drafted = zip(*(text.drafted for text in texts), strict=True)
        accepted = zip(*(text.accepted for text in texts), strict=True)
        return cls(tuple(map(sum, drafted)), tuple(map(sum, accepted)))

    def shares(self) -> list[float]:
        """Return the acceptance at each position."""
        return [a / d for a, d in zip(self.accepted, self.drafted, strict=True) if d]


@dataclass(slots=True)
class ProbeResult:
    """The result of a probe.

    Attributes:
        kind: kind of draft. reached: lowest tokens per step of correct drafts of this kind, or
            LEAST.
        run: counts of the unchanged file. others: changed setting -> counts, best first.
        interrupted: what was measured before Ctrl-C ended the probe, or "".
    """

    kind: str
    reached: float
    run: AcceptanceCounts
    others: dict[str, AcceptanceCounts] = field(default_factory=dict)
    interrupted: str = ""

    @property
    def ok(self) -> bool:
        """True if the draft reaches `reached` and no changed setting is better."""
        return self.run.per_step >= self.reached and not self.better

    @property
    def better(self) -> list[str]:
        """Changed settings that clearly raise tokens per step."""
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
            "interrupted": bool(self.interrupted),
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

    Ctrl-C ends it; the result then has what was measured. Raises KeyboardInterrupt if it comes
    before the first text is finished.

    Args:
        n_predict: tokens per text. count: prompts per category of CATEGORIES.
        progress: called with the number of finished texts, and of all texts.
    """
    kind, others, unchanged = _kind(draft), dict[str, AcceptanceCounts](), list[AcceptanceCounts]()
    per_file, interrupted = count * len(CATEGORIES), ""
    with GGUF(draft) as file, tempfile.TemporaryDirectory() as folder:
        changed = list(variants(file))
        n_texts = per_file * (1 + len(changed))
        progress(0, n_texts)

        def measure(path: Path, texts: list[AcceptanceCounts]) -> None:
            before = per_file * (1 + len(others)) if texts is not unchanged else 0
            for text in _measure(target, path, n_predict, count, device):
                texts.append(text)
                progress(before + len(texts), n_texts)

        try:
            measure(draft, unchanged)
            for name, changes in changed:
                texts = list[AcceptanceCounts]()
                measure(_written(file, changes, Path(folder) / "variant.gguf"), texts)
                others[name] = AcceptanceCounts.total(texts)
        except KeyboardInterrupt:
            if not unchanged:
                raise
            interrupted = (
                f"{len(unchanged)} of {per_file} texts of the unchanged draft and {len(others)} of "
                f"{len(changed)} changed settings were measured"
            )
    order = sorted(others.items(), key=lambda item: -item[1].per_step)
    reached = REACHED.get(kind, LEAST)
    return ProbeResult(kind, reached, AcceptanceCounts.total(unchanged), dict(order), interrupted)


def variants(file: GGUF) -> Iterator[tuple[str, KV]]:
    """Yield a description and the changed keys for each setting whose error would go unnoticed."""
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
) -> Iterator[AcceptanceCounts]:
    """Run a pair on the prompts and yield the counts of each text."""
    engine = Engine.load(target, draft, n_ctx=None, device=device)
    try:
        assert engine.draft is not None
        most = engine.draft.max_tokens
        options = Options(n_predict, draft_max=most, ignore_eos=True)
        for prompt in prompts(engine.tokenizer, CATEGORIES, count):
            run = engine.generate(prompt.encode(engine.tokenizer), options)
            for _ in run:
                pass
            stats = run.stats
            yield AcceptanceCounts(
                tuple(stats.drafted_by_position[:most]), tuple(stats.accepted_by_position[:most])
            )
    finally:
        engine.close()


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
