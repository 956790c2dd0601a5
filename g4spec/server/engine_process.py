"""The process of an engine, which `engine_client.EngineClient` starts.

A failed CUDA call leaves a process that no other call can be made in. So it ends then, and whoever
started it starts another one.
"""

from __future__ import annotations

import ctypes
import io
import os
import pickle
import signal
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from g4spec.errors import EnvironmentProblem, G4Error
from g4spec.runtime.engine import Engine
from g4spec.runtime.engine_stats import EngineStats
from g4spec.runtime.request import Options, Progress, Request, Stats
from g4spec.server.channel import Channel, Message
from g4spec.server.grammar import Vocabulary

EXIT_ENGINE_FAILED = 70
"""Exit code of a process whose engine has failed."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What is known of an engine once it is loaded; see the fields of `Engine`.

    Attributes:
        title: of its device. on_cpu: whether that is none but the CPU.
    """

    config: Any
    n_ctx: int
    n_slots: int
    draft_name: str | None
    notes: list[str]
    title: str
    on_cpu: bool


def engine_info(engine: Engine) -> EngineInfo:
    """Describe an engine."""
    return EngineInfo(
        engine.config,
        engine.n_ctx,
        engine.n_slots,
        engine.draft_name,
        engine.notes,
        engine.backend.title,
        engine.on_cpu,
    )


def copy_stats(stats: Stats) -> Stats:
    """Copy counts that go on."""
    return replace(
        stats,
        drafted_by_position=list(stats.drafted_by_position),
        accepted_by_position=list(stats.accepted_by_position),
    )


def describe_error(error: BaseException | None) -> str:
    """Describe an error in words."""
    return f"{type(error).__name__}: {error}" if error is not None else "interrupted"


class _Unpickler(pickle.Unpickler):
    """Puts this process' objects in the places where `engine_client` named them."""

    def __init__(self, data: bytes, shared: dict[str, Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._shared = shared

    def persistent_load(self, name: Any) -> Any:
        return self._shared[name]


class RequestRelay:
    """Sends what comes of one request."""

    def __init__(self, number: int, request: Request, progress: bool, worker: Worker) -> None:
        self._number, self._request, self._progress = number, request, progress
        self._worker, self._begun, self._sent = worker, False, 0

    def __call__(self) -> None:
        """Send news; called by the engine's thread."""
        request, channel = self._request, self._worker.channel
        send = channel.send
        if request.stats.stop_reason == "interrupted":
            self._worker.fail(request.error)
        for cycle in request.taken():
            if not self._begun:
                self._begun = True
                channel.send_now("begun", self._number)  # the next step may be the last
            if self._progress or not isinstance(cycle, Progress):
                send("cycle", self._number, cycle, copy_stats(request.stats), *self._new_text())
        if request.done:
            error = request.error
            if error is not None and not isinstance(error, G4Error):
                error = RuntimeError(describe_error(error))  # others need not survive the way
            send(
                "done",
                self._number,
                copy_stats(request.stats),
                request.notes,
                error,
                *self._new_text(),
            )
            self._worker.requests.pop(self._number, None)

    def _new_text(self) -> tuple[int, str]:
        """Return the text that is new, and what it follows: a stop text cuts what was there."""
        text = self._request.text
        kept = min(self._sent, len(text))
        self._sent = len(text)
        return kept, text[kept:]


class Worker:
    """Does what the server asks for, until it is gone."""

    def __init__(self, connection: Connection) -> None:
        self._shared: dict[str, Any] = {}
        self.channel = Channel(connection)
        self.requests: dict[int, Request] = {}

    def run(self) -> int:
        """Load an engine, then take requests; returns the exit code."""
        messages = self.channel.messages()
        name, make, arguments = next(messages)
        assert name == "load", name
        try:
            engine: Engine = make(**arguments, progress=partial(self.channel.send, "loading"))
            list(engine.generate([engine.tokenizer.bos], Options(n_predict=2)))  # measures costs
        except (G4Error, MemoryError, RuntimeError) as error:  # the last two: of torch
            known = (
                error
                if isinstance(error, G4Error)
                else EnvironmentProblem("the engine cannot be loaded", found=describe_error(error))
            )
            self.channel.send("refused", known)
            self.channel.finish()
            return known.exit_code
        vocabulary = Vocabulary(engine.tokenizer, engine.config.n_vocab)
        self._shared |= {"tokenizer": engine.tokenizer, "vocabulary": vocabulary}
        self.channel.periodic = FigureUpdates(engine)
        self.channel.send("ready", engine_info(engine))
        engine.start()
        for name, *more in messages:
            if name == "close":
                engine.close()
                break
            if name == "submit":
                self._submit(engine, *more)
            elif (request := self.requests.get(more[0])) is not None:
                request.cancel()
        self.channel.finish()
        return 0

    def _submit(self, engine: Engine, number: int, prompt: Any, options: bytes) -> None:
        try:
            requested: Options = _Unpickler(options, self._shared).load()
            with engine.step_lock():
                # The first word of its progress says that it has begun.
                request = engine.submit(list(prompt), replace(requested, progress=True))
                self.requests[number] = request
                request.listen(RequestRelay(number, request, requested.progress, self))
        except G4Error as error:
            if engine.failed is None:  # else it waits for the next process
                self.channel.send("done", number, Stats(len(prompt)), [], error, 0, "")

    def fail(self, error: Exception | None) -> None:
        """End this process: a step has failed, and nobody knows what the device still does."""
        text = describe_error(error)
        sys.stderr.writelines([f"the engine failed: {text}\n"])
        self.channel.send("lost", text)
        self.channel.finish()
        os._exit(EXIT_ENGINE_FAILED)


class FigureUpdates:
    """Makes "figures" when they have changed, at most ten times a second."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._due = engine, 0.0
        self._last: EngineStats | None = None

    def __call__(self) -> Message | None:
        """Return the message, or None."""
        if self._engine.failed is not None:
            return "lost", describe_error(self._engine.failed)
        now = time.monotonic()
        figures = self._engine.stats()
        if figures == self._last or (now < self._due and not figures.idle):
            return None
        self._last, self._due = figures, now + 0.1
        return "figures", figures


def end_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends (Linux); elsewhere the
    end of the socket says so, to a process that can still listen."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main() -> None:
    """Serve the socket whose number is the first argument."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the server says when to end
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()
    if os.getppid() != int(sys.argv[2]):
        os._exit(0)  # it ended before
    os._exit(Worker(Connection(int(sys.argv[1]))).run())
