"""One engine behind the endpoints: what may come in, and how its answers come out."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from g4spec.errors import G4Error
from g4spec.ops.logits import Mask
from g4spec.ops.sampling import Sampler
from g4spec.runtime.request import Options, Progress, Request
from g4spec.server.engine_client import AnyEngine, EngineLost
from g4spec.server.gemma import Answer, Parser
from g4spec.server.generation import Assembler, Delta, Plain, Reader
from g4spec.server.grammar import Grammar, ThinkingBudget, Vocabulary
from g4spec.server.live import Followed, Live
from g4spec.server.metrics import Metrics
from g4spec.server.prompt import Prompter
from g4spec.server.refusals import Refused


@dataclass(frozen=True, slots=True)
class Settings:
    """Limits and defaults of a server.

    Attributes:
        model: name of the model. aliases: other names that requests may use for it.
        queue: texts that may wait beside those in work; more are refused.
        most_texts: texts of one request (`n`).
        time_limit: seconds after which a request is ended.
        stall_limit: seconds that a step may take before /health says that nothing moves.
        ping: seconds between comments in a stream that has nothing to say.
        send_limit: seconds that a client may take to accept a piece of a stream.
        sampler: defaults of requests. seed: of requests that name none; None draws one for each.
        n_predict: new tokens of requests that name no limit; None: what the context has room for.
    """

    model: str
    aliases: tuple[str, ...] = ()
    queue: int = 64
    most_texts: int = 128
    time_limit: float = 600.0
    stall_limit: float = 60.0
    ping: float = 15.0
    send_limit: float = 60.0
    sampler: Sampler = field(default_factory=lambda: Sampler(temperature=1.0))
    seed: int | None = None
    n_predict: int | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """A generation that was asked for.

    Attributes:
        options: of each text; the n-th has the seed + n. A mask is made for each from `grammar`.
        n: texts of each prompt. others: more prompts; their texts follow those of the first.
        chat: read thoughts and calls; else the text is all there is.
        calls: functions were given. open_thought: the prompt ends inside a thought.
        live: word of those who may read it at /v1/live, or None.
        thinking_budget: tokens of thoughts, after which they are ended; None: no limit.
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
        """All prompts."""
        return (self.prompt, *self.others)

    @property
    def count(self) -> int:
        """Texts in all."""
        return self.n * len(self.prompts)


class Service:
    """The engine and what endpoints need beside it. Belongs to one event loop."""

    def __init__(self, engine: AnyEngine, settings: Settings) -> None:
        self.engine, self.settings = engine, settings
        self.tokenizer = engine.tokenizer
        self.prompter = Prompter(engine.tokenizer, engine.n_ctx)
        self.metrics = Metrics(engine, settings.model)
        self.live = Live(engine, settings.model)
        self.started = int(time.time())
        self.draining = False
        self.open = 0

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Make the grammars' vocabulary; takes a moment the first time."""
        return Vocabulary(self.tokenizer, self.engine.config.n_vocab)

    def warm_up(self) -> None:
        """Measure costs and list tokens, so that no request has to wait for it."""
        for _ in self.engine.generate([self.tokenizer.bos], Options(n_predict=2)):
            pass
        _ = self.vocabulary

    @property
    def is_healthy(self) -> bool:
        """True while steps make progress, or there is nothing to do."""
        return self.engine.is_healthy(self.settings.stall_limit)

    def check_model(self, name: str | None) -> None:
        """Refuse a request for another model."""
        known = (self.settings.model, *self.settings.aliases)
        if name is not None and name not in known:
            raise Refused(
                404,
                f"the model {name!r} is not served here, only {', '.join(known)}",
                param="model",
                code="model_not_found",
            )

    async def submit(self, job: Job) -> Generation:
        """Queue a job; refuse it when the queue is full."""
        limit = self.settings.queue + self.engine.n_slots
        if self.draining:
            raise Refused(503, "the server is shutting down", retry_after=5)
        if self.open and self.open + job.count > limit:
            raise Refused(429, f"the queue is full: {self.open} texts are in it", retry_after=1)
        self.open += job.count
        work = asyncio.get_running_loop().run_in_executor(None, self._submit, job)
        try:
            texts = await asyncio.shield(work)
        except asyncio.CancelledError:
            work.add_done_callback(_cancel)
            self.open -= job.count
            raise
        except BaseException:
            self.open -= job.count
            raise
        return Generation(self, job, texts)

    def _submit(self, job: Job) -> list[Text]:
        """Submit each text. Runs in a thread: a step may hold the lock, and grammars take time."""
        texts: list[Text] = []
        try:
            for prompt in job.prompts:
                for i in range(job.n):
                    texts.append(self._text(job, prompt, i, len(texts)))
        except G4Error:
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
        stream = self._answers(job) if options.stop and job.chat else None
        options = replace(options, sampler=sampler, mask=mask, stream=stream)
        request = self.engine.submit(prompt, options)
        assembler = Assembler(self._reader(job), options.stop, self._special)
        return Text(index, request, assembler, self.live.follow(request, job.live))

    @cached_property
    def _special(self) -> frozenset[int]:
        marks = self.prompter.marks
        more = {marks.channel, marks.channel_end, marks.call, marks.call_end} if marks else set()
        return self.tokenizer.control_ids | more

    def _answers(self, job: Job) -> Callable[[], Answer] | None:
        marks = self.prompter.marks
        if marks is None:
            return None
        return partial(Answer.of, self.tokenizer, marks, job.calls, job.open_thought)

    def _reader(self, job: Job) -> Reader:
        marks = self.prompter.marks
        if not job.chat or marks is None:
            return Plain(self.tokenizer)
        return Parser(self.tokenizer, marks, calls=job.calls, thinking=job.open_thought)

    async def close(self) -> None:
        """Free what requests do not own; the engine is its maker's."""
        await self.prompter.close()


