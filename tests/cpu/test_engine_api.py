"""Requests of one engine: in any order, from any thread, cancelled at any moment; one failing
request does not affect the others."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from g4spec.core import PROMPT_BLOCK, Batch, Cycle, Work
from g4spec.errors import EnvironmentProblem, InputError, UsageError
from g4spec.models import ngram
from g4spec.ops.sampling import NotFinite, Sampler
from g4spec.runtime import engine as engine_module
from g4spec.runtime import prefix, scheduler
from g4spec.runtime.engine import Engine
from g4spec.runtime.request import Options, Progress, Request
from g4spec.runtime.torch_settings import own_settings
from tests.support import batch_invariance, memory_engine, tokens
from tests.support import memory_models as mm

SHALLOW = mm.target_config(3)
"""Half the layers of other tests: what is tested here is above the model."""
PROMPTS = [[2, *batch_invariance.tokens(random.Random(i), 20 + 7 * i)] for i in range(6)]
OPTIONS = Options(24, Sampler(temperature=1.0, seed=3), 4, ignore_eos=True)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Return the texts of PROMPTS, each run on its own."""
    engine = memory_engine.engine(config=SHALLOW)
    out = []
    for prompt in PROMPTS:
        request = engine.generate(prompt, OPTIONS)
        list(request)
        out.append(request.text)
    return out


def engine(parallel: int = 2, **shape: Any) -> Engine:
    return memory_engine.engine(
        lambda target: ngram.Drafter(),
        **{"config": SHALLOW, "parallel": parallel, "pool": 2000, **shape},
    )


@pytest.fixture
def threaded() -> Iterator[Engine]:
    with engine() as made:
        yield made


def nothing_left(of: Engine) -> bool:
    return not any(batch_invariance.leaked_resources(of).values())


# ---- any order


@pytest.mark.parametrize("parallel", [1, 2])
def test_the_second_request_is_read_first(parallel: int, texts: list[str]) -> None:
    on = engine(parallel)
    a, b = (on.generate(PROMPTS[i], OPTIONS) for i in range(2))
    list(b)
    list(a)
    assert [a.text, b.text] == texts[:2] and nothing_left(on)


@pytest.mark.parametrize("parallel", [1, 2, 4])
def test_requests_are_read_in_turns(parallel: int, texts: list[str]) -> None:
    on = engine(parallel)
    requests = [on.generate(p, OPTIONS) for p in PROMPTS]
    running, rng = [iter(r) for r in requests], random.Random(0)
    while running:
        at = rng.randrange(len(running))
        if next(running[at], None) is None:
            running.pop(at)
    assert [r.text for r in requests] == texts and nothing_left(on)


def test_tokens_of_a_request(texts: list[str]) -> None:
    on = engine()
    request = on.generate(PROMPTS[0], OPTIONS)
    assert on.tokenizer.decode(request.tokens()) == texts[0]
    assert list(request) == [] and request.done


def test_several_texts_of_one_prompt() -> None:
    on = engine(3)
    request = on.submit(PROMPTS[0], Options(16, Sampler(temperature=1.0, seed=2**64 - 1), n=3))
    list(request)
    for choice in request.choices:
        list(choice)
    assert request.choices[0] is request and len({r.text for r in request.choices}) == 3
    for i, choice in enumerate(request.choices):
        sampler = Sampler(temperature=1.0, seed=(2**64 - 1 + i) % 2**64)
        alone = memory_engine.engine(config=SHALLOW).generate(PROMPTS[0], Options(16, sampler))
        assert list(alone) and alone.ids == choice.ids
        assert choice.choices is request.choices


# ---- threads and asyncio


@pytest.mark.parametrize("own_thread", [False, True])
def test_requests_from_threads(own_thread: bool, texts: list[str]) -> None:
    found: dict[tuple[int, int], str] = {}

    def work(number: int) -> None:
        for i in range(2):
            at = (number + i) % len(PROMPTS)
            request = on.submit(PROMPTS[at], OPTIONS)
            list(request)
            found[number, at] = request.text

    with engine(3) as on:
        if own_thread:
            on.start()
        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(found) == 8 and all(text == texts[at] for (_, at), text in found.items())
        assert nothing_left(on)


def test_async_requests(threaded: Engine, texts: list[str]) -> None:
    async def text(prompt: list[int]) -> str:
        request = threaded.submit(prompt, OPTIONS)
        ids = [token async for cycle in request for token in cycle.tokens]
        assert ids == request.ids
        return request.text

    async def every() -> list[str]:
        return list(await asyncio.gather(*map(text, PROMPTS)))

    assert asyncio.run(every()) == texts
    assert nothing_left(threaded)


def test_an_async_reader_that_stops_cancels(threaded: Engine, texts: list[str]) -> None:
    async def some() -> tuple[Request, str]:
        left = threaded.submit(PROMPTS[0], Options(400, ignore_eos=True))
        async for _ in left:
            break
        other = threaded.submit(PROMPTS[1], OPTIONS)
        async for _ in other:
            pass
        return left, other.text

    left, text = asyncio.run(some())
    list(left)
    assert left.stats.stop_reason == "cancelled" and left.stats.tokens < 400
    assert text == texts[1] and nothing_left(threaded)


def test_a_closed_event_loop_does_not_affect_other_requests(
    threaded: Engine, texts: list[str]
) -> None:
    loop = asyncio.new_event_loop()
    left = threaded.submit(PROMPTS[0], Options(400, ignore_eos=True))
    reading = left.__aiter__()
    loop.run_until_complete(reading.__anext__())  # type: ignore[arg-type]
    loop.close()  # the reader gets no notice
    other = threaded.submit(PROMPTS[1], OPTIONS)
    list(other)
    assert other.text == texts[1]
    list(left)
    assert left.stats.stop_reason == "cancelled"


class Interleaved(deque[Cycle]):
    """News of a request; right after a look at them, another thread runs."""

    def __init__(self, other: Callable[[], object], news: Iterable[Cycle] = ()) -> None:
        super().__init__(news)
        self._others = [other]

    def _switch(self) -> None:
        if self._others:
            self._others.pop()()

    def __bool__(self) -> bool:
        found = len(self) > 0
        self._switch()
        return found

    def popleft(self) -> Cycle:
        try:
            return super().popleft()
        finally:
            self._switch()


