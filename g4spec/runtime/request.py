"""A request: what was asked for, and what has come of it so far."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from g4spec.core import MAX_DRAFT, Cycle
from g4spec.errors import UsageError
from g4spec.ops.logits import Mask
from g4spec.ops.sampling import Sampler

if TYPE_CHECKING:
    from g4spec.runtime.tokenizer import Tokenizer


class TextStream(Protocol):
    """Turns tokens into text as they arrive."""

    def push(self, ids: Iterable[int]) -> str:
        """The text that became certain with `ids`."""
        ...

    def finish(self) -> str:
        """What was held back."""
        ...


@dataclass(frozen=True, slots=True)
class Options:
    """How to generate.

    Attributes:
        n_predict: most new tokens.
        sampler: how tokens are chosen.
        draft_max: most drafted tokens a step, 0 to 15, or "auto".
        stop: texts that end the generation; they are not part of it.
        ignore_eos: go on after stop tokens.
        logprobs: report the log-probability of each token and of so many most likely ones; None:
            of none. They are those of the unfiltered distribution at temperature 1.
        n: texts to generate; text i has the sampler's seed + i.
        mask: given the tokens of the text so far, the tokens that may follow (bool [V], or None for
            all): the hook for grammars.
        stream: makes the decoder of the text, as `Tokenizer.stream` does, which is the default. It
            may leave tokens out: `stop` is looked for in what it gives.
        progress: tell how much of the prompt has been read: a cycle without tokens each time.
    """

    n_predict: int = 256
    sampler: Sampler = field(default_factory=Sampler)
    draft_max: int | Literal["auto"] = "auto"
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1
    mask: Mask | None = None
    stream: Callable[[], TextStream] | None = None
    progress: bool = False

    def __post_init__(self) -> None:
        if self.n_predict < 1:
            raise UsageError("-n", expected=">= 1", found=self.n_predict)
        if self.draft_max != "auto" and not 0 <= self.draft_max <= MAX_DRAFT:
            raise UsageError(
                "--draft-max", expected=f"0 to {MAX_DRAFT}, or auto", found=self.draft_max
            )
        if "" in self.stop:
            raise UsageError("--stop: an empty text would stop everything")
        if self.logprobs is not None and self.logprobs < 0:
            raise UsageError("logprobs", expected=">= 0", found=self.logprobs)
        if self.n < 1:
            raise UsageError("n", expected=">= 1", found=self.n)


@dataclass(slots=True)
class Stats:
    """Counts and times of one text. Seconds are wall time; those of prompt and cycles include what
    was computed for others in the same step.

    Attributes:
        cached_tokens: prompt tokens that a prefix hit did not read again.
        read_tokens: prompt tokens that have been read so far, those of a prefix hit included.
        queue_seconds: from submission until the prompt began to be read.
        prefill_seconds: reading the prompt, the draft's part included.
        needed: tokens that plain decoding would have chosen too; excludes accepted tokens behind
            the end of the text.
        preempted: times that its memory was given to others and its tokens were read again.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    read_tokens: int = 0
    queue_seconds: float = 0.0
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
    preempted: int = 0
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


@dataclass(slots=True)
class Progress(Cycle):
    """News of a prompt that is being read (`Options.progress`).

    Attributes:
        read: its tokens that have been read.
    """

    read: int = 0


class Driver(Protocol):
    """Makes progress on requests: the engine."""

    def advance(self, request: Request) -> None:
        """Work, or wait for who works, until the request has something new or is done."""
        ...

    def start(self) -> None:
        """Work in a thread of its own from now on."""
        ...