def _cancel(work: asyncio.Future[list[Text]]) -> None:
    if not work.cancelled() and work.exception() is None:
        for text in work.result():
            text.request.cancel()


@dataclass(slots=True)
class Text:
    """One of the texts of a job.

    Attributes:
        live: how it is told of at /v1/live.
        finish, stop: see `Delta`; of a text that has ended.
    """

    index: int
    request: Request
    assembler: Assembler
    live: Followed
    finish: str | None = None
    stop: str | None = None


class Generation:
    """The texts of one job as they come. Close it, whatever happens: that frees their memory."""

    _numbers = itertools.count()

    def __init__(self, service: Service, job: Job, texts: list[Text]) -> None:
        self.job, self.texts, self.service = job, texts, service
        self.id = f"{secrets.token_hex(8)}{next(self._numbers):04x}"
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
        """End what has not ended."""
        if not self._closed:
            self._closed = True
            self._timer.cancel()
            self.service.open -= self.job.count
            for text in self.texts:
                if text.finish is None:
                    text.request.cancel()
                    seconds = time.perf_counter() - self._began
                    self.service.metrics.finished(text.request.stats, seconds, "abort")
                    self.service.live.ended(text.live, "abort")

    async def deltas(self) -> AsyncGenerator[tuple[Text, Delta], None]:
        """Yield the pieces of all texts; Refused where one cannot go on."""
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
            left = len(tasks)
            while left:
                text, found = await queue.get()
                if isinstance(found, BaseException):
                    raise found
                if found is None:
                    left -= 1
                else:
                    yield text, found
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
                        yield Delta(progress=cycle.read)
                        continue
                    now = time.perf_counter()
                    if first:
                        metrics.began(now - last)
                    else:
                        metrics.tokens(len(cycle.tokens), now - last)
                    first, last = False, now
                    ids += cycle.tokens
                    delta = text.assembler.cycle(cycle)
                    self.service.live.cycle(text.live, cycle, text.assembler.parts)
                    if delta:
                        delta.ids, ids = ids, []
                        yield delta
        except G4Error as error:
            raise Refused.of(error) from error
        except BaseException as error:
            if error is text.request.error:
                again = isinstance(error, EngineLost) and self.service.engine.failed is None
                said = "the engine has failed" + ("; it is started again" if again else "")
                raise Refused(
                    500, said, code="engine_failed", retry_after=5 if again else None
                ) from error
            raise
        if self._expired:
            limit = self.service.settings.time_limit
            raise Refused(408, f"the request took more than {limit:g} seconds", code="timeout")
        reason = text.request.stats.stop_reason
        if reason in ("cancelled", "closed", "interrupted"):
            raise Refused(503, f"the text was {reason}", code="unavailable")
        delta = text.assembler.finish(text.request.stats)
        delta.ids = ids
        text.finish, text.stop = delta.finish, delta.stop
        seconds = time.perf_counter() - self._began
        metrics.finished(text.request.stats, seconds, str(text.finish))
        self.service.live.ended(text.live, str(text.finish))
        yield delta
