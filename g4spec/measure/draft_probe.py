"""Runs a pair on a few built-in prompts to find what costs acceptance.

With the draft's checkpoint it also runs the draft that `convert` writes from it: a loss against
that draft is a fault of the file. Without, it compares acceptance with published drafts of the
kind. It also changes, one at a time, settings that cannot be verified from the tensors or other
keys: one that clearly raises acceptance is wrong in the file, even if the draft works fairly well.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from g4spec import convert, gguf, models, quant
from g4spec.core import MAX_STEP_ROWS
from g4spec.errors import G4Error
from g4spec.gguf import GGUF, KV, TensorData, Value, ValueType, u32
from g4spec.measure.prompts import prompts
from g4spec.runtime.engine import Engine
from g4spec.runtime.request import Options
from g4spec.validate.rule import Finding

CATEGORIES = ("code", "chat", "maths")
REACHED = {"dflash": 2.08, "gemma4-assistant": 2.3}
"""Lowest published tokens per step of correct Gemma 4 drafts by kind (z-lab with the 26B-A4B; an
assistant with a quantized 31B). No such figure is known for other kinds."""
LEAST = 1.1
"""Tokens per step below which a draft is useless."""
BETTER = 1.1
"""Factor in tokens per step from which a changed setting counts as better."""
LOSS = 0.05
"""Loss of tokens per step against the draft converted from the source, from which it is an error.
Rounding the weights to another type changes tokens per step by up to 3 %."""

SOURCE = "the draft converted from the source"
"""Name of the reference among the measured files."""

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

    def largest_loss(self, reference: AcceptanceCounts) -> tuple[int, float, float]:
        """Return the position, counted from 1, with the largest loss against `reference`, and the
        acceptance there of the reference and of this draft."""
        pairs = [*zip(reference.shares(), self.shares(), strict=False)]
        at = max(range(len(pairs)), key=lambda i: pairs[i][0] - pairs[i][1])
        return at + 1, *pairs[at]


@dataclass(slots=True)
class ProbeResult:
    """The result of a probe.

    Attributes:
        kind: kind of draft. reached: lowest tokens per step of correct drafts of this kind, or
            LEAST.
        run: counts of the unchanged file.
        reference: counts of the draft that `convert` writes from the source, or None.
        others: changed setting -> counts, best first.
        interrupted: what was measured before Ctrl-C ended the probe, or "".
    """

    kind: str
    reached: float
    run: AcceptanceCounts
    reference: AcceptanceCounts | None = None
    others: dict[str, AcceptanceCounts] = field(default_factory=dict)
    interrupted: str = ""

    @property
    def ok(self) -> bool:
        """True if there are no findings."""
        return not self.findings

    @property
    def better(self) -> list[str]:
        """Changed settings that clearly raise tokens per step."""
        return [
            name for name, run in self.others.items() if run.per_step >= BETTER * self.run.per_step
        ]

    @property
    def loss(self) -> float:
        """Part of the reference's tokens per step that the file loses; 0 without a reference."""
        return 1 - self.run.per_step / self.reference.per_step if self.reference else 0.0

    @property
    def findings(self) -> list[Finding]:
        """What costs acceptance: for each key its best setting, then losses."""
        best = {name.partition(" = ")[0]: name for name in reversed(self.better)}
        found = [self._better_setting(name) for name in best.values()]
        if self.reference is not None and self.loss >= LOSS:
            found.append(self._loss_against(self.reference))
        if not found and self.run.per_step < self.reached:
            found.append(
                Finding(
                    "acceptance",
                    f"{self.reached:g} tokens per step or more, as good drafts of this kind reach",
                    f"{self.run.per_step:.2f}, and no changed setting raises it",
                    "check that the draft was trained for this target; pass its checkpoint with "
                    "--against to compare the weights",
                )
            )
        return found

    def _better_setting(self, name: str) -> Finding:
        return Finding(
            name.partition(" = ")[0],
            f"{name.partition(' = ')[2]}, which reaches {self.others[name].per_step:.2f} tokens "
            "per step",
            f"a setting that reaches {self.run.per_step:.2f}",
            "compare this setting with the checkpoint",
        )

    def _loss_against(self, reference: AcceptanceCounts) -> Finding:
        position, expected, found = self.run.largest_loss(reference)
        return Finding(
            "acceptance",
            f"{reference.per_step:.2f} tokens per step, as the draft that `g4spec convert` writes "
            f"from the source; at position {position}: {expected:.0%}",
            f"{self.run.per_step:.2f} ({-self.loss:.0%}); at position {position}: {found:.0%}",
            "correct the keys and tensors that differ from the source, or convert it again",
        )

    def json(self) -> dict[str, Any]:
        reference = self.reference and {
            "tokens_per_step": self.reference.per_step,
            "by_position": self.reference.shares(),
            "loss": self.loss,
        }
        return {
            "kind": self.kind,
            "ok": self.ok,
            "tokens_per_step": self.run.per_step,
            "reached": self.reached,
            "by_position": self.run.shares(),
            "reference": reference,
            "others": {name: run.per_step for name, run in self.others.items()},
            "better": self.better,
            "findings": [f.json() for f in self.findings],
            "interrupted": bool(self.interrupted),
        }


