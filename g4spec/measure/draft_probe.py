"""Runs a pair on a few built-in prompts to find what costs acceptance.

With the draft's checkpoint it also runs the draft that `convert` writes from it: a loss against
that draft is a fault of the file. Without, it compares acceptance with published drafts of the
kind. It also changes, one at a time, settings that cannot be verified from the tensors or other
keys: one that clearly raises acceptance is wrong in the file, even if the draft works fairly well.
Tensors are tested in the same way (`tensor_changes`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from g4spec import models
from g4spec.errors import G4Error
from g4spec.gguf import GGUF
from g4spec.measure.draft_variants import converted, present_values, variants, write_changed
from g4spec.measure.prompts import prompts
from g4spec.measure.tensor_changes import BetterTensor, TensorChange, better_tensors
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
BETTER_TENSOR = 1.05
"""The same for a changed tensor, which also predicts the target's tokens better."""
CONFIRMED = 2
"""Number of changed tensors, the best, that are measured."""
LOSS = 0.05
"""Loss of tokens per step against the draft converted from the source, from which it is an error.
That draft has the same tensor types, so an intact file loses nothing. Changes that no user would
notice, as Q6_K instead of Q8_0, move tokens per step of the bundled drafts by up to 3 %."""

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
        others: changed setting or tensor -> counts, best first.
        tensors: changed tensors that predict the target's tokens better, best first.
        present: key of each changed setting -> its value in the file, as text.
        interrupted: what was measured before Ctrl-C ended the probe, or "".
    """

    kind: str
    reached: float
    run: AcceptanceCounts
    reference: AcceptanceCounts | None = None
    others: dict[str, AcceptanceCounts] = field(default_factory=dict)
    tensors: list[BetterTensor] = field(default_factory=list)
    present: dict[str, str] = field(default_factory=dict)
    interrupted: str = ""

    @property
    def ok(self) -> bool:
        """True if there are no findings."""
        return not self.findings

    @property
    def better(self) -> list[str]:
        """Changed settings and tensors that clearly raise tokens per step, best first."""
        least = {str(tensor.change): BETTER_TENSOR for tensor in self.tensors}
        return [
            name
            for name, run in self.others.items()
            if run.per_step >= least.get(name, BETTER) * self.run.per_step
        ]

    @property
    def loss(self) -> float:
        """Part of the reference's tokens per step that the file loses; 0 without a reference."""
        return 1 - self.run.per_step / self.reference.per_step if self.reference else 0.0

    @property
    def findings(self) -> list[Finding]:
        """Return what costs acceptance: for each key its best setting, then losses."""
        changes = {str(tensor.change): tensor.change for tensor in self.tensors}
        best = {
            "tensors" if name in changes else name.partition(" = ")[0]: name
            for name in reversed(self.better)
        }
        found = [
            self._better_tensor(changes[name]) if name in changes else self._better_setting(name)
            for name in best.values()
        ]
        if self.reference is not None and self.loss >= LOSS:
            found.append(self._loss_against(self.reference))
        if not found and self.run.per_step < self.reached:
            found.append(
                Finding(
                    "acceptance",
                    f"{self.reached:g} tokens per step or more, as good drafts of this kind reach",
                    f"{self.run.per_step:.2f}, and no changed setting raises it",
                    "check that the draft was trained for this target; pass its checkpoint with "
                    "--against to compare the weights" + self._suspect(),
                )
            )
        return found

    def _suspect(self) -> str:
        """Return where the weights fit worst, or "" if no changed tensor fits better."""
        if not self.tensors:
            return ""
        return f", first those of the layer of {self.tensors[0].change.name}"

    def _better_setting(self, name: str) -> Finding:
        key, _, value = name.partition(" = ")
        return Finding(
            key,
            f"{value}, which reaches {self.others[name].per_step:.2f} tokens per step",
            f"{self.present.get(key, 'another value')}, which reaches {self.run.per_step:.2f}",
            "compare this setting with the checkpoint",
        )

    def _better_tensor(self, change: TensorChange) -> Finding:
        return Finding(
            change.name,
            "the values of the trained draft, which no factor or exchange improves",
            f"values that reach {self.others[str(change)].per_step:.2f} instead of "
            f"{self.run.per_step:.2f} tokens per step if {change.action}",
            "compare the tensors of this layer with the checkpoint (--against)",
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
            "present": self.present,
            "better": self.better,
            "tensors": [asdict(tensor) for tensor in self.tensors],
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
    files = _Files(target, draft, n_predict, count, device, progress)
    interrupted = ""
    with GGUF(draft) as file, tempfile.TemporaryDirectory() as folder:
        try:
            files.measure_all(file, source, Path(folder))
        except KeyboardInterrupt:
            if not files.unchanged:
                raise
            interrupted = files.so_far("conversions of the source" if source else "changes")
        present = present_values(file)
    reference = files.others.pop(SOURCE, None)
    order = sorted(files.others.items(), key=lambda item: -item[1].per_step)
    run, kind = AcceptanceCounts.total(files.unchanged), _kind(draft)
    reached = REACHED.get(kind, LEAST)
    others, tensors = dict(order), files.tensors
    return ProbeResult(kind, reached, run, reference, others, tensors, present, interrupted)


class _Files:
    """Measures a draft and others like it with one target.

    Attributes:
        unchanged: counts of each text of the draft itself.
        others: name -> counts of the other drafts.
        tensors: changed tensors that are better.
    """

    def __init__(
        self,
        target: Path,
        draft: Path,
        n_predict: int,
        count: int,
        device: str,
        progress: Progress,
    ) -> None:
        self.target, self.draft, self.n_predict, self.count = target, draft, n_predict, count
        self.device, self.progress = device, progress
        self.unchanged: list[AcceptanceCounts] = []
        self.others: dict[str, AcceptanceCounts] = {}
        self.tensors: list[BetterTensor] = []
        self._per_file, self._n_files = count * len(CATEGORIES), 1
        self._n_done = self._n_others = 0

    def so_far(self, others: str) -> str:
        """Return what was measured."""
        return (
            f"{len(self.unchanged)} of {self._per_file} texts of the unchanged draft and "
            f"{len(self.others)} of {self._n_others} {others} were measured"
        )

    def measure_all(self, file: GGUF, source: Path | None, folder: Path) -> None:
        """Measure the draft, then the one converted from `source`, or without a source those with
        changed settings and tensors."""
        jobs: dict[str, Callable[[], Path]] = {}
        if source:
            jobs[SOURCE] = partial(converted, file, source, self.target, folder)
        else:
            for name, changes in variants(file):
                jobs[name] = partial(write_changed, file, changes, folder / "variant.gguf")
        self._n_others = len(jobs)
        self._n_files = 1 + len(jobs) + (source is None)  # with the test of tensors
        self.progress(0, self._n_texts)
        self._measure(self.draft, self.unchanged)
        for name, write in jobs.items():
            self._measure_other(name, write)
        if source is None and not self._has_better():
            self._test_tensors(file, folder)

    @property
    def _n_texts(self) -> int:
        return self._per_file * self._n_files

    def _has_better(self) -> bool:
        least = BETTER * AcceptanceCounts.total(self.unchanged).per_step
        return any(run.per_step >= least for run in self.others.values())

    def _measure(self, path: Path, texts: list[AcceptanceCounts]) -> None:
        for text in _measure(self.target, path, self.n_predict, self.count, self.device):
            texts.append(text)
            self._finish_text()

    def _finish_text(self) -> None:
        self._n_done += 1
        self.progress(self._n_done, self._n_texts)

    def _measure_other(self, name: str, write: Callable[[], Path]) -> None:
        """Measure one changed draft; one that this target cannot run is left out."""
        before, texts = self._n_done, list[AcceptanceCounts]()
        try:
            self._measure(write(), texts)
        except G4Error:
            if name == SOURCE:
                raise
            self._n_done = before + self._per_file
            return
        self.others[name] = AcceptanceCounts.total(texts)

    def _test_tensors(self, file: GGUF, folder: Path) -> None:
        """Find changed tensors that are better, and measure the best of them."""
        with Engine.load(self.target, self.draft, n_ctx=None, device=self.device) as engine:
            if not engine.on_cpu or not hasattr(engine.draft, "w"):
                return
            texts = [
                p.encode(engine.tokenizer)
                for p in prompts(engine.tokenizer, CATEGORIES, self.count)
            ]
            for found in better_tensors(engine, texts, self.n_predict):
                self.tensors = found
                self._finish_text()
        best = self.tensors[:CONFIRMED]
        self._n_files += len(best)
        for change in (tensor.change for tensor in best):
            write = partial(write_changed, file, {}, folder / "variant.gguf", change)
            self._measure_other(str(change), write)


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
