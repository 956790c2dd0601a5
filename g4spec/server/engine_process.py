"""The engine's subprocess, started by `engine_client.EngineClient`.

After a failed CUDA call, all further CUDA calls of a process fail. The process exits then, and its
parent starts a new one.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from g4spec.errors import EnvironmentProblem, G4Error
from g4spec.ops.simple import SimpleOps
from g4spec.runtime.engine import Engine
from g4spec.runtime.engine_stats import EngineStats
from g4spec.runtime.prefill import out_of_memory
from g4spec.runtime.request import Options, Progress, Request, Stats
from g4spec.runtime.tokenizer import Tokenizer
from g4spec.server.channel import Channel, Message
from g4spec.server.grammar import Vocabulary

EXIT_ENGINE_FAILED = 70
"""Exit code of the process after an engine failure."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Properties of a loaded engine; fields as in `Engine`.

    Attributes:
        title: name of the device.
        on_cpu: True if the device is the CPU.
    """

    config: Any
    n_ctx: int
    n_slots: int
    draft_name: str | None
    notes: list[str]
    described: dict[str, int | str]
    title: str
    on_cpu: bool


def engine_info(engine: Engine) -> EngineInfo:
    """Return the properties of an engine."""
    return EngineInfo(
        engine.config,
        engine.n_ctx,
        engine.n_slots,
        engine.draft_name,
        engine.notes,
        engine.described,
        engine.backend.title,
        engine.on_cpu,
    )


def copy_stats(stats: Stats) -> Stats:
    """Return a copy of counters that continue to change."""
    return replace(
        stats,
        drafted_by_position=list(stats.drafted_by_position),
        accepted_by_position=list(stats.accepted_by_position),
    )


def describe_error(error: BaseException | None) -> str:
    """Return type and message of an error, or "interrupted" for None."""
    return f"{type(error).__name__}: {error}" if error is not None else "interrupted"


class _Pickler(pickle.Pickler):
    """A pickler that writes the tokenizer and vocabulary as names; the process has its own."""

    def persistent_id(self, value: Any) -> str | None:
        known = {Tokenizer: "tokenizer", Vocabulary: "vocabulary"}
        return known.get(type(value))


def pickle_options(options: Options) -> bytes:
    """Return the options of a request for "submit"."""
    data = io.BytesIO()
    _Pickler(data).dump(options)
    return data.getvalue()


class _Unpickler(pickle.Unpickler):
    """An unpickler that resolves the names of `_Pickler` to local objects."""

    def __init__(self, data: bytes, shared: dict[str, Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._shared = shared

    def persistent_load(self, name: Any) -> Any:
        return self._shared[name]


class RequestRelay:
    """Sends the progress of one request to the server."""

    def __init__(
        self, number: int, request: Request, progress: bool, worker: Worker, ops: SimpleOps
    ) -> None:
        self._number, self._request, self._progress = number, request, progress
        self._worker, self._ops, self._begun, self._sent = worker, ops, False, 0

    def __call__(self) -> None:
        """Send new cycles and the end; called in the engine's thread."""
        request, channel = self._request, self._worker.channel
        send = channel.send
        if request.stats.stop_reason == "interrupted":
            self._worker.fail(request.error)
        for cycle in request.drain():
            if not self._begun:
                self._begun = True
                # Unqueued: the next step may crash the process.
                channel.send_now("begun", self._number, copy_stats(request.stats))
            if self._progress or cycle.logprobs or not isinstance(cycle, Progress):
                send("cycle", self._number, cycle, copy_stats(request.stats), *self._new_text())
        if request.done:
            error = request.error
            if error is not None and not isinstance(error, G4Error):
                error = RuntimeError(describe_error(error))  # other types may not be picklable
            send(
                "done",
                self._number,
                copy_stats(request.stats),
                request.notes + self._ops.kernel_notes(),
                error,
                *self._new_text(),
            )
            self._worker.requests.pop(self._number, None)

    def _new_text(self) -> tuple[int, str]:
        """Return (length to keep, new text): a stop string may shorten what was sent before."""
        text = self._request.text
        kept = min(self._sent, len(text))
        self._sent = len(text)
        return kept, text[kept:]


class Worker:
    """Handles the messages of the server until the connection is closed."""

    def __init__(self, connection: Connection) -> None:
        self._shared: dict[str, Any] = {}
        self.channel = Channel(connection)
        self.requests: dict[int, Request] = {}

    def run(self) -> int:
        """Load an engine, then handle requests; return the exit code."""
        messages = self.channel.messages()
        name, make, arguments = next(messages)
        assert name == "load", name
        try:
            engine: Engine = make(**arguments, progress=partial(self.channel.send, "loading"))
            list(
                engine.generate([engine.tokenizer.bos], Options(n_predict=2))
            )  # measures step costs
        except (G4Error, MemoryError, RuntimeError) as error:  # torch raises the last two
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
                # The first progress report shows that prefill has begun.
                request = engine.submit(list(prompt), replace(requested, progress=True))
                self.requests[number] = request
                ops = engine.target.ops
                request.listen(RequestRelay(number, request, requested.progress, self, ops))
        except (G4Error, torch.OutOfMemoryError) as error:
            if engine.failed is None:  # otherwise the text is submitted to the next process
                known = error if isinstance(error, G4Error) else out_of_memory(error)
                self.channel.send("done", number, Stats(len(prompt)), [], known, 0, "")

    def fail(self, error: Exception | None) -> None:
        """Exit the process after a failed step: the state of the device is undefined."""
        text = describe_error(error)
        sys.stderr.writelines([f"the engine failed: {text}\n"])
        self.channel.send("lost", text)
        self.channel.finish()
        os._exit(EXIT_ENGINE_FAILED)


class FigureUpdates:
    """Creates "figures" messages when they have changed, at most ten times a second."""

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
    """Let the kernel kill this process when the thread that started it ends (Linux only).

    On other systems the process exits when it notices that the socket is closed.
    """
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main() -> None:
    """Run a worker; arguments: file descriptor of the socket, process id of the parent."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the server stops this process
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()
    if os.getppid() != int(sys.argv[2]):
        os._exit(0)  # the parent has already ended
    os._exit(Worker(Connection(int(sys.argv[1]))).run())


_PROGRAM = """import gc, json, sys
sys.path[:] = json.loads(sys.argv.pop(1))
gc.disable()
from g4spec.server.engine_process import main
gc.freeze()
gc.enable()
main()
"""
"""Collections while torch is imported find nothing and take a fifth of the time."""


def start_process() -> tuple[subprocess.Popen[bytes], Channel]:
    """Start a process that runs `main`; return it and the channel to it.

    Raises:
        OSError: it cannot be started.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            [
                sys.executable,
                "-I",
                "-c",
                _PROGRAM,
                json.dumps(sys.path),
                str(theirs.fileno()),
                str(os.getpid()),
            ],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=sys.__stderr__,
            start_new_session=True,  # Ctrl-C in the terminal is for the server
        )
        return process, Channel(Connection(ours.detach()))