def read(request: Request, asynchronous: bool) -> list[Cycle]:
    async def cycles() -> list[Cycle]:
        return [cycle async for cycle in request]

    return asyncio.run(cycles()) if asynchronous else list(request)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_no_cycle_is_lost_that_arrives_with_the_end(
    asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the last look at the news and the one at `done`: the text lacked its end."""
    on = engine()
    request = on.submit(PROMPTS[0], OPTIONS)
    monkeypatch.setattr(on, "start", lambda: None)

    def end() -> None:
        request.append(Cycle([20], [0.0]), first=True)
        request.finish("length")

    request._cycles = Interleaved(end)
    assert [cycle.tokens for cycle in read(request, asynchronous)] == [[20]] == [request.ids]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_two_readers_share_the_cycles(asynchronous: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An IndexError ended the one that came second, and cancelled the request."""
    on, taken = engine(), list[Cycle]()
    request = on.submit(PROMPTS[0], OPTIONS)
    monkeypatch.setattr(on, "start", lambda: None)

    def other() -> None:
        taken.extend(request.drain())
        request.finish("length")

    request._cycles = Interleaved(other, [Cycle([20], [0.0]), Cycle([21], [0.0])])
    ids = [t for cycle in (*read(request, asynchronous), *taken) for t in cycle.tokens]
    assert sorted(ids) == [20, 21] and not request.cancelled


# ---- the end of a request


@pytest.mark.parametrize("use", ["read", "submit", "read later", "start"])
def test_a_forked_process_is_told_that_no_thread_runs_its_steps(use: str, threaded: Engine) -> None:
    """Its requests never ended: a fork copies the engine, not its thread."""

    async def read(request: Request) -> None:
        async for _ in request:
            pass

    threaded.start()
    with threaded.step_lock():  # or it could be held for good in the other process
        early = threaded.submit(PROMPTS[0], OPTIONS)
        process = os.fork()
        if process == 0:
            code = 1
            try:
                if use == "read":
                    next(iter(early))
                elif use == "submit":
                    threaded.submit(PROMPTS[1])
                elif use == "read later":
                    asyncio.run(read(early))
                else:
                    threaded.start()
            except EnvironmentProblem:
                code = 0
            finally:
                os._exit(code)
    list(early)
    assert exit_code(process) == 0


def exit_code(process: int) -> int:
    """Return the exit code of a process, which is killed after 10 seconds."""
    for _ in range(100):
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            break
        time.sleep(0.1)
    else:
        os.kill(process, signal.SIGKILL)
        found, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status)


def test_close_in_a_forked_process_does_not_wait(threaded: Engine, texts: list[str]) -> None:
    """It waited for good for the lock, which the engine's thread has during a step."""
    threaded.start()
    held, left = threading.Event(), threading.Event()

    def hold() -> None:
        with threaded.step_lock():
            held.set()
            left.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(60)
    process = os.fork()
    if process == 0:
        threaded.close()
        os._exit(0)
    code = exit_code(process)
    left.set()
    holder.join()
    assert code == 0
    list(request := threaded.submit(PROMPTS[0], OPTIONS))
    assert request.text == texts[0]


def test_cancelled_requests_end_within_two_steps(texts: list[str]) -> None:
    on = engine(3)
    keep, *doomed = [on.submit(p, OPTIONS) for p in PROMPTS]
    for _ in range(5):
        on.step()
    held = on.pool.n_free
    for request in doomed:
        request.cancel()
    on.step()
    on.step()
    assert all(r.done and r.stats.stop_reason == "cancelled" for r in doomed)
    assert len(on.scheduler.running) == 1 and not on.scheduler.waiting
    assert on.pool.n_free > held and len(on.pool.free_slots) == 2
    list(keep)
    assert keep.text == texts[0] and nothing_left(on)


def test_a_reader_that_is_dropped_cancels(texts: list[str]) -> None:
    on = engine()
    a, b = (
        on.generate(PROMPTS[i], Options(24, OPTIONS.sampler, 4, ignore_eos=True)) for i in range(2)
    )
    for cycle in a:
        assert cycle.tokens
        break
    list(b)
    assert a.done and a.stats.stop_reason == "cancelled" and a.stats.tokens < 24
    assert b.text == texts[1] and nothing_left(on)


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())


def test_a_thousand_cancelled_requests_leak_nothing() -> None:
    """Cancelled at random moments: waiting, in prefill, drafting, preempted."""
    rng = random.Random(4)
    on = memory_engine.engine(
        mm.dflash_draft, parallel=8, n_ctx=640, pool=700, chunk=64, prefix_bytes=1 << 18
    )
    shared = [2, *batch_invariance.tokens(rng, 540)]
    moments = set()

    def round_of(count: int) -> None:
        open_: list[Request] = []
        for _ in range(count):
            prompt = shared if rng.random() < 0.05 else [2, *batch_invariance.tokens(rng, 3)]
            open_.append(on.submit(prompt, Options(90, draft_max=3, ignore_eos=True)))
            if rng.random() < 0.1:
                on.step()
            if len(open_) > 12 or rng.random() < 0.5:
                request = open_.pop(rng.randrange(len(open_)))
                task = next((t for t in on.scheduler.running if t.request is request), None)
                moments.add(
                    "waiting" if task is None else "reading" if task.in_prefill else "running"
                )
                request.cancel()
        for request in open_:
            request.cancel()
        on.step()
        on.step()
        assert all(r.done for r in open_) and not on.step()

    round_of(100)
    assert nothing_left(on)
    before = live_tensors()
    round_of(900)
    assert moments == {"waiting", "reading", "running"}
    assert nothing_left(on) and live_tensors() <= before


def test_close_ends_everything_and_frees_the_weights(texts: list[str]) -> None:
    on = memory_engine.engine(
        lambda target: mm.dflash_draft(target, target_layers=(1, 2, 3)),
        config=SHALLOW,
        parallel=2,
        prefix_bytes=1 << 20,
    )
    assert on.draft is not None
    done, half = on.submit(PROMPTS[0], OPTIONS), on.submit(PROMPTS[1], OPTIONS)
    list(done)
    draft: Any = on.draft
    weights, rows = (*on.target.model.w.values(), *draft.w.values()), on.target.pending._rows
    held = [weakref.ref(x) for x in (*weights, *rows)]
    assert len(rows) == 2
    held += [weakref.ref(kv._rows) for kv in (*on.target.caches, *draft.caches)]
    del draft, weights, rows
    with on:
        pass
    gc.collect()
    assert not any(ref() is not None for ref in held)
    assert done.text == texts[0] and half.done
    list(half)
    with pytest.raises(UsageError, match="closed"):
        on.submit(PROMPTS[0])
    on.close()