def probe(
    target: Path,
    draft: Path,
    source: Path | None = None,
    *,
    n_predict: int = 48,
    count: int = 2,
    device: str = "cpu",
    progress: Progress = lambda done, total: None,
) -> ProbeResult:
    """Measure a pair, and the draft converted from `source`, or without a source the same draft
    with single settings changed.

    Ctrl-C ends it; the result then has what was measured. Raises KeyboardInterrupt if it comes
    before the first text is finished.

    Args:
        source: checkpoint of the draft, or None.
        n_predict: tokens per text. count: prompts per category of CATEGORIES.
        progress: called with the number of finished texts, and of all texts.
    """
    kind, unchanged, done = _kind(draft), list[AcceptanceCounts](), dict[str, AcceptanceCounts]()
    per_file, interrupted = count * len(CATEGORIES), ""
    with GGUF(draft) as file, tempfile.TemporaryDirectory() as folder:
        changed = [] if source else list(variants(file))
        jobs: dict[str, Callable[[], Path]] = {
            name: partial(_written, file, changes, Path(folder) / "variant.gguf")
            for name, changes in changed
        }
        if source:
            jobs[SOURCE] = partial(converted, file, source, target, Path(folder))
        n_texts = per_file * (1 + len(jobs))
        progress(0, n_texts)

        def measure(path: Path, texts: list[AcceptanceCounts]) -> None:
            before = per_file * (1 + len(done)) if texts is not unchanged else 0
            for text in _measure(target, path, n_predict, count, device):
                texts.append(text)
                progress(before + len(texts), n_texts)

        try:
            measure(draft, unchanged)
            for name, write in jobs.items():
                texts = list[AcceptanceCounts]()
                try:
                    measure(write(), texts)
                except G4Error:
                    if name == SOURCE:
                        raise
                    continue  # a setting that is impossible with this target
                done[name] = AcceptanceCounts.total(texts)
        except KeyboardInterrupt:
            if not unchanged:
                raise
            what = "conversions of the source" if source else "changed settings"
            interrupted = (
                f"{len(unchanged)} of {per_file} texts of the unchanged draft and {len(done)} of "
                f"{len(jobs)} {what} were measured"
            )
    reference = done.pop(SOURCE, None)
    order = sorted(done.items(), key=lambda item: -item[1].per_step)
    run, reached = AcceptanceCounts.total(unchanged), REACHED.get(kind, LEAST)
    return ProbeResult(kind, reached, run, reference, dict(order), interrupted)


def converted(file: GGUF, source: Path, target: Path, folder: Path) -> Path:
    """Return the draft that `convert` writes from `source` with the tensor types of `file`; a GGUF
    source in this program's own format is returned itself.

    Types that cannot be written become Q8_0.
    """
    with convert.detect(source) as found:
        if isinstance(found.source, GGUF) and found.dialect is None:
            return found.source.path
    names: dict[str, list[str]] = {}
    for name, t in file.tensors.items():
        if t.format.name in quant.writable_names():
            names.setdefault(t.format.name, []).append(re.escape(name))
    kept = [f"^({'|'.join(group)})$={form}" for form, group in names.items()]
    out = folder / "converted.gguf"
    convert.convert(source, out, target=target, tensor_types=kept)
    return out


def variants(file: GGUF) -> Iterator[tuple[str, KV]]:
    """Yield a description and the changed keys for each setting whose error would go unnoticed."""
    a = f"{file.get('general.architecture')}."
    ids = file.get(f"{a}target_layers")
    if isinstance(ids, list):
        for moved in _moved(ids):
            yield (
                f"{a}target_layers = {moved}",
                {f"{a}target_layers": Value(ValueType.ARRAY, moved, ValueType.I32)},
            )
    block = file.get(f"{a}block_size")
    if isinstance(block, int) and 2 * block <= MAX_STEP_ROWS:
        yield f"{a}block_size = {2 * block}", {f"{a}block_size": u32(2 * block)}
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


def _moved(ids: list[int]) -> Iterator[list[int]]:
    """Yield target layers with all ids, then single ids, moved by one; ids stay unique and in
    order."""
    moves = [[step] * len(ids) for step in (1, -1)]
    moves += [
        [step * (i == k) for i in range(len(ids))] for k in range(len(ids)) for step in (1, -1)
    ]
    for move in moves:
        moved = [i + m for i, m in zip(ids, move, strict=True)]
        if min(moved) >= 1 and moved == sorted(set(moved)):
            yield moved


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
