"""Opens a target and a draft, and generates text with them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from g4spec import models
from g4spec.errors import InputError, UsageError
from g4spec.gguf import GGUF
from g4spec.models import gemma4, ngram
from g4spec.core import Draft, MAX_DRAFT, MAX_STEP_ROWS
from g4spec.ops.sampling import NotFinite, Sampler
from g4spec.runtime import devices, memory
from g4spec.runtime.draft_file import DraftFile
from g4spec.runtime.length import Auto, Fixed, Length
from g4spec.runtime.speculate import Backlog, Cycle, Player, Speculation
from g4spec.runtime.target import Target
from g4spec.runtime.tokenizer import Tokenizer

DEFAULT_CTX = 8192
"""Context when none is asked for and the model was trained on more."""


@dataclass(frozen=True, slots=True)
class Options:
    """How to generate.

    Attributes:
        n_predict: most new tokens.
        draft_max: most drafted tokens a step, 0 to 15, or "auto".
        stop: texts that end the generation; they are not part of it.
        ignore_eos: go on after stop tokens.
    """

    n_predict: int = 256
    sampler: Sampler = field(default_factory=Sampler)
    draft_max: int | Literal["auto"] = "auto"
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.n_predict < 1:
            raise UsageError("-n", expected=">= 1", found=self.n_predict)
        if self.draft_max != "auto" and not 0 <= self.draft_max <= MAX_DRAFT:
            raise UsageError("--draft-max", expected=f"0 to {MAX_DRAFT}, or auto",
                             found=self.draft_max)  # fmt: skip
        if "" in self.stop:
            raise UsageError("--stop: an empty text would stop everything")


@dataclass(slots=True)
class Stats:
    """What a run measured. Seconds are wall time; prefill includes the draft's part of it. `needed`
    are the tokens of its cycles that plain decoding would have chosen too: none behind the end."""

    prompt_tokens: int = 0
    prefill_seconds: float = 0.0
    tokens: int = 0
    cycles: int = 0
    drafted: int = 0
    accepted: int = 0
    draft_seconds: float = 0.0
    step_seconds: float = 0.0
    drafted_by_position: list[int] = field(default_factory=lambda: [0] * MAX_DRAFT)
    accepted_by_position: list[int] = field(default_factory=lambda: [0] * MAX_DRAFT)
    needed: int = 0
    stop_reason: str = ""

    def add(self, cycle: Cycle) -> None:
        """Count a cycle that ran a step (the first token comes from the prompt alone)."""
        self.cycles += 1
        self.drafted += len(cycle.drafted)
        self.accepted += cycle.accepted
        self.draft_seconds += cycle.draft_seconds
        self.step_seconds += cycle.step_seconds
        for i in range(len(cycle.drafted)):
            self.drafted_by_position[i] += 1
            self.accepted_by_position[i] += i < cycle.accepted

    @property
    def seconds(self) -> float:
        """Decoding time."""
        return self.draft_seconds + self.step_seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the text over the cycles' time; the first one belongs to the prompt."""
        return self.needed / self.seconds if self.seconds else 0.0

    @property
    def committed_per_cycle(self) -> float:
        """Accepted drafts plus the target's own token, a cycle; also behind the end of the text."""
        return (self.cycles + self.accepted) / self.cycles if self.cycles else 0.0


class Run:
    """One generation: iterate over its cycles; `stats`, `text` and `notes` grow meanwhile.

    A cycle that reaches a stop token or stop text is cut there: stop tokens are reported in
    `stop_reason`, not emitted.
    """

    def __init__(self, engine: Engine, cycles: Speculation, options: Options, stats: Stats) -> None:
        self.stats, self.notes, self.text = stats, list(engine.notes), ""
        self.ids: list[int] = []
        self._cycles, self._options, self._engine = cycles, options, engine

    def __iter__(self) -> Iterator[Cycle]:
        stream = self._engine.tokenizer.stream()
        first = True
        for cycle in self._cycles:
            if not first:
                self.stats.add(cycle)
            if self._cycles.failed and self._cycles.failed not in self.notes:
                self.notes.append(self._cycles.failed)
            kept = self._keep(cycle, stream)
            # Plain decoding would have chosen the stop token too, and nothing after it.
            needed = kept + self.stats.stop_reason.startswith("stop token")
            self._cycles.length.cut(len(cycle.tokens) - needed)
            self.stats.needed += 0 if first else needed
            first = False
            cycle.tokens, cycle.logits = cycle.tokens[:kept], cycle.logits[:kept]
            self.ids += cycle.tokens
            self.stats.tokens += kept
            yield cycle
            if self.stats.stop_reason:
                return
        self.text += stream.finish()
        self.stats.stop_reason = (
            "length" if self.stats.tokens >= self._options.n_predict else "context"
        )

    def _keep(self, cycle: Cycle, stream: Any) -> int:
        """How many of the cycle's tokens are emitted; extends `text`, sets `stop_reason`."""
        for i, token in enumerate(cycle.tokens):
            if token in self._engine.stop_ids and not self._options.ignore_eos:
                self.text += stream.finish()
                self.stats.stop_reason = f"stop token {token}"
                return i
            self.text += stream.push([token])
            ends = [at for s in self._options.stop if (at := self.text.find(s)) >= 0]
            if ends:
                self.text = self.text[: min(ends)]
                self.stats.stop_reason = "stop text"
                return i + 1
        return len(cycle.tokens)