@pytest.mark.parametrize("own_thread", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_a_listener_can_close_the_engine(tokens: int, own_thread: bool, texts: list[str]) -> None:
    """While a prompt is read, after its first token, or after a cycle."""
    on = engine(2)
    requests = [on.submit(prompt, replace(OPTIONS, progress=True)) for prompt in PROMPTS[:4]]
    first = requests[0]

    def close() -> None:
        if len(first.ids) >= tokens:
            on.close()

    first.listen(close)
    if own_thread:
        on.start()
    for request in requests:
        list(request)
    assert {request.stats.stop_reason for request in requests} == {"closed"}
    assert first.text and texts[0].startswith(first.text) and on.failed is None
    assert not on.step() and nothing_left(on) and not on.target.model.w


def test_closing_an_engine_on_the_cpu_leaves_frozen_objects_frozen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It froze none: a program may have, as before a fork."""
    unfreeze = mock.Mock()
    monkeypatch.setattr(gc, "freeze", mock.Mock())
    monkeypatch.setattr(gc, "unfreeze", unfreeze)
    with engine() as on:
        list(on.submit(PROMPTS[0], OPTIONS))
    assert not unfreeze.called
    first, second = padded(), padded()
    first.close()
    assert unfreeze.called, "its memory would be kept until the other one closes"
    second.close()


def padded() -> Engine:
    """Return an engine that has frozen objects, as on a GPU."""
    on = engine()
    on.backend.padded = True
    list(on.submit(PROMPTS[0], Options(2)))
    return on


def test_an_engine_is_closed_with_its_own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tables of pages were cleared on the caller's stream, while a cycle might still run."""
    on, within = engine(), list[bool]()
    request = on.submit(PROMPTS[0], OPTIONS)
    on.step()
    clear = on.pool.space.clear

    def noted(slot: int) -> None:
        within.append(torch.is_autocast_enabled("cpu"))
        clear(slot)

    monkeypatch.setattr(on.pool.space, "clear", noted)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        on.close()
    assert within == [False] and request.done


def ends(work: Callable[[], object]) -> bool:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(20)
    return not thread.is_alive()


def test_a_listener_can_close_an_engine_that_another_thread_closes() -> None:
    """It waited for the engine's thread, which waited for the lock of the first `close`."""
    on = engine(2)
    requests = [on.submit(prompt, Options(400, ignore_eos=True)) for prompt in PROMPTS[:3]]
    first = requests[0]
    first.listen(lambda: on.close() if first.done else None)
    on.start()
    assert ends(on.close)
    assert {request.stats.stop_reason for request in requests} == {"closed"}


def interrupt(
    work: Callable[[], object], functions: Sequence[str], handler: Callable[[], None]
) -> bool:
    """Call `handler` at every line of these functions that `work` runs in a thread of its own, once
    at each, as Python calls one of a signal in the main thread. Return whether the thread ended."""
    seen = set[tuple[str, int]]()

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        if code.co_name not in functions:
            return None
        if (at := (code.co_name, frame.f_lineno)) not in seen and event == "line":
            seen.add(at)
            handler()
        return trace

    def traced() -> None:
        sys.settrace(trace)
        try:
            work()
        finally:
            sys.settrace(None)

    ended = ends(traced)
    assert {name for name, _ in seen} == set(functions)
    return ended


def test_a_handler_of_a_signal_can_submit_and_cancel(threaded: Engine, texts: list[str]) -> None:
    """It waited for a lock that the code had which it interrupted, or notified a condition within
    its `notify_all`."""
    made = list[Request]()
    threaded.start()

    def submit() -> None:
        made.append(threaded.submit([2], Options(1, draft_max=0)))
        if len(made) % 2:
            made[-1].cancel()

    def work() -> None:
        list(request := threaded.submit(PROMPTS[0], OPTIONS))
        assert request.text == texts[0]
        made.append(request)

    functions = ("step_lock", "_enqueue", "notify", "wait")
    assert interrupt(work, functions, submit)
    for request in made:
        list(request)
    assert {r.stats.stop_reason for r in made} <= {"length", "cancelled"} and len(made) > 20
    assert len(made[-1].ids) == 24 and nothing_left(threaded)


@pytest.mark.parametrize("function", ["submit", "step_lock", "_enqueue", "notify", "wait", "close"])
def test_a_handler_of_a_signal_can_close_the_engine(function: str, threaded: Engine) -> None:
    """It waited for the engine's thread, which waited for the lock of the interrupted code."""
    made, told = list[Request](), list[str]()
    threaded.start()

    def work() -> None:
        try:
            made.append(threaded.submit(PROMPTS[0], replace(OPTIONS, n_predict=200)))
            if function == "wait":
                list(made[0])
        except UsageError as error:
            told.append(str(error))
        threaded.close()

    assert interrupt(work, [function], threaded.close)
    assert told or made[0].stats.stop_reason == "closed"
    assert nothing_left(threaded) and not threaded.target.model.w


def test_close_ends_all_requests_if_a_listener_fails() -> None:
    """Readers of the others waited for good, and the weights stayed in memory."""
    on = engine(2)
    requests = [on.submit(prompt, OPTIONS) for prompt in PROMPTS[:4]]
    on.step()
    requests[0].listen(lambda: list(on.submit(PROMPTS[0])))
    with pytest.raises(UsageError, match="closed"):
        on.close()
    assert {request.stats.stop_reason for request in requests} == {"closed"}
    assert all(request.done for request in requests)
    assert nothing_left(on) and not on.target.model.w


@pytest.mark.parametrize("own_thread", [False, True])
def test_a_listener_cannot_wait_for_a_request(own_thread: bool, texts: list[str]) -> None:
    """It waited for the step that waited for it, or ran a step within another one."""
    on = engine(2)
    first, second = (on.submit(prompt, OPTIONS) for prompt in PROMPTS[:2])
    refused = dict[str, str]()

    def wait() -> None:
        for name, run in (("step", on.step), ("advance", lambda: on.advance(second))):
            try:
                run()
            except UsageError as error:
                refused[name] = str(error)

    first.listen(wait)
    if own_thread:
        on.start()
    assert ends(lambda: list(first))
    assert first.text == texts[0] and all("a listener cannot" in why for why in refused.values())
    assert set(refused) == {"step", "advance"}
    list(second)
    on.close()
    assert second.text == texts[1]


def test_a_request_that_has_to_wait_keeps_its_prefix_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is restored or evicted for it while others use the pages that it needs, and its
    tokens are hashed once."""
    rng = random.Random(6)
    on = engine(3, n_ctx=1280, pool=1280, prefix_bytes=1 << 20)
    first, other = ([2, *batch_invariance.tokens(rng, n)] for n in (540, 800))
    asked = Options(8, draft_max=3, ignore_eos=True)
    list(on.submit(first, asked))
    assert len(on.prefix) == 1
    restore, restored = on.prefix.restore, []

    def noted(*args: Any) -> None:
        restored.append(args)
        restore(*args)

    hashes, hashed = prefix.block_hashes, []

    def counted(ids: Sequence[int], drafting: bool) -> list[bytes]:
        hashed.append(list(ids))
        return hashes(ids, drafting)

    monkeypatch.setattr(on.prefix, "restore", noted)
    monkeypatch.setattr(prefix, "block_hashes", counted)
    running = on.submit(other, replace(asked, n_predict=30))
    waiting = on.submit([*first, *batch_invariance.tokens(rng, 300)], asked)
    while not running.done:
        assert not restored
        on.step()
    list(waiting)
    assert len(restored) == 1 and waiting.stats.cached_tokens == 512
    assert sum(ids[:600] == waiting.prompt[:600] for ids in hashed) == 1
    alone = engine(1, n_ctx=1280, pool=1280).generate(waiting.prompt, asked)
    assert list(alone) and waiting.ids == alone.ids


def test_snapshots_stay_within_their_memory() -> None:
    """The least recently used one goes first. One that is larger than the budget is not kept."""
    prompts = [[2, *batch_invariance.tokens(random.Random(i), 540)] for i in range(3)]

    def cached(on: Engine, order: Sequence[int]) -> list[int]:
        requests = [on.generate(prompts[i], Options(2, draft_max=2)) for i in order]
        for request in requests:
            list(request)
        return [request.stats.cached_tokens for request in requests]

    def limited(nbytes: int) -> Engine:
        return engine(1, n_ctx=640, pool=4000, prefix_bytes=nbytes)

    free = limited(1 << 30)
    assert cached(free, [0, 0]) == [0, 512] and len(free.prefix) == 1
    size = free.prefix.nbytes
    two = limited(2 * size)
    assert cached(two, [0, 1, 0, 2, 0, 1]) == [0, 0, 512, 0, 512, 0]
    assert len(two.prefix) == 2 and two.prefix.nbytes == 2 * size
    none = limited(size - 1)
    assert cached(none, [0, 0]) == [0, 0] and nothing_left(none)
    two.prefix.clear()
    assert not two.prefix.nbytes and nothing_left(two)


def test_without_memory_to_restore_a_prefix_it_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = [2, *batch_invariance.tokens(random.Random(3), 600)]
    on = memory_engine.engine(mm.dflash_draft, parallel=2, n_ctx=640, prefix_bytes=1 << 20)
    asked = Options(12, draft_max=3, ignore_eos=True)
    list(first := on.generate(prompt, asked))

    def short(*args: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    kept = next(kv for kv in on.target.caches if not kv.paged)
    with monkeypatch.context() as patch:
        patch.setattr(kept, "restore", short)
        list(second := on.generate(prompt, asked))
    list(third := on.generate(prompt, asked))
    assert first.ids == second.ids == third.ids
    assert [r.stats.cached_tokens for r in (first, second, third)] == [0, 0, 512]
    on.prefix.clear()
    assert nothing_left(on)


def test_the_rows_of_a_chunk_are_freed_after_its_prompt() -> None:
    on = engine(1)
    list(on.generate(PROMPTS[5], Options(2, draft_max=0)))
    assert on.scheduler._last_hidden.untyped_storage().nbytes() == 4 * on.config.n_embd


# ---- errors


class AllowsNothing:
    """A mask that allows no token after the first few."""

    def __init__(self, after: int) -> None:
        self.after = after

    def __call__(self, output: Sequence[int]) -> torch.Tensor:
        return torch.full((mm.V,), len(output) < self.after)


class Fails:
    """A mask with a defect after the first few tokens."""

    def __init__(self, after: int, result: Any) -> None:
        self.after, self.result = after, result

    def __call__(self, output: Sequence[int]) -> torch.Tensor | None:
        if len(output) < self.after:
            return None
        if isinstance(self.result, Exception):
            raise self.result
        return self.result  # type: ignore[no-any-return]


@pytest.mark.parametrize("after", [0, 5])
@pytest.mark.parametrize(
    ("result", "found"),
    [
        (ValueError("a bug in a grammar"), "a bug in a grammar"),
        (RuntimeError("sizes differ"), "sizes differ"),  # torch's own
        (UsageError("a bug in a grammar"), "a bug in a grammar"),
        (StopIteration("a bug in a grammar"), "a bug in a grammar"),
        (AssertionError("a bug in a grammar"), "a bug in a grammar"),
        ([True] * mm.V, "list"),
        (torch.ones(3, dtype=torch.bool), "3"),
        (torch.ones(mm.V), "float32"),
    ],
)
def test_a_mask_with_a_defect_ends_only_its_request(
    after: int, result: Any, found: str, texts: list[str]
) -> None:
    on = engine(2)
    good, bad = (
        on.submit(PROMPTS[0], OPTIONS),
        on.submit(PROMPTS[2], Options(24, mask=Fails(after, result))),
    )
    with pytest.raises(InputError, match=f"mask Fails after {after} output tokens.*{found}"):
        list(bad)
    list(good)
    assert good.text == texts[0] and nothing_left(on)


def test_a_mask_without_memory_ends_the_step() -> None:
    on = engine(2)
    good = on.submit(PROMPTS[0], OPTIONS)
    bad = on.submit(PROMPTS[2], Options(24, mask=Fails(5, torch.OutOfMemoryError("CUDA"))))
    with pytest.raises(torch.OutOfMemoryError):
        list(bad)
    assert good.stats.stop_reason == "interrupted" and nothing_left(on)


@pytest.mark.parametrize("after", [0, 1, 7])
@pytest.mark.parametrize("own_thread", [False, True])
def test_a_mask_that_allows_nothing_ends_only_its_request(
    after: int, own_thread: bool, texts: list[str]
) -> None:
    with engine(3) as on:
        if own_thread:
            on.start()
        good = [on.submit(p, OPTIONS) for p in PROMPTS[:2]]
        bad = on.submit(PROMPTS[2], Options(24, mask=AllowsNothing(after)))
        with pytest.raises(InputError, match=r"mask AllowsNothing after \d+ output tokens"):
            list(bad)
        for request in good:
            list(request)
        assert len(bad.ids) <= after and bad.stats.stop_reason == "error"
        assert [r.text for r in good] == texts[:2] and nothing_left(on)


def test_a_mask_can_change_its_tensor_between_steps() -> None:
    kept: list[torch.Tensor] = []

    def mask(output: Sequence[int]) -> torch.Tensor:
        kept[:] = kept or [torch.ones(mm.V, dtype=torch.bool)]
        return kept[0]

    request = engine(1).submit(PROMPTS[0], Options(24, mask=mask, ignore_eos=True))
    for cycle in request:
        kept[0][cycle.tokens] = False
    assert len(set(request.ids)) > 12


@pytest.mark.parametrize("when", ["first token", "later"])
def test_non_finite_logits_end_only_their_request(
    when: str, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on = engine(3)
    requests = [on.submit(p, OPTIONS) for p in PROMPTS[:3]]
    honest, first = on.target.step, on.target.logits

    def run(batch: Batch) -> Any:
        rows, logits = honest(batch)
        for task in on.scheduler.running:
            if task.request is requests[1]:
                logits = logits.masked_fill((batch.slots == task.seq.slot)[:, None], torch.nan)
        return rows, logits

    turns = iter(range(99))

    def of_prompt(hidden: torch.Tensor) -> torch.Tensor:
        return first(hidden) * (torch.nan if next(turns) == 1 else 1.0)

    monkeypatch.setattr(
        on.target, *(("logits", of_prompt) if when == "first token" else ("step", run))
    )
    while not requests[1].done:
        on.step()
    monkeypatch.undo()
    with pytest.raises(NotFinite):
        list(requests[1])
    list(requests[0])
    list(requests[2])
    assert [requests[0].text, requests[2].text] == [texts[0], texts[2]] and nothing_left(on)


@pytest.mark.parametrize("n_predict", [8, 24])
def test_tokens_before_an_error_belong_to_the_text(
    n_predict: int, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error counts only if the text goes on after them."""
    on = engine(1)
    (runner,) = on.scheduler.cycles.runners
    result, honest = runner.result, []

    def failing() -> list[Cycle]:
        cycles = result()
        honest.extend(cycles[0].tokens)
        if len(honest) >= 7:  # the first token is from the prompt
            cycles[0].error = NotFinite.of_logits()
        return cycles

    monkeypatch.setattr(runner, "result", failing)
    request = on.submit(PROMPTS[0], replace(OPTIONS, n_predict=n_predict))
    with nullcontext() if n_predict == 8 else pytest.raises(NotFinite):
        list(request)
    assert request.ids[1:] == honest and texts[0].startswith(request.text)
    assert request.stats.stop_reason == ("length" if n_predict == 8 else "error")


def test_a_bias_outside_the_vocabulary_is_refused_at_once(texts: list[str]) -> None:
    on = engine()
    good = on.submit(PROMPTS[0], OPTIONS)
    with pytest.raises(UsageError, match="`logit_bias`"):
        on.submit(PROMPTS[1], Options(4, Sampler(logit_bias=((mm.V, 1.0),))))
    list(good)
    assert good.text == texts[0]


@pytest.mark.parametrize("chunk", [-5, 0])
def test_a_chunk_without_rows_is_refused(chunk: int) -> None:
    """No prompt would ever be read."""
    with pytest.raises(UsageError, match=f"`chunk`: expected >= 1, found {chunk}"):
        Engine.load(Path("no.gguf"), chunk=chunk)


@pytest.mark.parametrize(
    ("name", "value", "valid"),
    [("pool", -5, ">= 1"), ("prefix_cache", -5, r">= 0 \(0 disables it\)")],
)
def test_sizes_below_zero_are_refused(name: str, value: int, valid: str) -> None:
    with pytest.raises(UsageError, match=f"`{name}`: expected {valid}, found {value}"):
        Engine.load(Path("no.gguf"), **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "kw",
    [
        {"n_ctx": "64"},
        {"n_ctx": 64.0},
        {"n_ctx": True},
        {"draft_window": "8"},
        {"draft_window": True},
        {"draft_p_min": "0.5"},
        {"draft_p_min": True},
        {"device": None},
        {"device": torch.device("cpu")},
        {"parallel": None},
        {"prefix_cache": None},
    ],
)
def test_settings_of_other_types_are_refused(kw: dict[str, Any], tmp_path: Path) -> None:
    """They ended in tracebacks, a window of True only in the first step, `parallel` None after the
    files had been read."""
    path = tokens.target_file(tmp_path / "t.gguf")
    with pytest.raises(UsageError, match=f"`{next(iter(kw))}`: expected"):
        Engine.load(path, "draft.gguf" if "draft" in str(kw) else None, **kw)


def test_the_context_may_be_a_number_of_numpy(tmp_path: Path) -> None:
    with Engine.load(tokens.target_file(tmp_path / "t.gguf"), n_ctx=np.int64(64)) as on:  # type: ignore[arg-type]
        assert type(on.n_ctx) is int


@pytest.mark.parametrize("token", [2.0, "2", None, True, torch.tensor(2), np.array([2, 3])])
def test_a_prompt_of_other_things_than_ids_is_refused(token: Any) -> None:
    """Numbers with a fraction were rounded."""
    with pytest.raises(InputError, match="a prompt token is outside the vocabulary"):
        engine().submit([1, token], OPTIONS)


@pytest.mark.parametrize("more", [0, 600])
def test_ids_of_numpy_are_taken(more: int) -> None:
    """Take prompts with whole blocks for the prefix cache too, which ended the step of all."""
    on = memory_engine.engine(mm.dflash_draft, n_ctx=700, prefix_bytes=1 << 20)
    prompt = [*PROMPTS[0], *batch_invariance.tokens(random.Random(4), more)]
    own, numpy = (
        on.submit(ids, Options(8, ignore_eos=True)) for ids in (prompt, np.array(prompt, np.uint16))
    )
    list(own), list(numpy)
    assert own.ids == numpy.ids and all(type(token) is int for token in numpy.prompt)


@pytest.mark.parametrize("kind", [np.int64, np.uint64, np.uint8])
def test_options_may_be_numbers_of_numpy(kind: type[Any]) -> None:
    """Their differences overflow, also with integers of Python."""
    on = memory_engine.engine(mm.dflash_draft)

    def answer(of: Callable[[int], Any]) -> Request:
        bias = (of(3), of(5)), (of(7), of(1))
        sampler = Sampler(of(1), of(40), seed=of(6), logit_bias=bias)
        options = Options(of(7), draft_max=of(4), logprobs=of(1), sampler=sampler, ignore_eos=True)
        list(request := on.generate(PROMPTS[0], options))
        return request

    want, got = answer(int), answer(kind)
    assert got.ids == want.ids and got.stats.cycles == want.stats.cycles
    assert got.options == want.options and repr(got.options) == repr(want.options)


def test_options_may_be_fractions() -> None:
    """They ended the step of all requests."""
    half = Fraction(1, 2)
    sampler = Sampler(half, top_p=half, min_p=half, repetition_penalty=half, presence_penalty=half)
    assert sampler == Sampler(0.5, 0, 0.5, 0.5, repetition_penalty=0.5, presence_penalty=0.5)
    assert isinstance(sampler.temperature, float) and isinstance(sampler.presence_penalty, float)


@pytest.mark.parametrize(
    "kw",
    [
        {"n_predict": 2.5},
        {"n_predict": True},
        {"draft_max": True},
        {"draft_max": "Auto"},
        {"logprobs": 1.5},
        {"n": "2"},
        {"n_predict": None},
        {"draft_max": None},
        {"n": None},
        {"stop": (3,)},
        {"stop": None},
        {"stop": b"x"},
        {"sampler": {"temperature": 1.0}},
        {"sampler": None},
    ],
)
def test_options_of_other_types_are_refused(kw: dict[str, Any]) -> None:
    """They ended steps, or were taken for other numbers."""
    with pytest.raises(UsageError, match=f"`{next(iter(kw))}`: expected"):
        Options(**kw)


@pytest.mark.parametrize("made", ["inside", "outside"])
@pytest.mark.parametrize("setting", ["autocast", "device", "dtype", "inference"])
def test_settings_of_torch_of_the_caller_change_nothing(
    setting: str, made: str, tmp_path: Path
) -> None:
    """A notebook that trains or uses a GPU by default ended every request."""

    @contextmanager
    def changed() -> Iterator[None]:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    settings: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        "device": lambda: torch.device("meta"),
        "dtype": changed,
        "inference": torch.inference_mode,
    }
    path = tokens.target_file(tmp_path / "t.gguf")
    options = Options(8, ignore_eos=True)
    with Engine.load(path, "ngram", n_ctx=64) as plain:
        list(want := plain.submit([2, 10, 11, 12], options))
    with settings[setting]() if made == "inside" else nullcontext():
        on = Engine.load(path, "ngram", n_ctx=64)
    with on, settings[setting]():
        list(got := on.submit([2, 10, 11, 12], options))
        on.submit([2, 10], options)
        on.step()
    assert got.ids == want.ids


