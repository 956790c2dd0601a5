"""Answers in company against the same alone: drawn requests, a crowded engine, and the comparison.

`tests/cpu/test_batch_invariance.py` runs some, `benchmarks/batch_invariance.py` thousands.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from g4spec.core import PAGE, Cycle
from g4spec.errors import InputError
from g4spec.ops.sampling import Sampler
from g4spec.runtime.engine import Engine
from g4spec.runtime.request import Options, Request
from tests.support import memory_engine
from tests.support import memory_models as mm
from tests.support.memory_engine import DRAFTS

N_CTX = 1536
PREFIX_BYTES = 1 << 22
PARALLEL = (1, 3, 8, 32)

KINDS: tuple[str | None, ...] = (None, *DRAFTS)
"""Every kind of draft, and none."""


class Alternating:
    """A mask that depends on the text so far: tokens of every residue but one, which its length and
    newest token choose."""

    def __init__(self, modulus: int, vocab: int) -> None:
        self.modulus, self.vocab = modulus, vocab

    def __call__(self, output: Sequence[int]) -> torch.Tensor | None:
        if len(output) % 5 == 4:
            return None
        refused = (len(output) + (output[-1] if output else 0)) % self.modulus
        return torch.arange(self.vocab) % self.modulus != refused


@dataclass(frozen=True)
class Ask:
    """A request that is made.

    Attributes:
        wait: steps of the engine between the request before it and this one.
        patience: steps after which it is cancelled, or None.
    """

    prompt: list[int]
    options: Options
    wait: int
    patience: int | None


@dataclass
class Answer:
    """What came of a request. `proposals`, `sizes`: drafted and chosen tokens of each cycle."""

    ids: list[int] = field(default_factory=list)
    logits: list[float] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    proposals: list[list[int]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    text: str = ""
    reason: str = ""

    @classmethod
    def of(cls, request: Request) -> Answer:
        """Run a request to its end; `reason` is the error that ended it, if one did."""
        cycles: list[Cycle] = []
        error = None
        try:
            for cycle in request:
                cycles.append(cycle)
        except InputError as found:
            error = f"error: {found}"
        made = cls(text=request.text, reason=error or request.stats.stop_reason)
        for cycle in cycles:
            made.ids += cycle.tokens
            made.logits += cycle.logits
            made.logprobs += cycle.logprobs
            made.proposals.append(cycle.drafted)
            made.sizes.append(len(cycle.tokens))
        assert made.ids == request.ids
        return made


def draw(
    rng: random.Random, count: int, longest: int = 200, vocab: int = mm.V, growing: float = 0.0
) -> list[Ask]:
    """`count` requests of at most `longest` tokens each. Some prompts share 512 tokens or more.

    Args:
        growing: share of texts that need two pages more than at admission, which keeps one for each
            (where `longest` is over PAGE + 32), so that a small pool preempts.
    """
    bases = [tokens(rng, 1100, vocab) for _ in range(2)]
    asks = [
        Ask(
            prompt=_prompt(rng, bases, vocab),
            options=_options(rng, longest, vocab),
            wait=rng.choice((0, 0, 0, 0, 1, 4)),
            patience=rng.choice((0, 2, 9, 40)) if rng.random() < 0.15 else None,
        )
        for _ in range(count)
    ]
    return [_grown(rng, ask, longest, vocab) if rng.random() < growing else ask for ask in asks]


def _grown(rng: random.Random, ask: Ask, longest: int, vocab: int) -> Ask:
    prompt = [2, *tokens(rng, PAGE * rng.choice((1, 2, 3, 3, 4)) - rng.randint(17, 33), vocab)]
    return replace(
        ask,
        prompt=prompt,
        options=replace(
            ask.options, n_predict=longest - rng.randrange(40), ignore_eos=True, stop=()
        ),
    )


def _log_uniform(rng: random.Random, most: int) -> int:
    return int(math.exp(rng.uniform(0, math.log(most + 1))))


def tokens(rng: random.Random, count: int, vocab: int = mm.V) -> list[int]:
    """Random tokens in which short runs come again."""
    runs = [[rng.randrange(5, vocab) for _ in range(rng.randint(2, 9))] for _ in range(8)]
    out: list[int] = []
    while len(out) < count:
        out += rng.choice(runs) if rng.random() < 0.7 else [rng.randrange(5, vocab)]
    return out[:count]


def _prompt(rng: random.Random, bases: list[list[int]], vocab: int) -> list[int]:
    if rng.random() < 0.35:
        shared = rng.choice((512, 513, 600, 1024, 1030))
        return [2, *rng.choice(bases)[: shared - 1], *tokens(rng, rng.randint(1, 40), vocab)]
    return [2, *tokens(rng, _log_uniform(rng, 600) - 1, vocab)]


def _options(rng: random.Random, longest: int, vocab: int) -> Options:
    sampler = Sampler(seed=rng.randrange(2**40))
    if rng.random() < 0.7:
        sampler = replace(
            sampler,
            temperature=rng.choice((0.5, 1.0, 1.5)),
            top_k=rng.choice((0, 0, 20)),
            top_p=rng.choice((1.0, 0.9)),
            min_p=rng.choice((0.0, 0.05)),
        )
    if rng.random() < 0.25:
        sampler = replace(
            sampler,
            repetition_penalty=rng.choice((1.0, 1.3)),
            presence_penalty=rng.choice((0.0, 0.8)),
            frequency_penalty=rng.choice((0.0, 0.4)),
        )
    if rng.random() < 0.2:
        biased = rng.sample(range(vocab), 3)
        values = (-math.inf, rng.uniform(-9, 9), 4.0)
        sampler = replace(sampler, logit_bias=tuple(zip(biased, values, strict=True)))
    letters = [chr(32 + i) for i in range(90)]
    return Options(
        n_predict=_log_uniform(rng, longest),
        sampler=sampler,
        draft_max=rng.choice((0, 1, 2, 3, 5, 8, 15, "auto")),
        stop=tuple(rng.sample(letters, 2)) if rng.random() < 0.2 else (),
        ignore_eos=rng.random() < 0.7,
        logprobs=rng.choice((None, None, 0, 3, vocab + 5)),
        n=rng.choice((1, 1, 1, 1, 2)),
        mask=Alternating(rng.randint(2, 7), vocab) if rng.random() < 0.15 else None,
    )


@dataclass
class Crowd:
    """What happened in an engine.

    Attributes:
        answers: of each request, and of each of its `Options.n` texts.
        most_live: texts that were live at once.
    """

    answers: list[list[Answer]]
    requests: list[Request]
    most_live: int

    @property
    def preempted(self) -> int:
        return sum(r.stats.preempted for request in self.requests for r in request.choices)

    @property
    def cached(self) -> int:
        """Prompts that began with a prefix hit."""
        return sum(r.stats.cached_tokens > 0 for request in self.requests for r in request.choices)

    @property
    def cancelled(self) -> int:
        return sum(a.reason == "cancelled" for answers in self.answers for a in answers)


def together(engine: Engine, asks: Sequence[Ask]) -> Crowd:
    """Make requests while others run, and cancel some; ends when nothing is left to do."""
    requests: list[Request] = []
    doomed: list[tuple[int, Request]] = []
    step = due = most = 0
    waiting = list(asks)
    while True:
        while waiting and step >= due:
            ask = waiting.pop(0)
            requests.append(engine.submit(ask.prompt, ask.options))
            if ask.patience is not None:
                doomed.append((step + ask.patience, requests[-1]))
            due = step + (waiting[0].wait if waiting else 0)
        for _, request in (d for d in doomed if d[0] <= step):
            for choice in request.choices:
                choice.cancel()
        if not engine.step() and not waiting:
            break
        most = max(most, len(engine.scheduler.running))
        step += 1
    answers = [[Answer.of(r) for r in request.choices] for request in requests]
    return Crowd(answers, requests, most)


class Engines:
    """Where engines come from: small random models in memory, on the CPU.

    Attributes:
        vocab: of the target.
    """

    vocab = mm.V

    def alone(self, kind: str | None) -> Engine:
        """Make one for a text at a time, without a prefix cache."""
        return memory_engine.engine(DRAFTS[kind] if kind else None, n_ctx=N_CTX)

    def crowded(self, kind: str | None, parallel: int, tight: bool) -> Engine:
        """Make one with a prefix cache; `tight`: its pool is too small for all that may be live."""
        make, pool = DRAFTS[kind] if kind else None, pool_of(parallel, tight)
        return memory_engine.engine(
            make, n_ctx=N_CTX, parallel=parallel, pool=pool, prefix_bytes=PREFIX_BYTES
        )


def pool_of(parallel: int, tight: bool) -> int:
    """Tokens of the pool of a crowded engine."""
    return N_CTX if tight else N_CTX * min(parallel, 6)


IN_MEMORY = Engines()


class Alone:
    """The same requests one at a time, each as if the engine were new: nothing is reused."""

    def __init__(self, kind: str | None = None, engines: Engines = IN_MEMORY) -> None:
        self._engine = engines.alone(kind)

    def __call__(self, ask: Ask, choice: int = 0) -> Answer:
        seed = ask.options.sampler.seed + choice
        options = replace(ask.options, n=1, sampler=replace(ask.options.sampler, seed=seed))
        request = self._engine.generate(ask.prompt, options)
        return Answer.of(request)


@dataclass
class Verdict:
    """What a round of company showed. `wrong`: what differed, and where."""

    answers: int
    tokens: int
    preempted: int
    cached: int
    cancelled: int
    most_live: int
    drafted: int
    accepted: int
    wrong: list[str]


def judge(
    kind: str | None,
    parallel: int,
    seed: str,
    count: int,
    longest: int,
    *,
    tight: bool = False,
    plain: Alone | None = None,
    engines: Engines = IN_MEMORY,
) -> Verdict:
    """Draw `count` requests from a seed, answer them in company and alone, and compare.

    Args:
        plain: answers without a draft, if there is such an engine already.
    """
    asks = draw(random.Random(seed), count, longest, engines.vocab, growing=0.6 * tight)
    engine = engines.crowded(kind, parallel, tight)
    crowd = together(engine, asks)
    wrong = [f"{name}: {n}" for name, n in left_over(engine).items() if n]
    plain = plain or Alone(engines=engines)
    same = Alone(kind, engines) if kind else None
    for number, (ask, answers) in enumerate(zip(asks, crowd.answers, strict=True)):
        for choice, got in enumerate(answers):
            found = difference(got, plain(ask, choice))
            if same is not None and ask.options.draft_max != "auto":  # which goes by the clock
                found = found or proposals_differ(got, same(ask, choice))
            if found:
                wrong.append(
                    f"{kind}, {parallel} at once{', tight' * tight}, seed {seed}, "
                    f"request {number}: {found}"
                )
    stats = [r.stats for request in crowd.requests for r in request.choices]
    return Verdict(
        answers=len(stats),
        tokens=sum(s.tokens for s in stats),
        preempted=crowd.preempted,
        cached=crowd.cached,
        cancelled=crowd.cancelled,
        most_live=crowd.most_live,
        drafted=sum(s.drafted for s in stats),
        accepted=sum(s.accepted for s in stats),
        wrong=wrong,
    )


def left_over(engine: Engine) -> dict[str, int]:
    """What an engine without requests still holds."""
    engine.prefix.clear()
    pool = engine.pool
    return {
        "pages": pool.n_pages - pool.n_free,
        "slots": pool.space.n_slots - len(pool.free_slots),
        "pages in the table": int((pool.space.table != 0).sum()),
        "tasks": len(engine.scheduler.running) + len(engine.scheduler.waiting),
    }


def difference(got: Answer, want: Answer) -> str | None:
    """How an answer in company differs from the same alone, or None. One that was cancelled is a
    beginning of it."""
    if got.reason == "cancelled":
        n = len(got.ids)
        whole = (got.ids, got.logits, got.logprobs)
        part = (want.ids[:n], want.logits[:n], want.logprobs[: len(got.logprobs)])
        return None if whole == part else f"cancelled: {whole} is not the beginning {part}"
    for name in ("ids", "logits", "logprobs", "text", "reason"):
        a, b = getattr(got, name), getattr(want, name)
        if a != b:
            return f"{name}: {a} in company, {b} alone"
    return None


def proposals_differ(got: Answer, want: Answer) -> str | None:
    """How proposals in company differ from those alone, or None."""
    a, b = got.proposals, want.proposals[: len(got.proposals)]
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
    return None if at is None else f"proposal {at}: {a[at]} in company, {b[at]} alone"