class Engine:
    """A loaded target, with or without a draft. Make one with :meth:`load`."""

    def __init__(
        self, target: Target, draft: Draft | None, tokenizer: Tokenizer, plan: memory.MemoryPlan
    ) -> None:
        self.target, self.draft, self.tokenizer, self.memory = target, draft, tokenizer, plan
        self.config, self.n_ctx = target.config, target.n_ctx
        self.stop_ids = tokenizer.stop_ids
        self.notes: list[str] = []
        self._auto: Auto | None = None
        target.taps = draft.taps if draft else ()
        self.plain = target.ops.player(target, None, keep=draft is not None)
        self.player = target.ops.player(target, draft) if draft else None

    @classmethod
    def load(
        cls,
        target: Path,
        draft: Path | str | None = None,
        *,
        n_ctx: int | None = None,
        draft_window: int | None = None,
        draft_p_min: float | None = None,
        chunk: int | None = None,
        device: str = "cpu",
        cache_type: str | None = None,
    ) -> Engine:
        """Open files, check the pair and the memory, load the weights.

        Args:
            draft: a draft GGUF, "ngram" for n-gram lookup, or None.
            n_ctx: context in tokens; default: what the model was trained on, at most 8192.
            draft_window: bound on the context that a draft's full-attention layers see.
            draft_p_min: least confidence of a drafted token, 0 to 1, for drafts with a confidence
                head: a proposal ends before the first one of less. 0 keeps all; default: what the
                draft's file says, which is 0 unless somebody wrote it there.
            chunk: rows of a prompt read at a time; default: what the device likes.
            device, cache_type: see `devices.select`.

        Raises:
            InputError: a file is not what it must be, or the two do not fit together.
            UsageError: an option is out of range, or asks for what the draft cannot do.
            EnvironmentProblem: the run does not fit into memory.
        """
        ops, budget = devices.select(device, cache_type)
        chunk = chunk or ops.chunk
        with GGUF(target) as file:
            config = _target_config(file)
            context = _context(n_ctx, config.n_ctx)
            with DraftFile(draft, draft_p_min, draft_window) as other:
                plan = _plan(file, config, other, context, chunk, budget)
                weights = {name: ops.load(file, name) for name in file.tensors}
                loaded = Target(config, weights, ops, context, chunk)
                drafter: Draft | None = ngram.Drafter() if draft == "ngram" else None
                if other.file is not None:
                    drafter = other.build(ops, loaded, chunk)
            return cls(loaded, drafter, Tokenizer.from_gguf(file), plan)

    def generate(self, prompt: Sequence[int], options: Options) -> Run:
        """Read a prompt and return the run to iterate over.

        Raises InputError for an empty prompt, ids outside the vocabulary, or a prompt that leaves
        no room in the context.
        """
        self._check_prompt(prompt, options.n_predict)
        stats = Stats(prompt_tokens=len(prompt))
        sampler = replace(options.sampler, suppress=self.tokenizer.suppress_ids)
        draft = None if options.draft_max == 0 else self.draft
        players = self.player if draft else None, self.plain
        player, plain = (p if p and p.ready(sampler) else None for p in players)
        length = self._length(options, player, plain)
        started = time.perf_counter()
        if draft:
            draft.reset()
        for read in self.target.prefill(prompt):
            if draft:
                draft.commit(read)
        logits = self.target.logits(read.hidden[-1:])[0]
        stats.prefill_seconds = time.perf_counter() - started
        chooser = self.target.ops.chooser(sampler)
        cycles = Speculation(self.target, Backlog(draft), chooser, length, logits,
                             len(prompt), options.n_predict, player, plain)  # fmt: skip
        return Run(self, cycles, options, stats)

    def _check_prompt(self, prompt: Sequence[int], n_predict: int) -> None:
        if not prompt:
            raise InputError("the prompt is empty", expected="at least one token")
        if bad := [t for t in prompt if not 0 <= t < self.config.n_vocab]:
            raise InputError("a prompt token is outside the vocabulary",
                             expected=f"0..{self.config.n_vocab - 1}", found=bad[0])  # fmt: skip
        if len(prompt) > self.n_ctx:
            needed, trained = len(prompt) + n_predict, self.config.n_ctx
            fix = f"use -c {needed}" if needed <= trained else (
                f"use a shorter one: the model was trained on {trained} tokens")  # fmt: skip
            raise InputError("the prompt does not fit into the context",
                             expected=f"at most {self.n_ctx} tokens", found=len(prompt), fix=fix)

    def _length(self, options: Options, player: Player | None, plain: Player | None) -> Length:
        if options.draft_max != "auto":
            return Fixed(options.draft_max)
        if self.draft is None or self.n_ctx < MAX_STEP_ROWS + 2:  # too short to measure, or to gain
            return Fixed(0)
        if self._auto is None:
            self._auto = Auto(self._measure(player, plain))
        return self._auto

    def _measure(self, player: Player | None, plain: Player | None) -> dict[int, float]:
        """Seconds of a cycle without a draft, with 1 and with the most drafted tokens; bringing the
        draft up to date is part of a cycle with one."""
        assert self.draft is not None
        read = self.target.read([2] * MAX_STEP_ROWS, 0)
        at = len(read.ids)
        costs: dict[int, float] = {}
        counts = [0, 1, min(self.draft.max_tokens, self.n_ctx - at - 1)]
        for count in [c for c in counts if c >= 0] * 3:
            self.draft.reset()
            if player:  # its cycles end with a commit, those in parts begin with one
                self.draft.commit(read)
            began = time.perf_counter()
            if plays := player if count else plain:
                plays.begin(2, at)
                plays.start(count)
                if count == 0:  # one that follows another, as they do
                    plays.start(0)
                    plays.result()
                    began = time.perf_counter()
                plays.result()
            else:
                if count:
                    self.draft.commit(read)
                    with suppress(NotFinite):  # its first real proposal will say so
                        self.draft.propose(2, at, count, Sampler())
                self.target.step([2] * (1 + count), at).logits[0, 0].item()  # waits for a GPU
            costs[count] = min(costs.get(count, 1e9), time.perf_counter() - began)
        return costs


