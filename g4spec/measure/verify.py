"""Verifies by comparison that neither a draft nor other texts in a batch change a text.

Every case generates twice from the same prompt and sampler: alone without the draft, and with it
and, with `parallel`, in a batch with other cases. The two texts must have the same tokens. It stops
at the first difference. Drafted and accepted tokens are reported too, because a draft that proposes
nothing would also pass. Without a draft, only the batch is verified.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from g4spec import ranges
from g4spec.errors import UsageError
from g4spec.measure.bench import first_difference
from g4spec.measure.prompts import BenchPrompt, check_n_predict
from g4spec.ops.sampling import Sampler
from g4spec.runtime.engine import Engine
from g4spec.runtime.request import Options, Request

LENGTHS: tuple[int | Literal["auto"], ...] = (1, 2, 3, 4, 5, 7, 8, 11, 15, "auto")

SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.7},
    {"temperature": 1.0},
    {"temperature": 1.5},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.0, "top_n_sigma": 1.0},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
)
"""Sampler settings (fields of `Sampler`); each case has its own seed."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison: prompt, draft length and sampler."""

    prompt: BenchPrompt
    length: int | Literal["auto"]
    sampler: Sampler

    def json(self) -> dict[str, Any]:
        return {"prompt": self.prompt.name, "draft_max": self.length, **asdict(self.sampler)}


