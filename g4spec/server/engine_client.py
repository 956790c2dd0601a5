"""The server's interface to an engine in a subprocess, which is restarted after a crash.

Running requests end with an error. Requests whose prefill has not begun are submitted to the next
process: the text depends only on the request, so the result is the same.
"""

from __future__ import annotations

import itertools
import logging
import signal
import subprocess
import threading
import time
from array import array
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from math import inf
from pathlib import Path
from typing import Any, TypeAlias

from g4spec.convert.unchanged import file_stamps
from g4spec.errors import EnvironmentProblem, UsageError
from g4spec.runtime.engine import Engine
from g4spec.runtime.engine_stats import EngineStats
from g4spec.runtime.request import Options, Request
from g4spec.runtime.request_checks import check_request
from g4spec.runtime.target_file import read_tokenizer
from g4spec.server.channel import Channel
from g4spec.server.engine_process import EngineInfo, pickle_options, start_process
from g4spec.server.remote_request import PendingRequest, RemoteRequest

log = logging.getLogger("g4spec.server")

MAX_FAILURES = 5
"""The engine is not restarted after this many consecutive failures without a finished request."""

WAKE_SECONDS = 300.0
"""Seconds without progress of its load after which an engine that was loaded before hangs."""

RESTART = "restart the server, or unload and load the model"
"""The fix once the engine is no longer restarted."""

EngineLike: TypeAlias = "Engine | EngineClient"

NO_STATS = EngineStats(0, 0, 1, 1, (), 0.0)


