"""Requirements of a server on the engine: one bad request ends only itself, and no caller waits for
a dead thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any

import pytest
import torch

from g4spec.errors import EnvironmentProblem, InputError
from g4spec.runtime.engine import Engine
from g4spec.runtime.request import Options, Request
from g4spec.server.service import Job, Service
from g4spec.server.settings import Settings

Engines = Callable[..., Engine]


def allow_then_nothing(tokens: Sequence[int]) -> torch.Tensor | None:
    """Allow everything for some tokens, then nothing."""
    return torch.zeros(4096, dtype=torch.bool) if len(tokens) >= 3 else None


def text(engine: Engine, **more: Any) -> str:
    request = engine.submit(engine.tokenizer.encode("def main():"), Options(n_predict=12, **more))
    for _ in request:
        pass
    return request.text


@pytest.mark.parametrize("draft", [None, "dflash.gguf"])
def test_an_empty_mask_ends_only_its_request(engines: Engines, draft: str | None) -> None:
    engine = engines(draft, parallel=2)
    alone = text(engine, draft_max=2)
    ids = engine.tokenizer.encode("def main():")
    bad = engine.submit(ids, Options(n_predict=12, mask=allow_then_nothing, draft_max=2))
    good = engine.submit(ids, Options(n_predict=12, draft_max=2))
    for _ in good:
        pass
    assert good.text == alone
    with pytest.raises(InputError, match="at least one allowed token"):
        list(bad)
    assert len(bad.ids) == 3 and not engine.scheduler.running


def test_a_mask_without_a_first_token_ends_only_its_request(engines: Engines) -> None:
    engine = engines(None, parallel=2)
    bad = engine.submit([2, 5], Options(mask=lambda tokens: torch.zeros(4096, dtype=torch.bool)))
    with pytest.raises(InputError, match="at least one allowed token"):
        list(bad)
    assert text(engine)


def test_stop_texts_are_found_in_the_text_of_the_request(engines: Engines) -> None:
    class Upper:
        def __init__(self) -> None:
            self.inner = engine.tokenizer.stream()

        def push(self, ids: Sequence[int]) -> str:
            return self.inner.push(ids).upper()

        def finish(self) -> str:
            return self.inner.finish().upper()

    engine = engines(None, parallel=2)
    plain = text(engine)
    word = next(w for w in plain.split() if w.upper() != w)
    assert text(engine, stream=Upper) == plain.upper()
    assert text(engine, stream=Upper, stop=(word,)) == plain.upper()
    assert text(engine, stream=Upper, stop=(word.upper(),)) == plain.upper().split(word.upper())[0]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_broken_step_ends_all_requests_and_refuses_new_ones(
    family: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine.load(family / "target.gguf") as engine:
        before = engine.last_step
        monkeypatch.setattr(engine.scheduler, "_cycle", lambda after_prefill: 1 / 0)
        engine.start()
        with pytest.raises(ZeroDivisionError):
            list(engine.submit([2, 5]))
        while engine.failed is None:
            time.sleep(0.001)
        assert engine.last_step > before
        with pytest.raises(EnvironmentProblem, match="the engine has stopped: found division"):
            engine.submit([2, 5])


def test_starting_twice_does_not_wait_for_a_step(engines: Engines) -> None:
    with_lock = threading.Event()
    engine = engines(None, n_ctx=256)
    engine.start()

    def hold() -> None:
        with engine.step_lock():
            with_lock.set()
            time.sleep(0.5)

    thread = threading.Thread(target=hold)
    thread.start()
    with_lock.wait()
    began = time.perf_counter()
    engine.start()
    assert time.perf_counter() - began < 0.25
    thread.join()


def test_a_text_that_ends_with_its_time_is_complete(engines: Engines) -> None:
    """Between its end and the moment when it was read, the limit turned it into an error (408)."""
    engine = engines(None, parallel=2)
    service = Service(engine, Settings("tiny"))
    engine.start()

    async def run() -> str | None:
        generation = await service.submit(Job([2, 9], Options(n_predict=4, ignore_eos=True)))
        while not generation.texts[0].request.done:
            await asyncio.sleep(0.001)
        generation._expire()
        async with aclosing(generation.deltas()) as deltas:
            async for _ in deltas:
                pass
        generation.close()
        return generation.texts[0].finish

    assert asyncio.run(run()) == "length"


def test_texts_end_if_not_all_can_be_submitted(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an unexpected error the first ones were generated for nobody."""
    engine = engines(None, parallel=2)
    service, made = Service(engine, Settings("tiny")), list[Request]()
    submit = engine.submit

    def second_fails(*args: Any) -> Request:
        if made:
            raise MemoryError
        made.append(submit(*args))
        return made[0]

    monkeypatch.setattr(engine, "submit", second_fails)
    job = Job([2, 9], Options(n_predict=400, ignore_eos=True), 2)
    with pytest.raises(MemoryError):
        asyncio.run(service.submit(job))
    assert made[0].cancelled and service.open == 0


class LateWakeLock:
    """A lock whose waiters wake up late, as on a busy machine: a thread that releases it and
    acquires it again always comes first."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.release, self._release_save = self._lock.release, self._lock._release_save  # type: ignore[attr-defined]
        self._is_owned = self._lock._is_owned  # type: ignore[attr-defined]

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        while not self._lock.acquire(blocking=False):
            if not blocking:
                return False
            time.sleep(0.02)
        return True

    def locked(self) -> bool:  # exported by conditions since Python 3.14
        return self._is_owned()

    def _acquire_restore(self, state: Any) -> None:
        self._lock._acquire_restore(state)  # type: ignore[attr-defined]

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *args: object) -> None:
        self.release()


def test_a_request_is_admitted_while_another_runs(family: Any) -> None:
    """It waits for one step, not for the end of the other text."""
    with Engine.load(family / "target.gguf", n_ctx=512, parallel=2) as engine:
        engine._condition = threading.Condition(LateWakeLock())  # type: ignore[arg-type]
        engine.start()
        long = engine.submit([2, 9], Options(n_predict=500, ignore_eos=True))
        while not long.ids:
            time.sleep(0.001)
        before = len(long.ids)
        other = engine.submit([2, 5], Options(n_predict=1, ignore_eos=True))
        assert len(list(other.tokens())) == 1
        assert not long.done and len(long.ids) < before + 100
        with engine.step_lock():
            began = len(long.ids)
            time.sleep(0.05)
            assert len(long.ids) == began
