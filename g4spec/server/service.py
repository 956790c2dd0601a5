"""One engine and its request queue: admission, submission, and the deltas of each text."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import cached_property, partial

from g4spec.errors import G4Error
from g4spec.ops.logits import Mask
from g4spec.runtime.request import Options, Progress, Request
from g4spec.server.engine_client import EngineClient, EngineLike
from g4spec.server.generation import Assembler, Delta, PlainReader, Reader
from g4spec.server.grammar import Grammar, ThinkingBudget, Vocabulary
from g4spec.server.live import Live, LiveText
from g4spec.server.metrics import Metrics
from g4spec.server.output_parser import AnswerStream, Parser
from g4spec.server.prompt import Prompter
from g4spec.server.remote_request import EngineLost
from g4spec.server.request_errors import RequestError, unknown_model
from g4spec.server.settings import Settings

log = logging.getLogger("g4spec.server")


@dataclass(frozen=True, slots=True)
class Job:
    """The engine's work for one request.

    Attributes:
        prompt: token ids of the first prompt.
        options: engine options of each text; text n uses the seed + n.
        n: number of texts per prompt.
        grammar: constrains each text; each gets its own mask.
        chat: parse reasoning and tool calls; otherwise the output is plain text.
        calls: parse tool calls.
        open_thought: the prompt ends inside reasoning.
        live: secret that allows reading the text at /v1/live, or None.
        thinking_budget: maximum number of reasoning tokens; None: no limit.
        others: further prompts; their texts follow those of the first.
    """

    prompt: list[int]
    options: Options
    n: int = 1
    grammar: Grammar | None = None
    chat: bool = False
    calls: bool = False
    open_thought: bool = False
    live: str | None = None
    thinking_budget: int | None = None
    others: tuple[list[int], ...] = ()

    @property
    def prompts(self) -> tuple[list[int], ...]:
        """Return all prompts."""
        return (self.prompt, *self.others)

    @property
    def count(self) -> int:
        """Return the number of texts."""
        return self.n * len(self.prompts)


class Service:
    """An engine with its tokenizer, prompts, metrics and queue. Used from one event loop only.

    Attributes:
        open: number of waiting and running texts, whether or not a client waits for them.
        on_idle: called when `open` becomes 0.
    """

    def __init__(self, engine: EngineLike, settings: Settings) -> None:
        self.engine, self.settings = engine, settings
        self.tokenizer = engine.tokenizer
        self.prompter = Prompter(engine.tokenizer, engine.n_ctx)
        self.metrics = Metrics(engine, settings.model)
        self.live = Live(engine, settings.model)
        self.started = int(time.time())
        self.draining = False
        self.open = 0
        self.on_idle: Callable[[], object] = lambda: None
        self._last_request = time.monotonic()

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Build the vocabulary for grammars on first use, which takes a moment."""
        return Vocabulary(self.tokenizer, self.engine.config.n_vocab)

    def warm_up(self) -> None:
        """Measure step costs and build the vocabulary before the first request."""
        for _ in self.engine.generate([self.tokenizer.bos], Options(n_predict=2)):
            pass
        _ = self.vocabulary

    @property
    def is_healthy(self) -> bool:
        """Return True while steps make progress or the engine is idle."""
        return self.engine.is_healthy(self.settings.stall_limit)

    @property
    def is_sleeping(self) -> bool:
        """Return True while the engine has no process because of `sleep_when_idle`."""
        return isinstance(self.engine, EngineClient) and self.engine.is_sleeping

    def wake(self) -> None:
        """Note a request; if the engine sleeps, start its process."""
        self._last_request = time.monotonic()
        if isinstance(self.engine, EngineClient):
            self.engine.wake()

    async def sleep_when_idle(self) -> None:
        """Let the engine sleep whenever there was no request for `Settings.sleep_seconds`."""
        limit = self.settings.sleep_seconds
        assert limit is not None and isinstance(self.engine, EngineClient)
        while True:
            await asyncio.sleep(min(limit / 4, 1))
            if self.open:
                self._last_request = time.monotonic()
            idle = time.monotonic() - self._last_request >= limit
            if idle and not self.engine.is_sleeping and self.engine.sleep():
                log.info("the engine sleeps", extra={"facts": {"idle_seconds": limit}})

    def check_model(self, name: str | None) -> None:
        """Raise RequestError (404) for the name of another model."""
        known = (self.settings.model, *self.settings.aliases)
        if name is not None and name not in known:
            raise unknown_model(name, known)

    async def submit(self, job: Job) -> Generation:
        """Queue a job; raise RequestError if the queue is full (429) or the server stops (503)."""
        limit = self.settings.queue + self.engine.n_slots
        if self.draining:
            raise RequestError(503, "the server is shutting down; retry later", retry_after=5)
        if self.open and self.open + job.count > limit:
            raise RequestError(
                429, f"the request queue is full ({self.open} texts); retry later", retry_after=1
            )
        self.open += job.count
        work = asyncio.get_running_loop().run_in_executor(None, self._submit, job)
        try:
            texts = await asyncio.shield(work)
        except asyncio.CancelledError:
            work.add_done_callback(_cancel)
            self.ended(job.count)
            raise
        except BaseException:
            self.ended(job.count)
            raise
        return Generation(self, job, texts)

    def ended(self, count: int) -> None:
        """Count texts that have ended or failed to start."""
        self.open -= count
        if not self.open:
            self.on_idle()

    def _submit(self, job: Job) -> list[Text]:
        """Submit each text. Runs in a thread, since it waits for the engine's lock and compiles
        grammars."""
        texts: list[Text] = []
        try:
            for prompt in job.prompts:
                for i in range(job.n):
                    texts.append(self._text(job, prompt, i, len(texts)))
        except BaseException:
            for text in texts:
                text.request.cancel()
            raise
        return texts

    def _text(self, job: Job, prompt: list[int], i: int, index: int) -> Text:
        options = job.options
        sampler = replace(options.sampler, seed=(options.sampler.seed + i) % 2**64)
        mask: Mask | None = self.vocabulary.mask(job.grammar) if job.grammar else None
        if job.thinking_budget is not None:
            assert self.prompter.marks is not None
            mask = ThinkingBudget(
                job.thinking_budget,
                self.prompter.marks,
                self.vocabulary.n_vocab,
                open_thought=job.open_thought,
                inner=mask,
            )
        stream = self._answer_stream(job) if options.stop and job.chat else None
        options = replace(options, sampler=sampler, mask=mask, stream=stream)
        request = self.engine.submit(prompt, options)
        assembler = Assembler(self._create_reader(job), options.stop, self._special_ids)
        return Text(index, request, assembler, self.live.follow(request, job.live))

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        marks = self.prompter.marks
        more = {marks.channel, marks.channel_end, marks.call, marks.call_end} if marks else set()
        return self.tokenizer.control_ids | more

    def _answer_stream(self, job: Job) -> Callable[[], AnswerStream] | None:
        marks = self.prompter.marks
        if marks is None:
            return None
        return partial(AnswerStream.of, self.tokenizer, marks, job.calls, job.open_thought)

    def _create_reader(self, job: Job) -> Reader:
        marks = self.prompter.marks
        if not job.chat or marks is None:
            return PlainReader(self.tokenizer)
        return Parser(self.tokenizer, marks, calls=job.calls, thinking=job.open_thought)

    async def close(self) -> None:
        """Close the template process; the caller closes the engine."""
        await self.prompter.close()


