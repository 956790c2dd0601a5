"""A request: its options, and its tokens, text and statistics so far."""

from __future__ import annotations

import asyncio
import queue
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from g4spec import ranges
from g4spec.core import MAX_DRAFT, Cycle, Logprobs
from g4spec.errors import UsageError
from g4spec.ops.logits import Mask
from g4spec.ops.sampling import Sampler

if TYPE_CHECKING:
    from g4spec.runtime.tokenizer import Tokenizer


def stop_prefix_length(text: str, stops: Iterable[str]) -> int:
    """Return how many characters at the end of `text` may be the beginning of a stop string."""

    def overlap(stop: str) -> int:
        longest = min(len(text), len(stop) - 1)
        return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)

    return max(map(overlap, stops), default=0)


class TextStream(Protocol):
    """Decodes tokens to text incrementally."""

    def push(self, ids: Iterable[int]) -> str:
        """Return the text that is complete after `ids`."""
        ...

    def finish(self) -> str:
        """Return the text that was held back until now."""
        ...


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a request.

    Attributes:
        n_predict: maximum number of new tokens; 0: read the prompt, for the prefix cache.
        sampler: sampling settings.
        draft_max: maximum number of drafted tokens per step, 0 to 15, or "auto".
        stop: strings that end generation and are not part of the text. Kept as a tuple.
        ignore_eos: continue after stop tokens.
        logprobs: number of top log-probabilities to report for each token; 0: only that of the
            token, None: none. They belong to the unfiltered distribution at temperature 1.
        sampled_logprobs: `logprobs` belong to the distribution that tokens are sampled from: after
            bias, penalties, mask, filters and temperature.
        prompt_logprobs: as `logprobs`, for the tokens of the prompt after the first, in cycles of
            prefill (`Progress`). The prompt is computed without the prefix cache.
        n: number of completions, 1 to 1024; completion i uses the sampler's seed + i.
        mask: function from the tokens so far to the allowed next tokens (bool [V], or None for
            all), for grammars.
        stream: creates the text decoder; default: `Tokenizer.stream`. It may skip tokens; `stop` is
            searched for in its output.
        progress: report the progress of prefill with cycles without tokens.
    """

    n_predict: int = 256
    sampler: Sampler = field(default_factory=Sampler)
    draft_max: int | Literal["auto"] = "auto"
    stop: tuple[str, ...] | list[str] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    sampled_logprobs: bool = False
    prompt_logprobs: int | None = None
    n: int = 1
    mask: Mask | None = None
    stream: Callable[[], TextStream] | None = None
    progress: bool = False

    def __post_init__(self) -> None:
        ranges.check_fields(self, ("n_predict", "draft_max", "logprobs", "prompt_logprobs", "n"))
        if not isinstance(self.sampler, Sampler):
            raise UsageError("`sampler`", expected="a Sampler", found=repr(self.sampler))
        several = isinstance(self.stop, Iterable) and not isinstance(self.stop, str)
        texts = tuple(self.stop) if several else ()  # an iterator can be read only once
        if not several or not all(isinstance(text, str) for text in texts):
            raise UsageError("`stop`", expected="a tuple of texts", found=repr(self.stop))
        object.__setattr__(self, "stop", texts)
        if "" in texts:
            raise UsageError("`stop`: an empty text would stop everything")


@dataclass(slots=True)
class Stats:
    """Counts and times of one request. Seconds are wall time; prefill and cycles include the time
    of other requests in the same step.

    Attributes:
        cached_tokens: prompt tokens reused from the prefix cache.
        read_tokens: prompt tokens in the KV cache so far, including reused ones.
        queue_seconds: from submission to the start of prefill.
        prefill_seconds: prefill of target and draft.
        tokens: generated tokens.
        cycles: cycles after prefill.
        drafted, accepted: drafted tokens, and those of them that the target chose too.
        needed: tokens that plain decoding would also have chosen; excludes accepted tokens after
            the end of the text.
        preempted: number of preemptions.
        stop_reason: why the text ended; "" until then. One of
            "stop token ID": the model chose stop token ID, such as "stop token 106";
            "stop string": the text contained a string of `Options.stop`;
            "length": `Options.n_predict` tokens were generated;
            "context": the context is full;
            "cancelled": `Request.cancel` was called, or its iterator was closed;
            "closed": `Engine.close` was called;
            "interrupted": a step failed, or Ctrl-C ended it, which ends all requests;
            "error": this request failed; see `Request.error`.
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
        """Count a cycle that ran a step. The first token is not one: it comes from prefill."""
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
        """Decoding time in seconds."""
        return self.draft_seconds + self.step_seconds

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of decoding, without the first token, which belongs to
        prefill."""
        return self.needed / self.seconds if self.seconds else 0.0

    @property
    def committed_per_cycle(self) -> float:
        """Mean of accepted drafted tokens plus one per cycle, including tokens after the end of the
        text."""
        return (self.cycles + self.accepted) / self.cycles if self.cycles else 0.0


@dataclass(slots=True)
class Progress(Cycle):
    """Progress of the prefill of a request (`Options.progress`), or `logprobs` of prompt tokens
    (`Options.prompt_logprobs`).

    Attributes:
        read: number of prompt tokens computed so far.
    """

    read: int = 0


class Driver(Protocol):
    """What runs the steps for requests: the engine."""

    def advance(self, request: Request) -> None:
        """Run steps, or wait until somebody else does, until the request has news or is done."""
        ...

    def start(self) -> None:
        """Run steps in a separate thread from now on."""
        ...


class Request:
    """A submitted request. Iterate over it for cycles, or over `tokens()`; `text`, `ids` and
    `stats` grow meanwhile. Thread-safe; also supports `async for`.

    A cycle that reaches a stop token or stop string is cut there. Stop tokens are not emitted; they
    are reported in `stats.stop_reason`.

    Attributes:
        prompt: prompt tokens.
        ids: generated tokens.
        text: the generated text.
        stats: counts and times so far, and `stop_reason`; `help(request.stats)` explains them.
        notes: remarks about the run, for instance that the draft failed.
        choices: all completions with `Options.n` > 1, this one first; otherwise only this one.
        done: whether no more tokens will come.
        error: the exception that ended the request, or None.
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
        self.cancelled = False
        self._driver, self._tokenizer = driver, tokenizer
        self._stream: TextStream = (options.stream or tokenizer.stream)()
        self._cycles: deque[Cycle] = deque()
        self._listeners: list[Callable[[], None]] = []

    def cancel(self) -> None:
        """Cancel the request. Its memory is free after at most two steps of the engine."""
        self.cancelled = True

    def __iter__(self) -> Iterator[Cycle]:
        try:
            while True:
                ended = self.done  # before: the last cycle may arrive together with the end
                yield from self.drain()
                if ended:
                    break
                self._driver.advance(self)
        finally:
            if not self.done:
                self.cancel()
        if self.error is not None:
            raise self.error

    def tokens(self) -> Iterator[int]:
        """Yield generated tokens as they arrive."""
        for cycle in self:
            yield from cycle.tokens

    async def __aiter__(self) -> AsyncGenerator[Cycle, None]:
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            try:
                loop.call_soon_threadsafe(arrived.set)
            except RuntimeError:  # the loop was closed under its reader
                self.cancel()

        self._driver.start()
        self.listen(wake)
        try:
            while True:
                arrived.clear()
                ended = self.done
                for cycle in self.drain():
                    yield cycle
                if ended:
                    break
                await arrived.wait()
        finally:
            self._listeners.remove(wake)
            if not self.done:
                self.cancel()
        if self.error is not None:
            raise self.error

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` at every news, from the thread that produced it. It may submit, cancel
        and close, but not wait for a request of its engine."""
        self._listeners.append(listener)

    def wait(self, seconds: float) -> None:
        """Wait until there is news, which another thread produces, for so many seconds at most.

        A handler of a signal can interrupt this anywhere and produce news itself: unlike
        `threading.Event`, nothing here keeps it from doing so.
        """
        arrived = queue.SimpleQueue[None]()

        def wake() -> None:
            arrived.put(None)

        self.listen(wake)
        try:
            if not self.has_news:
                with suppress(queue.Empty):
                    arrived.get(timeout=seconds)
        finally:
            self._listeners.remove(wake)

    def drain(self) -> Iterator[Cycle]:
        """Yield the cycles that have arrived and were not taken yet, without waiting."""
        while (cycle := self._take()) is not None:
            yield cycle

    def _take(self) -> Cycle | None:
        """Return the next cycle, or None if there is none, or another reader has taken it."""
        try:
            return self._cycles.popleft()
        except IndexError:
            return None

    # ---- called by the engine

    @property
    def has_news(self) -> bool:
        """Return True if iteration would yield or end without waiting."""
        return bool(self._cycles) or self.done

    def record_prefill(self, count: int, logprobs: Sequence[Logprobs] = ()) -> None:
        """Record that the first `count` prompt tokens have been computed; `logprobs` are those of
        the tokens after the new ones, if requested."""
        self.stats.read_tokens = count
        if self.options.progress or logprobs:
            self._cycles.append(Progress([], [], logprobs=list(logprobs), read=count))
            self._notify()

    def append(self, cycle: Cycle, *, first: bool = False) -> int:
        """Append the result of a cycle; set `stats.stop_reason` if the text ends.

        Args:
            first: whether its token comes from prefill instead of a step.

        Returns:
            Number of its tokens that plain decoding would also have chosen.
        """
        if not first:
            self.stats.add(cycle)
        if cycle.draft_failed and cycle.draft_failed not in self.notes:
            self.notes.append(cycle.draft_failed)
        kept = self._append_text(cycle)
        # Plain decoding would have chosen the stop token too, and nothing after it.
        needed = kept + self.stats.stop_reason.startswith("stop token")
        self.stats.needed += 0 if first else needed
        cycle.tokens, cycle.logits = cycle.tokens[:kept], cycle.logits[:kept]
        cycle.logprobs = cycle.logprobs[:kept]
        self.ids += cycle.tokens
        self.stats.tokens += kept
        self._cycles.append(cycle)
        self._notify()
        return needed

    def finish(self, reason: str = "", error: Exception | None = None) -> None:
        """Mark the request as done, also if its stream fails."""
        try:
            if not self.stats.stop_reason:
                self.stats.stop_reason = reason
                self.text += self._stream.finish()
        except Exception as fault:
            error = error or fault
            raise
        finally:
            self.error, self.done = error, True
            self._notify()

    def abandon(self, error: Exception | None) -> None:
        """Mark the request as done after a failed step, which may have been its stream's or a
        listener's failure; another failure must not keep other requests from ending."""
        with suppress(Exception):
            self.finish("interrupted", error)

    def _append_text(self, cycle: Cycle) -> int:
        """Extend `text` and set `stop_reason`; return how many of the cycle's tokens are
        emitted."""
        for i, token in enumerate(cycle.tokens):
            if token in self._tokenizer.stop_ids and not self.options.ignore_eos:
                self.text += self._stream.finish()
                self.stats.stop_reason = f"stop token {token}"
                return i
            before = len(self.text)
            self.text += self._stream.push([token])
            ends = [
                at
                for s in self.options.stop
                if (at := self.text.find(s, max(0, before - len(s) + 1))) >= 0
            ]
            if ends:
                self.text = self.text[: min(ends)]
                self.stats.stop_reason = "stop string"
                return i + 1
        return len(cycle.tokens)

    def _notify(self) -> None:
        for listener in tuple(self._listeners):  # readers come and go in threads of their own
            listener()