class Request:
    """One text that is being generated. Iterate over it for its cycles, or over `tokens()`; `text`,
    `ids` and `stats` grow meanwhile. Usable from any thread; `async for` works too.

    A cycle that reaches a stop token or stop text is cut there: stop tokens are reported in
    `stats.stop_reason`, not emitted.

    Attributes:
        prompt: its tokens.
        ids: tokens of the text.
        text: the same, decoded.
        stats: counts and times so far.
        notes: what should be said about the run, as a draft that failed.
        choices: with `Options.n` > 1 all of the request's texts, this one first; else itself.
        done: whether nothing more will come.
        error: why it ended early, or None.
        arrived: set when something new has come.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        options: Options,
        driver: Driver,
        tokenizer: Tokenizer,
        notes: Sequence[str] = (),
    ) -> None:
        self.prompt, self.options = list(prompt), options
        self.stats, self.notes = Stats(prompt_tokens=len(prompt)), list(notes)
        self.ids: list[int] = []
        self.text = ""
        self.choices: list[Request] = [self]
        self.done = False
        self.error: Exception | None = None
        self.cancelled, self.arrived = False, threading.Event()
        self._driver, self._tokenizer = driver, tokenizer
        self._stream: TextStream = (options.stream or tokenizer.stream)()
        self._cycles: deque[Cycle] = deque()
        self._listeners: list[Callable[[], None]] = []

    def cancel(self) -> None:
        """End the request; its memory is free within two steps of the engine."""
        self.cancelled = True

    def __iter__(self) -> Iterator[Cycle]:
        try:
            while True:
                while self._cycles:
                    yield self._cycles.popleft()
                if self.done:
                    break
                self._driver.advance(self)
        finally:
            if not self.done:
                self.cancel()
        if self.error is not None:
            raise self.error

    def tokens(self) -> Iterator[int]:
        """The text's tokens as they come."""
        for cycle in self:
            yield from cycle.tokens

    async def __aiter__(self) -> AsyncGenerator[Cycle, None]:
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            try:
                loop.call_soon_threadsafe(arrived.set)
            except RuntimeError:  # the loop was closed under its reader
                self.cancel()

        self.listen(tell)
        self._driver.start()
        try:
            while True:
                arrived.clear()
                while self._cycles:
                    yield self._cycles.popleft()
                if self.done:
                    break
                await arrived.wait()
        finally:
            self._listeners.remove(tell)
            if not self.done:
                self.cancel()
        if self.error is not None:
            raise self.error

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever there is something new, from the thread that brings it."""
        self._listeners.append(listener)

    def taken(self) -> Iterator[Cycle]:
        """Yield the cycles that have come and nobody has taken, without waiting for more."""
        while self._cycles:
            yield self._cycles.popleft()

    # ---- called by the engine

    @property
    def news(self) -> bool:
        """Whether iterating would yield or end without waiting."""
        return bool(self._cycles) or self.done

    def read(self, count: int) -> None:
        """Note that the first `count` tokens of the prompt have been read."""
        self.stats.read_tokens = count
        if self.options.progress:
            self._cycles.append(Progress([], [], read=count))
            self._tell()

    def take(self, cycle: Cycle, *, first: bool = False) -> int:
        """Take in a cycle; sets `stats.stop_reason` where the text ends.

        Args:
            first: its token comes from the prompt, without a step.

        Returns:
            How many of its tokens plain decoding would have chosen too.
        """
        if not first:
            self.stats.add(cycle)
        if cycle.draft_failed and cycle.draft_failed not in self.notes:
            self.notes.append(cycle.draft_failed)
        kept = self._keep(cycle)
        # Plain decoding would have chosen the stop token too, and nothing after it.
        needed = kept + self.stats.stop_reason.startswith("stop token")
        self.stats.needed += 0 if first else needed
        cycle.tokens, cycle.logits = cycle.tokens[:kept], cycle.logits[:kept]
        cycle.logprobs = cycle.logprobs[:kept]
        self.ids += cycle.tokens
        self.stats.tokens += kept
        self._cycles.append(cycle)
        self._tell()
        return needed

    def finish(self, reason: str = "", error: Exception | None = None) -> None:
        """Nothing more will come."""
        if not self.stats.stop_reason:
            self.text += self._stream.finish()
            self.stats.stop_reason = reason
        self.error, self.done = error, True
        self._tell()

    def _keep(self, cycle: Cycle) -> int:
        """How many of the cycle's tokens are emitted; extends `text`, sets `stop_reason`."""
        for i, token in enumerate(cycle.tokens):
            if token in self._tokenizer.stop_ids and not self.options.ignore_eos:
                self.text += self._stream.finish()
                self.stats.stop_reason = f"stop token {token}"
                return i
            self.text += self._stream.push([token])
            ends = [at for s in self.options.stop if (at := self.text.find(s)) >= 0]
            if ends:
                self.text = self.text[: min(ends)]
                self.stats.stop_reason = "stop text"
                return i + 1
        return len(cycle.tokens)

    def _tell(self) -> None:
        self.arrived.set()
        for listener in tuple(self._listeners):  # readers come and go in threads of their own
            listener()