def _cancel(work: asyncio.Future[list[Text]]) -> None:
    if not work.cancelled() and work.exception() is None:
        for text in work.result():
            text.request.cancel()


@dataclass(slots=True)
class Text:
    """One text of a job.

    Attributes:
        index: position among the texts of the job.
        request: request of the engine.
        assembler: converts tokens into deltas.
        live: state for /v1/live.
        finish, stop: see `Delta`; None until the text has ended.
    """

    index: int
    request: Request
    assembler: Assembler
    live: LiveText
    finish: str | None = None
    stop: str | None = None


class Generation:
    """The running texts of one job. Always close it: that frees their slots and pages."""

    _id_numbers = itertools.count()

    def __init__(self, service: Service, job: Job, texts: list[Text]) -> None:
        self.job, self.texts, self.service = job, texts, service
        self.id = f"{secrets.token_hex(8)}{next(self._id_numbers):04x}"
        self.created = int(time.time())
        self._began = time.perf_counter()
        self._expired = self._closed = False
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(service.settings.time_limit, self._expire)
        for text in texts:
            service.live.began(text.live)

    def _expire(self) -> None:
        self._expired = True
        for text in self.texts:
            text.request.cancel()

    def close(self) -> None:
        """Cancel the texts that have not ended, and count them as aborted."""
        if not self._closed:
            self._closed = True
            self._timer.cancel()
            self.service.ended(self.job.count)
            for text in self.texts:
                if text.finish is None:
                    text.request.cancel()
                    seconds = time.perf_counter() - self._began
                    self.service.metrics.observe_end(text.request.stats, seconds, "abort")
                    self.service.live.ended(text.live, "abort")

    async def deltas(self) -> AsyncGenerator[tuple[Text, Delta], None]:
        """Yield (text, delta) of all texts as they arrive; raise RequestError if one fails."""
        if len(self.texts) == 1:
            async with aclosing(self._run(self.texts[0])) as deltas:
                async for delta in deltas:
                    yield self.texts[0], delta
            return
        queue: asyncio.Queue[tuple[Text, Delta | BaseException | None]] = asyncio.Queue()

        async def pump(text: Text) -> None:
            try:
                async with aclosing(self._run(text)) as deltas:
                    async for delta in deltas:
                        queue.put_nowait((text, delta))
                queue.put_nowait((text, None))
            except BaseException as error:
                queue.put_nowait((text, error))
                raise

        tasks = [asyncio.ensure_future(pump(text)) for text in self.texts]
        try:
            n_running = len(tasks)
            while n_running:
                text, item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    n_running -= 1
                else:
                    yield text, item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, text: Text) -> AsyncGenerator[Delta, None]:
        metrics, last = self.service.metrics, self._began
        first, ids = True, []
        try:
            async with aclosing(text.request.__aiter__()) as cycles:
                async for cycle in cycles:
                    if isinstance(cycle, Progress):
                        wanted = text.request.options.progress
                        yield Delta(
                            progress=cycle.read if wanted else None, prompt_logprobs=cycle.logprobs
                        )
                        continue
                    now = time.perf_counter()
                    if first:
                        metrics.observe_first_token(now - last)
                    else:
                        metrics.observe_tokens(len(cycle.tokens), now - last)
                    first, last = False, now
                    ids += cycle.tokens
                    delta = text.assembler.cycle(cycle)
                    self.service.live.cycle(text.live, cycle, text.assembler.parts)
                    if delta:
                        delta.ids, ids = ids, []
                        yield delta
        except G4Error as error:
            raise RequestError.of(error) from error
        except BaseException as error:
            if error is text.request.error:
                restarting = isinstance(error, EngineLost) and self.service.engine.failed is None
                message = "the engine failed" + (
                    "; it is restarting, retry later" if restarting else "; restart the server"
                )
                raise RequestError(
                    500, message, code="engine_failed", retry_after=5 if restarting else None
                ) from error
            raise
        reason = text.request.stats.stop_reason
        if self._expired and reason == "cancelled":
            limit = self.service.settings.time_limit
            raise RequestError(
                408,
                f"the request took more than {limit:g} seconds, with the wait for its turn; "
                "lower max_tokens, or retry later",
                code="timeout",
            )
        if reason in ("cancelled", "closed", "interrupted"):
            raise RequestError(
                503, f"generation was {reason} by the server; retry later", code="unavailable"
            )
        delta = text.assembler.finish(text.request.stats)
        delta.ids = ids
        text.finish, text.stop = delta.finish, delta.stop
        seconds = time.perf_counter() - self._began
        metrics.observe_end(text.request.stats, seconds, str(text.finish))
        self.service.live.ended(text.live, str(text.finish))
        yield delta
