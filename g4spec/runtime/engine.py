"""The engine loads a target and a draft and runs any number of requests with continuous batching.

    engine = Engine.load(Path("target.gguf"), Path("draft.gguf"), parallel=4)
    request = engine.submit(prompt_ids, Options(n_predict=100))
    for cycle in request: ...              # or request.tokens(), or `async for`
    engine.close()

By default there is no background thread: whoever waits for a request runs the steps of the engine,
for all running requests. After `start()` a thread of the engine runs them, as a server needs it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch

from g4spec import ranges
from g4spec.backend import Backend
from g4spec.core import MAX_STEP_ROWS, Draft
from g4spec.errors import EnvironmentProblem, UsageError
from g4spec.gguf import GGUF
from g4spec.models import gemma4, ngram, ollama
from g4spec.runtime import devices, loading, memory, target_file
from g4spec.runtime.chooser import RequestChooser
from g4spec.runtime.draft_file import DraftFile
from g4spec.runtime.draft_history import PolicyState
from g4spec.runtime.draft_length import DraftLengthPolicy
from g4spec.runtime.engine_stats import EngineStats, collect_stats
from g4spec.runtime.pool import Pool
from g4spec.runtime.prefix import PrefixCache
from g4spec.runtime.request import Options, Request
from g4spec.runtime.request_checks import check_request
from g4spec.runtime.scheduler import Scheduler
from g4spec.runtime.target import Target
from g4spec.runtime.task import Task
from g4spec.runtime.tokenizer import Tokenizer
from g4spec.runtime.torch_settings import own_settings, rounding_notes


class Engine:
    """A loaded target, with or without a draft. Create it with `load`; usable from any thread.

    Attributes:
        config: configuration of the target.
        tokenizer: tokenizer of the target.
        stop_ids: tokens that end generation.
        n_ctx: context length of a request, in tokens.
        memory: the memory plan computed before loading.
        notes: remarks to show with every run.
        described: see `target_file.described`.
        last_step: `time.monotonic()` when the last step ended, or when an idle engine got work.
        failed: the exception that ended the engine's thread, after which nothing runs.
    """

    def __init__(
        self,
        target: Target,
        draft: Draft | None,
        tokenizer: Tokenizer,
        plan: memory.MemoryPlan,
        prefix_bytes: int = 0,
    ) -> None:
        self.target, self.draft, self.tokenizer, self.memory = target, draft, tokenizer, plan
        self.config, self.n_ctx = target.config, target.n_ctx
        self.backend: Backend = target.backend
        self.stop_ids = tokenizer.stop_ids
        self.notes: list[str] = []
        self.described: dict[str, int | str] = {}
        target.taps = draft.taps if draft else ()
        self.lengths = DraftLengthPolicy(self.backend.padded)
        self.pool = Pool(target.space)
        self.prefix = PrefixCache(self.pool, target.caches, draft, prefix_bytes)
        self.scheduler = Scheduler(
            target, draft, self.backend, self.pool, self.prefix, self.lengths
        )
        self._condition = threading.Condition(threading.RLock())
        self._lock_waiters = set[object]()  # of the other lock, whose methods need none themselves
        self._thread: threading.Thread | None = None
        self._submitted = 0
        self._closed = False
        self._worker: threading.Thread | None = None  # in a step, or ending requests
        self.last_step = time.monotonic()
        self.failed: BaseException | None = None

    @classmethod
    @torch.inference_mode(False)  # tensors made in that mode can be changed only in it
    def load(
        cls,
        target: str | Path,
        draft: Path | str | None = None,
        *,
        n_ctx: int | None = None,
        draft_window: int | None = None,
        draft_p_min: float | None = None,
        chunk: int | None = None,
        device: str = "cpu",
        cache_type: str | None = None,
        parallel: int = 1,
        pool: int | None = None,
        prefix_cache: int = 0,
        progress: Callable[[int, int], None] | None = None,
    ) -> Engine:
        """Open the files, check the pair and the memory, and load the weights.

        Args:
            draft: a draft GGUF, "ngram" for n-gram lookup, or None.
            n_ctx: context length of a request in tokens; 0: the length the model was trained on.
                Default: the trained length, at most 8192.
            draft_window: limit of the context that full-attention layers of a draft see, in tokens.
            draft_p_min: minimum confidence of a drafted token, 0 to 1, for drafts with a confidence
                head: a proposal ends before the first token below it. 0 keeps all tokens. Default:
                the value in the draft's file, which is 0 unless set.
            chunk: number of prompt rows per prefill chunk; default: chosen by the device. On a GPU
                it is rounded up to whole blocks.
            device, cache_type: see `devices.select`.
            parallel: maximum number of running requests, 1 to 1024; further ones wait.
            pool: size of the KV cache of global layers in tokens, shared by all requests; default
                and minimum: `n_ctx`.
            prefix_cache: host memory for the prefix cache in bytes; 0 disables it.
            progress: called with the bytes of target weights loaded so far, and in total.

        Raises:
            InputError: a file is invalid, or target and draft do not fit together.
            UsageError: an option is out of range, or the draft does not support it.
            EnvironmentProblem: there is not enough memory.
        """
        ranges.check(parallel=parallel, prefix_cache=prefix_cache)
        ranges.check_given(chunk=chunk, pool=pool)
        backend = devices.select(device, cache_type)
        chunk = -(-(chunk or backend.chunk) // backend.block) * backend.block
        with own_settings(backend.ops.device), GGUF(target) as file:
            config = target_file.parse_config(file)
            context = target_file.context_length(n_ctx, config.n_ctx)
            size = memory.Size.of(context, parallel, pool)
            with DraftFile(draft, draft_p_min, draft_window) as other:
                present = loading.check_weights(file, gemma4.tensors(config))
                plan = target_file.plan_memory(file, config, other, size, chunk, backend)
                space = backend.space(parallel, context, size.pages)
                weights = loading.load_weights(file, present, backend, progress)
                tokenizer = target_file.load_tokenizer(file, config)
                loaded = Target(config, weights, backend, space, chunk)
                drafter: Draft | None = ngram.Drafter() if draft == "ngram" else None
                if other.file is not None:
                    drafter = other.build(backend, loaded)
            engine = cls(loaded, drafter, tokenizer, plan, prefix_cache)
            engine.notes += ollama.notes(file) + other.notes
            engine.described = target_file.described(file)
            return engine

    # ---- requests

    def submit(self, prompt: Iterable[int], options: Options | None = None) -> Request:
        """Queue a prompt and return its request immediately. With `Options.n` > 1 the other
        requests are in its `choices`.

        Raises:
            InputError: the prompt is empty, too long for the context, or has ids outside the
            vocabulary. UsageError: `logit_bias` names a token outside the vocabulary, or an
            argument has another type.
        """
        self._check_thread()
        options = Options() if options is None else options
        ids = check_request(prompt, options, self.config, self.n_ctx)
        requests = list[Request]()
        with self.step_lock():
            if self._closed:
                raise UsageError("the engine is closed")
            if self.failed is not None:
                raise EnvironmentProblem(
                    "the engine has stopped", found=self.failed, fix="start it again"
                )
            if self.scheduler.idle:
                self.last_step = time.monotonic()
            try:
                for i in range(options.n):
                    seed = (options.sampler.seed + i) % 2**64
                    own = replace(options.sampler, seed=seed, suppress=self.tokenizer.suppress_ids)
                    requests.append(self._enqueue(ids, replace(options, sampler=own)))
            except BaseException:
                for request in requests:  # nobody gets them
                    request.cancel()
                raise
            finally:
                if self._closed and self._worker is None:  # meanwhile, by a handler of a signal
                    self._free()
        for request in requests:
            request.choices = requests
        return requests[0]

    def generate(self, prompt: Iterable[int], options: Options | None = None) -> Request:
        """Submit one prompt; short form: `for cycle in engine.generate(ids, options)`."""
        return self.submit(prompt, options)

    def _enqueue(self, prompt: Sequence[int], options: Options) -> Request:
        notes = self.notes + rounding_notes()
        request = Request(prompt, options, self, self.tokenizer, notes)
        drafting = self.draft is not None and options.draft_max != 0
        with torch.inference_mode(False), own_settings(self.target.ops.device):  # of its tensors
            chooser = RequestChooser(options, prompt, self.config.n_vocab, self.backend)
        # In a context too short to measure costs, drafts cannot gain much either.
        short = self.n_ctx < MAX_STEP_ROWS + 2
        requested = (
            0 if not drafting or (options.draft_max == "auto" and short) else options.draft_max
        )
        state, submitted = PolicyState(requested), time.perf_counter()
        self._submitted += 1
        self.scheduler.submit(
            Task(self._submitted, request, list(prompt), chooser, state, drafting, submitted)
        )
        return request

    # ---- state

    @property
    def n_slots(self) -> int:
        """Maximum number of running requests."""
        return int(self.target.space.n_slots)

    @property
    def draft_name(self) -> str | None:
        """Name of the kind of draft; None without a draft."""
        return self.draft.name if self.draft is not None else None

    @property
    def on_cpu(self) -> bool:
        """True if the engine runs on the CPU."""
        return bool(self.target.ops.device.type == "cpu")

    def stats(self) -> EngineStats:
        """Return counts of queues, pages and caches. Thread-safe."""
        return collect_stats(self.scheduler, self.pool, self.last_step)

    def is_healthy(self, limit: float) -> bool:
        """Return True if steps make progress or there is nothing to do.

        Args:
            limit: maximum duration of a step, in seconds.
        """
        stalled = time.monotonic() - self.last_step > limit
        return self.failed is None and (self.scheduler.idle or not stalled)

    # ---- work

    @contextmanager
    def step_lock(self) -> Iterator[None]:
        """Keep the engine from starting a step, for instance to submit and add a listener
        atomically.

        Waits for at most one step. A plain lock is not enough: a thread that always works would
        take it again before any waiting thread wakes up.
        """
        if self._has_lock:  # `notify_all` could interrupt itself
            yield
            return
        waiter = object()
        try:
            self._lock_waiters.add(waiter)
            self._condition.acquire()
        finally:
            self._lock_waiters.discard(waiter)
        try:
            try:
                yield
            finally:
                self._condition.notify_all()
        finally:
            self._condition.release()

    @property
    def _has_lock(self) -> bool:
        """True in the thread that has the lock: in a listener, or in a handler of a signal or a
        finalizer, which run at any point of a thread."""
        try:
            self._condition.notify(0)
        except RuntimeError:
            return False
        return True

    def step(self) -> bool:
        """Run one step of all running requests; return False if there is nothing to do."""
        # In this mode, operations on small tensors take a fifth less time on a CPU.
        mode = torch.inference_mode(self.backend.name == "torch")
        with self._condition, mode, ExitStack() as stack:
            self._check_no_listener()
            try:
                self._worker = threading.current_thread()
                stack.enter_context(own_settings(self.target.ops.device))
                return self.scheduler.step()
            except BaseException as error:
                if threading.current_thread() is self._thread:  # which ends: refuse new requests
                    self.failed = error
                self.scheduler.abandon(error)
                raise
            finally:
                self._worker, self.last_step = None, time.monotonic()
                if self._closed:
                    self._free()

    def _check_no_listener(self) -> None:
        """Raise UsageError in a step, which a listener, a mask or a signal's handler interrupts."""
        if self._worker is threading.current_thread():
            raise UsageError(
                "a listener cannot run steps or wait for a request",
                fix="read the request in another thread, or after the step",
            )

    def advance(self, request: Request) -> None:
        """Run steps, or wait for the engine's thread, until the request has news or is done."""
        while not request.has_news:
            self._check_no_listener()
            if self._thread is None:
                with self._condition:
                    while self._lock_waiters:
                        self._condition.wait(1.0)
                with self.step_lock():
                    if not request.has_news:
                        self.step()
                continue
            self._check_thread()
            request.wait(1.0)

    def start(self) -> None:
        """Run steps in a thread of the engine from now on, until `close`."""
        self._check_thread()
        if self._thread is not None:  # without the lock: nobody waits for a step here
            return
        with self.step_lock():
            if self._thread is None and not self._closed:
                thread = threading.Thread(target=self._run_steps, name="g4spec", daemon=True)
                thread.start()  # it waits for the lock; `_is_copy` must not see one that never ran
                self._thread = thread

    def _check_thread(self) -> None:
        """Raise EnvironmentProblem after a fork, which copies the engine without its thread."""
        if self._is_copy:
            raise EnvironmentProblem(
                "the engine's thread does not run in this process",
                fix="load an engine after the fork, or do not call `start` before it",
            )

    @property
    def _is_copy(self) -> bool:
        """True in a process that was forked while the engine had a thread."""
        thread = self._thread
        if thread is None or thread.is_alive() or self._closed:
            return False
        return self.failed is None

    def _run_steps(self) -> None:
        while True:
            with self._condition:
                while not self._closed and (self.scheduler.idle or self._lock_waiters):
                    self._condition.wait(1.0 if self._lock_waiters else None)
                if self._closed:
                    return
                self.step()

    def close(self) -> None:
        """End all requests and free the engine's memory. Generated text stays readable. A listener
        or a handler of a signal may call it: the step that it interrupts ends first. It does
        nothing in a process that was forked after `start`: the engine is that of the other one."""
        if self._is_copy:  # its lock may be held for good
            return
        within = self._has_lock
        with self.step_lock():
            self._closed = True
            if self._worker is not None:  # this thread: within a step
                return
            self._free()
        if self._thread is None or self._thread is threading.current_thread():
            return
        if not within:  # else the thread needs the lock to end
            self._thread.join()

    def _free(self) -> None:
        """Free everything, also if a listener fails; one that calls `close` returns at once."""
        try:
            self._worker = threading.current_thread()
            with ExitStack() as stack:
                with suppress(RuntimeError):  # of a GPU that no longer answers
                    stack.enter_context(own_settings(self.target.ops.device))
                self.scheduler.close()
        finally:
            self.target.close()
            self.backend.close()
            self.draft = self._worker = None

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()