def check(target: Path, n_ctx: int | None = None) -> None:
    """Raise what `Engine.load` would about a target, as far as its header shows it."""
    with GGUF(target) as file:
        _context(n_ctx, _target_config(file).n_ctx)


def _context(asked: int | None, trained: int) -> int:
    if asked is None:
        return min(trained, DEFAULT_CTX)
    if not 1 <= asked <= trained:
        raise UsageError("-c", expected=f"1 to {trained}, what the model was trained on",
                         found=asked)  # fmt: skip
    return asked


def _target_config(file: GGUF) -> gemma4.Config:
    arch = file.kv.get("general.architecture")
    if arch not in models.targets():
        if (kind := models.of_gguf(arch, file.tensors)) is not None:
            raise models.misplaced(file.path, kind)
        raise InputError(f"{file.path}: not a target", expected=" or ".join(models.targets()),
                         found=f"architecture {arch!r}")  # fmt: skip
    return gemma4.parse_gguf(file.kv, file.shapes())


def _plan(
    file: GGUF,
    config: gemma4.Config,
    draft: DraftFile,
    n_ctx: int,
    chunk: int,
    budget: devices.Budget,
) -> memory.MemoryPlan:
    """Compute what the run needs; refuse it if it cannot fit."""
    if draft.file is not None and draft.kind is not None:
        draft.kind.check_pair(draft.config, config)

    def plan(n: int) -> memory.MemoryPlan:
        drafted = draft.file.tensors if draft.file else {}
        return memory.MemoryPlan(
            n_ctx=n,
            weights=budget.weights(file.tensors.values()),
            cache=budget.cache(gemma4.caches(config), n, chunk),
            draft_weights=budget.weights(drafted.values()),
            draft_cache=budget.cache(draft.shapes(), n, chunk, draft=True),
            workspace=budget.workspace(config, n, chunk),
        )

    asked = plan(n_ctx)
    memory.require(asked, {n: plan(n) for n in range(256, n_ctx, 256)}, budget.available())
    return asked