@dataclass(frozen=True, slots=True)
class MismatchToken:
    """The token of one text at the first difference; all None if that text had already ended."""

    id: int | None
    text: str | None
    logit: float | None


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first difference of two texts. `index`: number of the generated token, from 0."""

    case: Case
    index: int
    plain: MismatchToken
    speculative: MismatchToken

    def __str__(self) -> str:
        def side(token: MismatchToken) -> str:
            return f"{token.id} {token.text!r} (logit {token.logit})"

        s, length = self.case.sampler, self.case.length
        drafted, runs = f"draft length {length}, ", ("without the draft", "with it")
        if length == 0:
            drafted, runs = "", ("alone", "with other texts")
        return (
            f"{self.case.prompt.name}, {drafted}temperature "
            f"{s.temperature:g}, top-k {s.top_k}, top-p {s.top_p:g}, min-p {s.min_p:g}, "
            f"top-n-sigma {s.top_n_sigma:g}, seed {s.seed}: "
            f"token {self.index} is {side(self.plain)} {runs[0]}, "
            f"{side(self.speculative)} {runs[1]}"
        )

    def json(self) -> dict[str, Any]:
        return {**asdict(self), "case": self.case.json()}


@dataclass(slots=True)
class VerifyResult:
    """The result of `verify`.

    Attributes:
        cases, tokens: number compared before the first difference, or in total.
        same_logits: number of tokens whose logit was the same float in both runs.
        cycles, drafted, accepted: totals of the second runs, those with the draft.
        parallel: number of cases per batch in these runs.
        first_drafted, first_accepted: counts of the first tokens of proposals.
        interrupted: True if Ctrl-C stopped it before all cases were compared.
        draft: False if there was none.
    """

    cases: int
    tokens: int
    same_logits: int
    cycles: int
    drafted: int
    accepted: int
    mismatch: Mismatch | None
    notes: list[str]
    parallel: int = 1
    first_drafted: int = 0
    first_accepted: int = 0
    interrupted: bool = False
    draft: bool = True

    @property
    def ok(self) -> bool:
        """True if all texts were the same and a draft, if there was one, proposed tokens."""
        return self.mismatch is None and (self.drafted > 0 or not self.draft)

    def summary(self) -> str:
        """Return a sentence on what was the same."""
        how = "with and without the draft" if self.draft else "alone and with others"
        return (
            f"{self.cases} of {self.cases} texts are the same {how}"
            f"{f', {self.parallel} at once' * (self.parallel > 1)}: "
            f"{self.tokens} tokens, {self.same_logits} of them with the same logit"
        )

    def json(self) -> dict[str, Any]:
        found = self.mismatch.json() if self.mismatch else None
        return {**asdict(self), "mismatch": found, "ok": self.ok}


def cases(
    prompts: Sequence[BenchPrompt],
    count: int,
    most: int,
    seed: int = 0,
    *,
    length: int | Literal["auto"] | None = None,
    temperature: float | None = None,
) -> list[Case]:
    """Return `count` cases that cover all prompts, draft lengths and sampler settings evenly.

    Args:
        most: maximum draft length; 0 without a draft.
        seed: seed of the order; case i samples with seed + i.
        length: use only this draft length, capped at `most`; None: LENGTHS.
        temperature: use only this temperature; None: those of SETTINGS.
    """
    ranges.check(count=count)
    lengths = [n for n in LENGTHS if n == "auto" or n <= most] if most else [0]
    if length is not None:
        lengths = [length if length == "auto" else min(length, most)]
    order = random.Random(seed)
    # Each of the three lists is reshuffled when exhausted, so that combinations vary.
    sources = (prompts, lengths, _settings(temperature))
    shuffled = [_shuffled(list(source), order) for source in sources]
    cases = []
    for i in range(count):
        prompt, length, setting = (next(source) for source in shuffled)
        cases.append(Case(prompt, length, Sampler(**setting, seed=seed + i)))
    return cases


def _settings(temperature: float | None) -> list[dict[str, Any]]:
    """Return SETTINGS, or their distinct variants at one temperature; only greedy at 0."""
    if temperature is None:
        return list(SETTINGS)
    if temperature == 0:
        return [{}]
    all_of_them = [{**setting, "temperature": temperature} for setting in SETTINGS]
    return [s for i, s in enumerate(all_of_them) if s not in all_of_them[:i]]


def _shuffled(values: list[Any], order: random.Random) -> Iterator[Any]:
    """Yield the values in random order, again and again."""
    while True:
        yield from order.sample(values, len(values))


def verify(
    engine: Engine,
    todo: Sequence[Case],
    n_predict: int = 64,
    *,
    parallel: int = 1,
    progress: Progress = lambda done, total: None,
) -> VerifyResult:
    """Compare until the first difference or Ctrl-C, with `parallel` cases per batch in the runs
    with the draft.

    Raises UsageError if there is neither a draft nor a batch or `n_predict` exceeds the context,
    and KeyboardInterrupt if it comes before the first comparison.
    """
    if engine.draft is None and parallel == 1:
        raise UsageError(
            "nothing to verify: one text at a time without a draft",
            fix="pass one with `draft`, or `parallel` 2 to compare texts alone and in a batch",
        )
    check_n_predict(n_predict, engine.n_ctx)
    draft = engine.draft is not None
    verdict = VerifyResult(0, 0, 0, 0, 0, 0, None, [], parallel, draft=draft)
    try:
        _compare(engine, todo, n_predict, verdict, progress)
    except KeyboardInterrupt:
        if not verdict.cases:
            raise
        verdict.interrupted = True
        verdict.notes.append(f"interrupted: {verdict.cases} of {len(todo)} cases were compared")
    return verdict


def _compare(
    engine: Engine, todo: Sequence[Case], n_predict: int, verdict: VerifyResult, progress: Progress
) -> None:
    """Compare until the first difference, and count in `verdict`."""
    parallel = verdict.parallel
    for start in range(0, len(todo), parallel):
        group = todo[start : start + parallel]
        alone = [_text(_submit(engine, case, 0, n_predict)) for case in group]
        together = [_submit(engine, case, case.length, n_predict) for case in group]
        texts = [_text(request) for request in together]
        for case, plain, other, request in zip(group, alone, texts, together, strict=True):
            _count(verdict, request)
            if plain[0] != other[0]:
                verdict.mismatch = _mismatch(engine, case, plain, other)
                return
            verdict.cases += 1
            verdict.tokens += len(plain[0])
            verdict.same_logits += sum(a == b for a, b in zip(plain[1], other[1], strict=True))
            progress(verdict.cases, len(todo))


TokensAndLogits = tuple[list[int], list[float]]
"""Token ids and their logits."""


def _submit(engine: Engine, case: Case, length: int | Literal["auto"], n_predict: int) -> Request:
    # Stop tokens are ignored: a text that ends early would compare little.
    options = Options(n_predict, case.sampler, length, ignore_eos=True)
    return engine.submit(case.prompt.encode(engine.tokenizer), options)


def _text(request: Request) -> TokensAndLogits:
    logits = [value for cycle in request for value in cycle.logits]
    return request.ids, logits


def _count(verdict: VerifyResult, request: Request) -> None:
    """Add the statistics of a run with the draft."""
    verdict.cycles += request.stats.cycles
    verdict.drafted += request.stats.drafted
    verdict.accepted += request.stats.accepted
    verdict.first_drafted += request.stats.drafted_by_position[0]
    verdict.first_accepted += request.stats.accepted_by_position[0]
    verdict.notes += [note for note in request.notes if note not in verdict.notes]


def _mismatch(
    engine: Engine, case: Case, plain: TokensAndLogits, speculative: TokensAndLogits
) -> Mismatch:
    at = first_difference(plain[0], speculative[0])

    def side(text: TokensAndLogits) -> MismatchToken:
        ids, logits = text
        if at >= len(ids):
            return MismatchToken(None, None, None)
        return MismatchToken(ids[at], engine.tokenizer.decode([ids[at]], special=True), logits[at])

    return Mismatch(case, at, side(plain), side(speculative))