class EngineClient(AbstractContextManager["EngineClient"]):
    """A proxy with the part of the `Engine` interface that `Service` uses. Thread-safe.

    Args:
        target: GGUF of the target; its tokenizer is read in this process, too.
        draft, options: see `Engine.load`.
        make: function that loads the engine in the subprocess; must be importable.
        progress: called with the bytes of weights loaded so far, and in total.
        hang_limit: seconds without a finished step, while there are requests, after which the
            process is killed and restarted; 0: never. Default: 300; on a CPU 0.

    Raises:
        G4Error: `Engine.load` failed.
        EnvironmentProblem: the process ended while loading.

    Attributes:
        title, on_cpu: see `EngineInfo`.
        failed: the error after which the engine is no longer restarted, or None.
    """

    def __init__(
        self,
        target: Path,
        draft: Path | str | None = None,
        *,
        make: Callable[..., Engine] = Engine.load,
        progress: Callable[[int, int], None] | None = None,
        hang_limit: float | None = None,
        **options: Any,
    ) -> None:
        self._progress = progress
        self._make, self._arguments = make, {"target": target, "draft": draft, **options}
        self._lock = threading.RLock()  # finalizers of requests, which cancel, may run inside
        self._pending: dict[int, PendingRequest] = {}
        self._ids = itertools.count()
        self._channel: Channel | None = None  # set while a process is ready
        self._load_result: list[Any] = []  # EngineInfo or an error, once loaded
        self._loaded, self._closing = threading.Event(), threading.Event()
        self._request_finished, self._hang_reason = False, ""
        self._put_to_sleep, self._awake = False, threading.Event()
        self._awake.set()
        self._wake_progress = -inf  # time; from `wake` until the process is ready, or has failed
        self._load_progress = inf  # time; of the process that loads
        self._stats, self._last_activity = NO_STATS, time.monotonic()
        self.failed: Exception | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._stamps = file_stamps(target)
        self._thread = threading.Thread(target=self._supervise, name="g4spec engine", daemon=True)
        self._thread.start()
        try:
            self.tokenizer = read_tokenizer(target)
            self._loaded.wait()
            if isinstance(self._load_result[0], BaseException):
                raise self._load_result[0]
        except BaseException:
            self.close()
            raise
        info: EngineInfo = self._load_result[0]
        self.config, self.n_ctx, self.n_slots = info.config, info.n_ctx, info.n_slots
        self.draft_name, self.notes = info.draft_name, info.notes
        self.described = info.described
        self.title, self.on_cpu = info.title, info.on_cpu
        self.stop_ids = self.tokenizer.stop_ids
        self.hang_limit = (0 if self.on_cpu else 300) if hang_limit is None else hang_limit
        threading.Thread(target=self._watch, name="g4spec watch", daemon=True).start()

    # ---- requests

    def submit(self, prompt: Iterable[int], options: Options | None = None) -> Request:
        """See `Engine.submit`; `Options.n` must be 1."""
        options = Options() if options is None else options
        ids = check_request(prompt, options, self.config, self.n_ctx)
        assert options.n == 1, options.n
        request, data = RemoteRequest(ids, options, self), pickle_options(options)
        with self._lock:
            if self._closing.is_set():
                raise UsageError("the engine is closed")
            if self.failed is not None:
                raise EnvironmentProblem("the engine has stopped", found=self.failed)
            number = next(self._ids)
            if not self._pending:
                self._last_activity = time.monotonic()
            self._pending[number] = PendingRequest(request, data)
            self.wake()
            if self._channel is not None:
                self._send_request(number)
        return request

    generate = submit

    def cancel(self, request: Request) -> None:
        """End a request. The process is told; until it confirms that, it works, or hangs."""
        with self._lock:
            pending = self._pending.copy().items()  # a finalizer may cancel, too
            number = next((n for n, t in pending if t.request is request), None)
            if number is None:
                return
            if self._channel is not None:
                self._channel.send("cancel", number)
            else:
                del self._pending[number]
            request.finish("cancelled")

    def _send_request(self, number: int) -> None:
        """Send a request to the running process. The caller holds the lock."""
        pending = self._pending[number]
        pending.tries += 1
        assert self._channel is not None
        self._channel.send("submit", number, array("q", pending.request.prompt), pending.options)
        if pending.request.cancelled:  # while it was submitted again, by a finalizer
            self._channel.send("cancel", number)

    def advance(self, request: Request) -> None:
        """Wait until a request has new tokens or has ended."""
        assert isinstance(request, RemoteRequest)
        while not request.has_news:
            request.wait(1.0)

    def start(self) -> None:
        """Do nothing: the process runs its own loop."""

    # ---- state

    @property
    def process(self) -> int | None:
        """Return the process id of the running or loading process."""
        return self._process.pid if self._process is not None else None

    def stats(self) -> EngineStats:
        """Return the statistics that the process reported last, see `Engine.stats`."""
        return self._stats

    def is_healthy(self, limit: float) -> bool:
        """See `Engine.is_healthy`; False while no process is ready, unless the engine sleeps, or
        wakes and its load progresses."""
        if self.is_sleeping or self.failed is not None:
            return self.is_sleeping
        if self._channel is None:
            return time.monotonic() - self._wake_progress <= WAKE_SECONDS
        since = max(self._stats.last_step, self._last_activity)
        return not self._pending or time.monotonic() - since <= limit

    @property
    def is_sleeping(self) -> bool:
        """Return True from `sleep` to `wake`."""
        return not self._awake.is_set()

    def sleep(self) -> bool:
        """End the process, which frees its memory, until `wake` or the next request.

        A process that is still loading is killed.

        Returns:
            False if there are requests, or the engine is closed or has failed.
        """
        with self._lock:
            if self._pending or self._closing.is_set() or self.failed is not None:
                return False
            self._put_to_sleep = True
            self._awake.clear()
            if self._channel is not None:
                self._channel.send("close")
                self._channel = None  # new requests wait for the next process
            elif self._process is not None:
                self._process.kill()
        return True

    def wake(self) -> None:
        """Start a process if the engine sleeps; return at once."""
        if self.is_sleeping:
            self._wake_progress = time.monotonic()
        self._awake.set()

    def close(self) -> None:
        """Stop the process and end all requests."""
        self._closing.set()
        self.wake()
        if (channel := self._channel) is not None:  # one that becomes ready now is closed there
            channel.send("close")
            self._thread.join(10)
        while self._thread.is_alive():  # it is loading, or does not respond
            if self._process is not None:
                self._process.kill()
            self._thread.join(0.1)

    def __exit__(self, *args: object) -> None:
        self.close()

    # ---- the process

    def _supervise(self) -> None:
        """Restart the process after crashes until `close` or too many failures; end all requests.

        Runs in one thread: the kernel kills the process when the thread that started it ends.
        """
        try:
            self._restart_loop()
        finally:
            with self._lock:
                if self.failed is None and not self._closing.is_set():
                    self.failed = EnvironmentProblem("the engine's process has ended", fix=RESTART)
            if not self._loaded.is_set():  # a bug; its traceback follows
                self._set_load_result(
                    EnvironmentProblem("the engine's process could not be started")
                )
            self._finish_all()

    def _restart_loop(self) -> None:
        """Run processes one after another, with exponential back-off after repeated failures."""
        failures = 0
        while not self._closing.is_set():
            self._request_finished, self._hang_reason = False, ""
            reason = "not started" if self._changed_file() else self._run_process()
            if self._put_to_sleep:
                self._put_to_sleep, failures = False, 0
                self._awake.wait()
                continue
            failures = 1 if self._request_finished else failures + 1
            if not self._loaded.is_set():
                found = self._changed_file() or reason
                self._set_load_result(
                    EnvironmentProblem("the engine's process ended while it loaded", found=found)
                )
            if self._closing.is_set() or isinstance(self._load_result[0], BaseException):
                break
            failed = self._changed_file()
            if failed is None and failures >= MAX_FAILURES:
                what = f"the engine failed {MAX_FAILURES} times in a row"
                failed = EnvironmentProblem(what, found=reason, fix=RESTART)
            self._on_process_end(reason, failed)
            if failed or self._closing.wait(min(2 ** (failures - 2), 30) if failures > 1 else 0):
                break

    def _changed_file(self) -> EnvironmentProblem | None:
        """Return an error if the target's file is not the first one, of which this process has the
        tokenizer, configuration and context length."""
        if file_stamps(target := self._arguments["target"]) == self._stamps:
            return None
        what = f"{target} was changed or removed after it was loaded"
        return EnvironmentProblem(what, fix=RESTART)

    def _watch(self) -> None:
        """Kill a process that hangs; `_run_process` notices its end."""
        while not self._closing.wait(min(self.hang_limit / 4, 5) or 5):
            with self._lock:
                if (why := self._find_hang()) and self.hang_limit and self._process is not None:
                    self._hang_reason = why
                    self._process.kill()

    def _find_hang(self) -> str:
        """Return what does not go on; an empty text if nothing hangs."""
        if self._channel is not None:
            limit, hangs = self.hang_limit, not self.is_healthy(self.hang_limit)
            return f"no step has ended for {limit:g} seconds" if hangs else ""
        hangs = not self.is_sleeping and time.monotonic() - self._load_progress > WAKE_SECONDS
        return f"its load has not gone on for {WAKE_SECONDS:g} seconds" if hangs else ""

    def _set_load_result(self, result: EngineInfo | BaseException) -> None:
        """Pass the result of the first load to `__init__`."""
        self._load_result.append(result)
        self._loaded.set()

    def _run_process(self) -> str:
        """Run one process until it ends; return the reason."""
        self._load_progress = time.monotonic()
        try:
            process, channel = start_process()
        except OSError as error:
            return str(error)
        self._process, reason = process, None
        channel.send("load", self._make, self._arguments)
        try:
            for name, *more in channel.messages():
                if name in ("lost", "refused"):
                    reason = str(more[0])
                if name == "refused" and not self._loaded.is_set():
                    self._set_load_result(more[0])
                if name == "lost" or (name == "ready" and self._changed_file()):
                    break
                self._on_message(channel, name, more)
        finally:
            with self._lock:
                self._channel, self._load_progress = None, inf
            channel.close()
            process.kill()
            code = process.wait()
        exit_status = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return reason or self._hang_reason or exit_status

    def _on_message(self, channel: Channel, name: str, more: list[Any]) -> None:
        """Handle a message of the process; see `channel.Message`."""
        if name == "figures":
            self._stats = more[0]
        elif name == "loading":
            self._load_progress = now = time.monotonic()
            self._wake_progress = now if self._wake_progress > -inf else -inf
            if self._progress is not None and not self._loaded.is_set():
                self._progress(*more)
        elif name == "ready":
            self._ready(channel, more[0])
        elif name in ("begun", "cycle", "done"):
            self._on_request_message(name, *more)

    def _ready(self, channel: Channel, info: EngineInfo) -> None:
        with self._lock:
            if self.is_sleeping:
                channel.send("close")
                return
            self._put_to_sleep, self._wake_progress = False, -inf
            self._channel = channel
            self._last_activity = time.monotonic()
            for number in list(self._pending):
                self._send_request(number)
        if self._loaded.is_set():
            log.info("the engine runs again", extra={"facts": {"process": self.process}})
        else:
            self._set_load_result(info)
        if self._closing.is_set():
            channel.send("close")

    def _on_request_message(self, name: str, number: int, *more: Any) -> None:
        with self._lock:
            ended = name == "done"
            pending = (self._pending.pop if ended else self._pending.get)(number, None)
            self._request_finished |= ended
            if pending is None or pending.request.done:  # it was cancelled
                return
            if name == "begun":
                pending.begun, pending.request.stats = True, more[0]
            elif name == "cycle":
                pending.request.add(*more)
            else:
                pending.request.end(*more)

    def _on_process_end(self, reason: str, failed: EnvironmentProblem | None) -> None:
        """End running requests with EngineLost; if `failed`, set it and end all requests."""
        facts = {"why": reason, "texts": len(self._pending), "again": not failed, "failed": failed}
        log.error("the engine's process ended", extra={"facts": facts})
        with self._lock:
            self._stats, self._wake_progress, self.failed = NO_STATS, -inf, failed
            lost = {n: t for n, t in self._pending.copy().items() if failed or t.ends_with_process}
            for number in lost:
                self._pending.pop(number, None)
        for pending in lost.values():
            pending.end_with_process(reason, failed)

    def _finish_all(self) -> None:
        with self._lock:
            left, self._pending = self._pending, {}
        for pending in left.values():
            pending.request.finish("closed")