@pytest.mark.parametrize("known", ["high", RuntimeError("set for one backend")], ids=str)
def test_rounded_products_of_the_process_are_said(
    known: str | RuntimeError, monkeypatch: pytest.MonkeyPatch
) -> None:
    on = engine()
    assert not on.submit(PROMPTS[0], OPTIONS).notes
    monkeypatch.setattr(torch, "get_float32_matmul_precision", mock.Mock(side_effect=[known]))
    (note,) = on.submit(PROMPTS[0], OPTIONS).notes
    assert "set_float32_matmul_precision" in note


@pytest.mark.parametrize("current", [0, 1])
def test_steps_use_the_default_stream_of_their_gpu(
    current: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads with streams of their own ran steps of one engine, and no step waited for the cycle
    that the one before it had left on another stream."""
    entered = list[tuple[str, str]]()
    for name in ("device", "stream"):

        def enter(on: Any, name: str = name) -> AbstractContextManager[None]:
            entered.append((name, str(on)))
            return nullcontext()

        monkeypatch.setattr(torch.cuda, name, enter)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"own of {device}")
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: f"default of {device}")
    with own_settings(torch.device("cuda:1")):
        pass
    wanted = [("stream", "default of cuda:1")]
    assert entered == ([] if current == 1 else [("device", "cuda:1")]) + wanted


@pytest.mark.parametrize("n", [1025, 10**8])
def test_the_number_of_texts_is_limited(n: int) -> None:
    """All were made at once, while no request could run."""
    with pytest.raises(UsageError, match=f"`n`: expected 1 to 1024, found {n}"):
        Options(n=n)


def test_options_may_be_lists() -> None:
    """They are kept as tuples. Type checkers refused them, and still refuse one text."""
    options, sampler = Options(stop=["a", "b"]), Sampler(logit_bias=[(3, 1.0)])
    assert options.stop == ("a", "b") and sampler.logit_bias == ((3, 1.0),)
    assert hash(sampler) == hash(Sampler(logit_bias=((3, 1.0),)))


def test_options_may_be_iterators() -> None:
    """The checks consumed them, after which they had no effect."""
    options = Options(stop=iter(["a", "b"]))  # type: ignore[arg-type]
    sampler = Sampler(logit_bias=zip([3, 5], [1.0, 2.0], strict=True))  # type: ignore[arg-type]
    assert options.stop == ("a", "b") and sampler.logit_bias == ((3, 1.0), (5, 2.0))


def test_text_instead_of_ids_is_refused() -> None:
    with pytest.raises(UsageError, match=r"engine\.tokenizer\.encode"):
        memory_engine.engine().submit("def area(r):")  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", [None, 5, np.array(5), torch.tensor(5)])
def test_other_things_than_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(UsageError, match="`prompt`: expected a sequence of token ids"):
        memory_engine.engine().submit(prompt)


@pytest.mark.parametrize("options", [{"n_predict": 2}, {}, 24])
def test_other_things_than_options_are_refused(options: Any) -> None:
    """An empty dict was taken for the defaults."""
    with pytest.raises(UsageError, match="`options`: expected Options"):
        memory_engine.engine().submit(PROMPTS[0], options)


def test_a_prompt_may_be_an_iterator(texts: list[str]) -> None:
    on = engine()
    request = on.submit(iter(PROMPTS[0]), OPTIONS)
    list(request)
    assert request.prompt == PROMPTS[0] and request.text == texts[0]
    with pytest.raises(InputError, match="the prompt is empty"):
        on.submit(iter([]))


def test_a_failing_step_ends_all_requests_and_the_engine_continues(
    texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on = engine(2)
    requests = [on.submit(p, OPTIONS) for p in PROMPTS[:3]]
    on.step()

    def broken(batch: Batch) -> Any:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(on.target, "step", broken)
    with pytest.raises(torch.OutOfMemoryError):
        on.step()
    monkeypatch.undo()
    for request in requests:
        with pytest.raises(torch.OutOfMemoryError):
            list(request)
    assert nothing_left(on)
    again = on.generate(PROMPTS[1], OPTIONS)
    list(again)
    assert again.text == texts[1]


def test_requests_end_even_if_the_gpu_no_longer_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an illegal memory access every call fails, also those that free memory."""
    on = engine(2)
    requests = [on.submit(p, OPTIONS) for p in PROMPTS[:3]]
    on.step()

    def broken(*args: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(on.target, "step", broken)
    monkeypatch.setattr(on.pool.space, "clear", broken)
    with pytest.raises(RuntimeError, match="illegal"):
        on.step()
    assert all(request.done for request in requests)
    for request in requests:
        with pytest.raises(RuntimeError, match="illegal"):
            list(request)


class BrokenStream:
    """A text decoder that fails."""

    def push(self, ids: Iterable[int]) -> str:
        raise ValueError("cannot push")

    def finish(self) -> str:
        raise ValueError("cannot finish")


class FailsAtTheEnd(BrokenStream):
    def push(self, ids: Iterable[int]) -> str:
        return "x"


@pytest.mark.parametrize("stream", [BrokenStream, FailsAtTheEnd])
def test_all_requests_end_if_the_stream_of_one_fails(
    stream: type[BrokenStream], texts: list[str]
) -> None:
    """It fails again when the failed step ends its request."""
    on = engine(3)
    broken = replace(OPTIONS, n_predict=4, stream=stream)
    requests = [on.submit(p, o) for p, o in zip(PROMPTS, (OPTIONS, broken, OPTIONS), strict=False)]
    with pytest.raises(ValueError, match="cannot"):
        while on.step():
            pass
    assert all(isinstance(request.error, ValueError) for request in requests)
    assert all(request.done for request in requests) and nothing_left(on)
    again = on.generate(PROMPTS[1], OPTIONS)
    list(again)
    assert again.text == texts[1]


def test_a_request_from_a_listener_of_one_that_failed_runs(
    texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on, more = engine(1), list[Request]()
    first = on.submit(PROMPTS[0], OPTIONS)
    on.step()

    def broken(*args: Any) -> Any:
        raise RuntimeError("out of luck")

    def submit_next() -> None:
        if first.done and not more:
            more.append(on.submit(PROMPTS[1], OPTIONS))

    first.listen(submit_next)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="luck"):
        patch.setattr(on.target, "step", broken)
        on.step()
    assert len(more) == 1 and not more[0].done
    list(more[0])
    assert more[0].text == texts[1] and nothing_left(on)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("part", ["step", "own_settings"])
def test_no_request_is_left_when_the_thread_ends(
    part: str, threaded: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even one from a listener of a request that failed: nobody would run it."""
    refused = threading.Event()

    def broken(*args: Any) -> Any:
        raise RuntimeError("out of luck")

    def submit_next() -> None:
        if first.done:
            with pytest.raises(EnvironmentProblem, match="has stopped: found out of luck"):
                threaded.submit(PROMPTS[1], OPTIONS)
            refused.set()

    first = threaded.submit(PROMPTS[0], OPTIONS)
    first.listen(submit_next)
    monkeypatch.setattr(threaded.target if part == "step" else engine_module, part, broken)
    threaded.start()
    assert refused.wait(10) and threaded.stats().idle
    with pytest.raises(RuntimeError, match="luck"):
        list(first)


def test_choices_end_if_not_all_can_be_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    on, made = engine(4), [0]
    chooser = engine_module.RequestChooser

    def third_fails(*args: Any) -> Any:
        made[0] += 1
        if made[0] == 3:
            raise MemoryError
        return chooser(*args)

    monkeypatch.setattr(engine_module, "RequestChooser", third_fails)
    with pytest.raises(MemoryError):
        on.submit(PROMPTS[0], replace(OPTIONS, n=4))
    assert not on.step() and nothing_left(on)


def test_no_thread_waits_for_many_steps_of_another() -> None:
    """Without a thread of the engine, the threads that iterate over requests run its steps."""
    on = engine(2, n_ctx=1280, pool=2560)
    first = on.submit(PROMPTS[0], replace(OPTIONS, n_predict=1200, draft_max=0))
    thread = threading.Thread(target=lambda: list(first))
    thread.start()
    waited = []
    while not first.done and len(waited) < 40:
        before = len(first.ids)
        with on.step_lock():
            waited.append(len(first.ids) - before)
        time.sleep(0.005)
    second = on.submit(PROMPTS[1], replace(OPTIONS, n_predict=8))
    list(second)
    assert not first.done or len(waited) < 40
    first.cancel()
    thread.join()
    assert len(waited) > 10 and max(waited) <= 2


@pytest.mark.parametrize("where", ["measurement", "admission"])
def test_an_interruption_before_the_first_step_leaves_nothing_behind(
    where: str, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while cycles are measured, and while a request gets its slot and pages."""
    on = engine(1)

    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        of: Any = on.scheduler.cycles.runners[0] if where == "measurement" else on.draft
        patch.setattr(of, "result" if where == "measurement" else "begin", interrupted)
        list(on.generate(PROMPTS[0], Options(24)))
    assert nothing_left(on)
    for i in range(2):
        again = on.generate(PROMPTS[i], OPTIONS)
        list(again)
        assert again.text == texts[i]


def test_no_cycle_is_left_after_an_interruption(
    texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C after a runner has started a cycle that the scheduler has not noted yet."""
    on = engine(1)
    (runner,) = on.scheduler.cycles.runners
    dropped: list[int] = []
    monkeypatch.setattr(runner, "drop", lambda: dropped.append(1))

    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(on.lengths, "decisions", interrupted)
        list(on.generate(PROMPTS[0], OPTIONS))
    assert dropped
    again = on.generate(PROMPTS[0], OPTIONS)
    list(again)
    assert again.text == texts[0]


@pytest.mark.parametrize("where", ["rows", "logits"])
def test_out_of_memory_in_a_prompt_ends_only_its_request(
    where: str, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on = engine(3)
    read, logits, reads = on.backend.read, on.target.logits, [False]

    def short(target: Any, slot: int, ids: Sequence[int], start: int, pause: Any) -> Any:
        reads[:] = [list(ids[:4]) == PROMPTS[1][:4]]
        return without_memory(where == "rows", lambda: read(target, slot, ids, start, pause))

    def short_logits(hidden: torch.Tensor) -> torch.Tensor:
        return without_memory(where == "logits", lambda: logits(hidden))

    def without_memory(here: bool, run: Callable[[], Any]) -> Any:
        if reads[0] and here:
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")
        return run()

    first = on.submit(PROMPTS[0], OPTIONS)
    on.step()
    monkeypatch.setattr(on.backend, "read", short)
    monkeypatch.setattr(on.target, "logits", short_logits)
    bad, last = on.submit(PROMPTS[1], OPTIONS), on.submit(PROMPTS[2], OPTIONS)
    with pytest.raises(EnvironmentProblem, match=r"out of GPU memory .* 2 GiB"):
        list(bad)
    for request in (first, last):
        list(request)
    assert [first.text, last.text] == [texts[0], texts[2]] and nothing_left(on)


def test_an_error_in_a_cycle_within_a_prompt_is_not_the_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A listener that submits a wrong prompt ended another request with its error."""
    on = engine(2)
    first = on.submit(PROMPTS[0], OPTIONS)
    on.step()
    read = on.backend.read

    def paused(target: Any, slot: int, ids: Sequence[int], start: int, pause: Any) -> Any:
        if slot != on.scheduler.running[0].seq.slot:
            first.listen(lambda: on.submit([]))
            pause()
        return read(target, slot, ids, start, pause)

    monkeypatch.setattr(on.backend, "read", paused)
    other = on.submit(PROMPTS[1], OPTIONS)
    with pytest.raises(RuntimeError, match=r"in a cycle: .*empty"):
        while on.step():
            pass
    assert first.done and other.done and not other.ids


# ---- fairness


def test_requests_are_admitted_in_order_of_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later request does not overtake even if it would fit earlier; a preempted one keeps its
    place."""
    rng = random.Random(2)
    on = memory_engine.engine(config=SHALLOW, parallel=4, n_ctx=512)
    begun: list[int] = []
    begin = scheduler.Scheduler._try_admit

    def noted(self: Any, task: Any) -> bool:
        fits = begin(self, task)
        if fits and task.number not in begun:
            begun.append(task.number)
        return fits

    monkeypatch.setattr(scheduler.Scheduler, "_try_admit", noted)
    sizes = (100, 400, 3, 3, 380, 3, 120, 3)
    requests = [
        on.submit([2, *batch_invariance.tokens(rng, n)], Options(40, ignore_eos=True))
        for n in sizes
    ]
    while on.step():
        pass
    assert begun == list(range(1, 9)) and all(len(r.ids) == 40 for r in requests)


def test_a_long_prompt_does_not_hold_up_running_texts(
    texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "INTERLEAVED_ROWS", 16)
    on = engine(3)
    running = on.submit(PROMPTS[0], replace(OPTIONS, draft_max=0))
    while not running.ids:
        on.step()
    rows: list[int] = []
    events: list[Any] = []
    read = on.backend.read

    def counted(target: Any, slot: int, ids: Sequence[int], start: int, pause: Any) -> Any:
        events.append(len(ids))
        return read(target, slot, ids, start, pause)

    monkeypatch.setattr(on.backend, "read", counted)
    start = type(on.scheduler.cycles.runners[0]).start

    def started(self: Any, work: Sequence[Work]) -> None:
        rows.append(sum(events))
        events.clear()
        start(self, work)

    monkeypatch.setattr(type(on.scheduler.cycles.runners[0]), "start", started)
    long = [
        on.submit([2, *batch_invariance.tokens(random.Random(9), 300)], Options(4))
        for _ in range(2)
    ]
    while not running.done:
        on.step()
    assert max(rows) == 16 and sum(rows) > 100, "both in turn, a little between two cycles"
    list(running)
    assert running.text == texts[0]
    for request in long:
        assert list(request)


def test_the_time_to_find_a_stop_text_does_not_grow_with_the_text() -> None:
    """After each token the whole text was searched, for which all requests waited."""

    class Stream:
        more = " s" * 100_000

        def push(self, ids: Any) -> str:
            text, self.more = self.more, "s"
            return text

        def finish(self) -> str:
            return ""

    def seconds(stop: tuple[str, ...]) -> float:
        driver: Any = None  # nobody waits for the request
        tokenizer: Any = memory_engine.Characters()
        request = Request([2], Options(stop=stop, stream=Stream), driver, tokenizer)
        request.append(Cycle([9], [0.0]))
        began = time.process_time()
        request.append(Cycle([9] * 100, [0.0] * 100))
        assert len(request.ids) == 101
        return time.process_time() - began

    many = tuple(f"stop {i}" for i in range(16))
    without, found = (min(seconds(stop) for _ in range(5)) for stop in ((), many))
    assert found < 4 * without, (found, without)


def test_a_text_in_place_of_the_list_of_stop_texts() -> None:
    with pytest.raises(UsageError, match="`stop`: expected a tuple of texts"):
        Options(stop="\n")  # type: ignore[arg-type]


def test_whole_blocks_and_short_ends_share_the_room_between_cycles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU a part of a prompt is whole blocks, and a short end counts as less than a block."""
    block, end, rng = 64, 16, random.Random(4)
    prompts = [[2, *batch_invariance.tokens(rng, n - 1)] for n in (150, 10, 64, 5, 130, 70)]
    alone = memory_engine.engine(config=SHALLOW, n_ctx=512)
    texts = [list(r) and r.text for r in (alone.generate(p, Options(8)) for p in prompts)]
    on = memory_engine.engine(config=SHALLOW, parallel=len(prompts) + 1, n_ctx=512, pool=4096)
    monkeypatch.setattr(scheduler, "INTERLEAVED_ROWS", block)
    monkeypatch.setattr(on.backend, "block", block)

    def prefill_rows(count: int) -> int:
        rest = count % block
        return count - rest + -(-rest // end) * end

    monkeypatch.setattr(on.backend, "prefill_rows", prefill_rows)
    running = on.submit(PROMPTS[0], Options(60, ignore_eos=True))
    while not running.ids:
        on.step()
    parts: list[int] = []
    read, lengths = on.backend.read, {len(p) for p in prompts}

    def noted(target: Any, slot: int, ids: Sequence[int], start: int, pause: Any) -> Any:
        assert start % block == 0 and (len(ids) % block == 0 or start + len(ids) in lengths)
        parts.append(prefill_rows(len(ids)))
        return read(target, slot, ids, start, pause)

    monkeypatch.setattr(on.backend, "read", noted)
    requests = [on.submit(p, Options(8)) for p in prompts]
    rows, several = [], 0
    while not running.done:
        on.step()
        rows.append(sum(parts))
        several += len(parts) > 1
        parts.clear()
    assert max(rows) == block and several, rows
    assert [r.text for r in requests] == texts


@pytest.mark.parametrize("block, most", [(1, 3), (64, 1)])
def test_recomputed_tokens_do_not_hold_up_running_texts(
    block: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU a step of recomputed tokens counts as a block of a prompt. They are no progress of
    their prompt."""
    on, asked = engine(), Options(120, draft_max=3, ignore_eos=True, progress=True)
    monkeypatch.setattr(scheduler, "INTERLEAVED_ROWS", 64)
    monkeypatch.setattr(on.backend, "block", block)
    first, second = (on.submit(p, asked) for p in PROMPTS[:2])
    while len(second.ids) < 70:
        on.step()
    on.scheduler._preempt(on.scheduler.running[-1])
    counts: list[int] = []
    part = on.scheduler._prefill_part

    def noted(task: Any, max_rows: int) -> Any:
        if task.seq.n_read >= task.n_prompt:
            counts[-1] += 1
        return part(task, max_rows)

    monkeypatch.setattr(on.scheduler, "_prefill_part", noted)
    while not second.done:
        counts.append(0)
        on.step()
    assert max(counts) == most and sum(counts) >= 70 // 16 and first.done, counts
    read = [cycle.read for cycle in second if isinstance(cycle, Progress)]
    assert read == sorted(set(read)) and read[-1] == second.stats.read_tokens == len(PROMPTS[1])


def test_log_probabilities_of_a_prompt_come_once_and_without_the_prefix_cache() -> None:
    """Also if the request is preempted during its prompt. They are those that a prompt which ends
    there has for its next token."""
    rng = random.Random(8)
    prompt = [2, *batch_invariance.tokens(rng, 600)]
    on = memory_engine.engine(
        None, n_ctx=768, parallel=2, pool=2000, prefix_bytes=batch_invariance.PREFIX_BYTES
    )
    list(on.generate(prompt, Options(1)))
    other = on.submit(PROMPTS[0], Options(60, ignore_eos=True))  # makes parts of one block
    request = on.submit(prompt, Options(1, logprobs=2, prompt_logprobs=2))
    while request.stats.read_tokens < PROMPT_BLOCK:
        on.step()
    on.scheduler._preempt(on.scheduler.running[-1])
    cycles = list(request)
    found = [each for cycle in cycles if isinstance(cycle, Progress) for each in cycle.logprobs]
    assert len(found) == len(prompt) - 1 and not request.stats.cached_tokens
    for end in (1, 512, 513, 600):
        (cycle,) = on.generate(prompt[:end], Options(1, logprobs=mm.V, draft_max=0))
        wanted = cycle.logprobs[0][1]
        value, top = found[end - 1]
        assert value == pytest.approx(dict(wanted)[prompt[end]], abs=1e-4)
        assert [i for i, _ in top] == [i for i, _ in wanted[:2]]
        assert [x for _, x in top] == pytest.approx([x for _, x in wanted[:2]], abs=1e-4)
    other.cancel()
