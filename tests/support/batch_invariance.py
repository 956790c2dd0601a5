"""Batch invariance: random requests run in one batched engine are compared with single runs.

`tests/cpu/test_batch_invariance.py` runs a few, `benchmarks/batch_invariance.py` thousands.
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
"""Every kind of draft, and no draft."""


class AlternatingMask:
    """A mask that depends on the output so far: it forbids the tokens of one residue class, chosen
    by the length of the output and its newest token."""

    def __init__(self, modulus: int, vocab: int) -> None:
        self.modulus, self.vocab = modulus, vocab

    def __call__(self, output: Sequence[int]) -> torch.Tensor | None:
        if len(output) % 5 == 4:
            return None
        refused = (len(output) + (output[-1] if output else 0)) % self.modulus
        return torch.arange(self.vocab) % self.modulus != refused


@dataclass(frozen=True)
class RequestSpec:
    """A request to submit.

    Attributes:
        delay: number of steps between the previous request and this one.
        cancel_after: number of steps after which the request is cancelled, or None.
    """

    prompt: list[int]
    options: Options
    delay: int
    cancel_after: int | None


@dataclass
class Output:
    """The output of a request. `proposals`: drafted tokens per step; `sizes`: number of new tokens
    per cycle."""

    ids: list[int] = field(default_factory=list)
    logits: list[float] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    proposals: list[list[int]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    text: str = ""
    reason: str = ""

    @classmethod
    def of(cls, request: Request) -> Output:
        """Run a request to its end; `reason` is the stop reason or the error."""
        cycles: list[Cycle] = []
        error = None
        try:
            for cycle in request:
                cycles.append(cycle)
        except InputError as found:
            error = f"error: {found}"
        outcome = cls(text=request.text, reason=error or request.stats.stop_reason)
        for cycle in cycles:
            outcome.ids += cycle.tokens
            outcome.logits += cycle.logits
            outcome.logprobs += cycle.logprobs
            outcome.proposals.append(cycle.drafted)
            outcome.sizes.append(len(cycle.tokens))
        assert outcome.ids == request.ids
        return outcome


def random_requests(
    rng: random.Random, count: int, longest: int = 200, vocab: int = mm.V, growing: float = 0.0
) -> list[RequestSpec]:
    """Return `count` random requests of at most `longest` tokens each. Some prompts share a prefix
    of 512 tokens or more.

    Args:
        growing: fraction of requests that need two more pages than at admission (if `longest` is
            over PAGE + 32), so that a small pool preempts.
    """
    bases = [tokens(rng, 1100, vocab) for _ in range(2)]
    specs = [
        RequestSpec(
            prompt=_prompt(rng, bases, vocab),
            options=_options(rng, longest, vocab),
            delay=rng.choice((0, 0, 0, 0, 1, 4)),
            cancel_after=rng.choice((0, 2, 9, 40)) if rng.random() < 0.15 else None,
        )
        for _ in range(count)
    ]
    return [
        _growing(rng, spec, longest, vocab) if rng.random() < growing else spec for spec in specs
    ]


def _growing(rng: random.Random, spec: RequestSpec, longest: int, vocab: int) -> RequestSpec:
    prompt = [2, *tokens(rng, PAGE * rng.choice((1, 2, 3, 3, 4)) - rng.randint(17, 33), vocab)]
    return replace(
        spec,
        prompt=prompt,
        options=replace(
            spec.options, n_predict=longest - rng.randrange(40), ignore_eos=True, stop=()
        ),
    )


def _log_uniform(rng: random.Random, most: int) -> int:
    return int(math.exp(rng.uniform(0, math.log(most + 1))))


def tokens(rng: random.Random, count: int, vocab: int = mm.V) -> list[int]:
    """Return random tokens in which short sequences repeat."""
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
            top_n_sigma=rng.choice((0.0, 0.0, 2.0)),
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
        sampled_logprobs=sampler.seed % 3 == 0,
        n=rng.choice((1, 1, 1, 1, 2)),
        mask=AlternatingMask(rng.randint(2, 7), vocab) if rng.random() < 0.15 else None,
    )


@dataclass
class BatchedRun:
    """The result of running requests together in one engine.

    Attributes:
        answers: outputs per request and choice (`Options.n`).
        most_live: maximum number of requests running at once.
    """

    answers: list[list[Output]]
    requests: list[Request]
    most_live: int

    @property
    def preempted(self) -> int:
        return sum(r.stats.preempted for request in self.requests for r in request.choices)

    @property
    def cached(self) -> int:
        """Number of requests with a prefix cache hit."""
        return sum(r.stats.cached_tokens > 0 for request in self.requests for r in request.choices)

    @property
    def cancelled(self) -> int:
        return sum(a.reason == "cancelled" for answers in self.answers for a in answers)


def run_batched(engine: Engine, specs: Sequence[RequestSpec]) -> BatchedRun:
    """Submit requests while others run, cancel some, and step until the engine is idle."""
    requests: list[Request] = []
    to_cancel: list[tuple[int, Request]] = []
    step = due = most = 0
    waiting = list(specs)
    while True:
        while waiting and step >= due:
            spec = waiting.pop(0)
            requests.append(engine.submit(spec.prompt, spec.options))
            if spec.cancel_after is not None:
                to_cancel.append((step + spec.cancel_after, requests[-1]))
            due = step + (waiting[0].delay if waiting else 0)
        for _, request in (d for d in to_cancel if d[0] <= step):
            for choice in request.choices:
                choice.cancel()
        if not engine.step() and not waiting:
            break
        most = max(most, len(engine.scheduler.running))
        step += 1
    answers = [[Output.of(r) for r in request.choices] for request in requests]
    return BatchedRun(answers, requests, most)


class EngineFactory:
    """Creates engines over small random models in memory, on the CPU.

    Attributes:
        vocab: vocabulary size of the target.
    """

    vocab = mm.V

    def single(self, kind: str | None) -> Engine:
        """Return an engine for one request at a time, without a prefix cache."""
        return memory_engine.engine(DRAFTS[kind] if kind else None, n_ctx=N_CTX)

    def batched(self, kind: str | None, parallel: int, small_pool: bool) -> Engine:
        """Return an engine with a prefix cache; with `small_pool`, not all requests fit at once."""
        make, pool = DRAFTS[kind] if kind else None, pool_tokens(parallel, small_pool)
        return memory_engine.engine(
            make, n_ctx=N_CTX, parallel=parallel, pool=pool, prefix_bytes=PREFIX_BYTES
        )


def pool_tokens(parallel: int, small_pool: bool) -> int:
    """Return the pool size of a batched engine, in tokens."""
    return N_CTX if small_pool else N_CTX * min(parallel, 6)


IN_MEMORY = EngineFactory()


class ReferenceRuns:
    """Runs requests one at a time; nothing is reused between them."""

    def __init__(self, kind: str | None = None, engines: EngineFactory = IN_MEMORY) -> None:
        self._engine = engines.single(kind)

    def __call__(self, spec: RequestSpec, choice: int = 0) -> Output:
        seed = spec.options.sampler.seed + choice
        options = replace(spec.options, n=1, sampler=replace(spec.options.sampler, seed=seed))
        request = self._engine.generate(spec.prompt, options)
        return Output.of(request)


@dataclass
class Comparison:
    """Counts of one round; `wrong` describes the differences."""

    answers: int
    tokens: int
    preempted: int
    cached: int
    cancelled: int
    most_live: int
    drafted: int
    accepted: int
    wrong: list[str]


def compare_with_reference(
    kind: str | None,
    parallel: int,
    seed: str,
    count: int,
    longest: int,
    *,
    plain: ReferenceRuns,
    small_pool: bool = False,
    proposals_every: int = 1,
    engines: EngineFactory = IN_MEMORY,
) -> Comparison:
    """Run `count` random requests batched and one at a time, and compare the outputs.

    Args:
        plain: reference runs without a draft, to share an engine between calls.
        proposals_every: compare proposals of one in this many requests; each takes another run.
    """
    specs = random_requests(
        random.Random(seed), count, longest, engines.vocab, growing=0.6 * small_pool
    )
    engine = engines.batched(kind, parallel, small_pool)
    run = run_batched(engine, specs)
    wrong = [f"{name}: {n}" for name, n in leaked_resources(engine).items() if n]
    same = ReferenceRuns(kind, engines) if kind else None
    for number, (spec, answers) in enumerate(zip(specs, run.answers, strict=True)):
        for choice, got in enumerate(answers):
            found = output_difference(got, plain(spec, choice))
            own = spec.options.draft_max != "auto"  # lengths of `auto` depend on timing
            if same is not None and own and number % proposals_every == 0:
                found = found or proposal_difference(got, same(spec, choice))
            if found:
                wrong.append(
                    f"{kind}, {parallel} at once{', small_pool' * small_pool}, seed {seed}, "
                    f"request {number}: {found}"
                )
    stats = [r.stats for request in run.requests for r in request.choices]
    return Comparison(
        answers=len(stats),
        tokens=sum(s.tokens for s in stats),
        preempted=run.preempted,
        cached=run.cached,
        cancelled=run.cancelled,
        most_live=run.most_live,
        drafted=sum(s.drafted for s in stats),
        accepted=sum(s.accepted for s in stats),
        wrong=wrong,
    )


def leaked_resources(engine: Engine) -> dict[str, int]:
    """Return what an idle engine still holds; all counts must be 0."""
    engine.prefix.clear()
    pool = engine.pool
    return {
        "pages": pool.n_pages - pool.n_free,
        "slots": pool.space.n_slots - len(pool.free_slots),
        "pages in the table": int((pool.space.table != 0).sum()),
        "tasks": len(engine.scheduler.running) + len(engine.scheduler.waiting),
    }


def output_difference(got: Output, want: Output) -> str | None:
    """Return how a batched output differs from the reference, or None. The output of a cancelled
    request must be a prefix of the reference."""
    if got.reason == "cancelled":
        n = len(got.ids)
        whole = (got.ids, got.logits, got.logprobs)
        part = (want.ids[:n], want.logits[:n], want.logprobs[: len(got.logprobs)])
        return None if whole == part else f"cancelled: {whole} is not the beginning {part}"
    for name in ("ids", "logits", "logprobs", "text", "reason"):
        a, b = getattr(got, name), getattr(want, name)
        if a != b:
            return f"{name}: {a} batched, {b} alone"
    return None


def proposal_difference(got: Output, want: Output) -> str | None:
    """Return how batched proposals differ from the reference, or None."""
    a, b = got.proposals, want.proposals[: len(got.proposals)]
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
    return None if at is None else f"proposal {at}: {a[at]} batched, {b[at]} alone"
