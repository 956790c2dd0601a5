"""Which kernel instances there are, and many of them compiled at once.

A module of this package that launches kernels lists them in `UNITS`, so that a test can compile
every one for every architecture, and bound what it takes, on a machine without a GPU.
"""

from __future__ import annotations

import base64
import importlib
import json
import os
import pickle
import pkgutil
import queue
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from g4spec.errors import EnvironmentProblem, G4Error
from g4spec.runtime.cuda import cache, nvrtc

WORKERS = 8  # processes at most; NVRTC compiles one program at a time in each


@dataclass(frozen=True)
class Unit:
    """Instances of one kernel file that are compiled together.

    Args:
        file: name in `kernels/`.
        names: name expressions, for instance "norm<2>".
        archs: what they are compiled for.
        max_registers: a bound that a test holds each instance to, on every architecture.
        shared: most bytes of dynamic shared memory of a block; one number, or one for each arch.
    """

    file: str
    names: tuple[str, ...]
    archs: tuple[str, ...] = nvrtc.ARCHS
    max_registers: int = 255
    shared: int | Mapping[str, int] = 0

    def shared_on(self, arch: str) -> int:
        """Most bytes of dynamic shared memory of a block on this architecture."""
        return self.shared if isinstance(self.shared, int) else self.shared.get(arch, 0)


@dataclass(frozen=True)
class Job:
    """One compilation: these instances of this file for this architecture."""

    file: str
    names: tuple[str, ...]
    arch: str


def registered() -> dict[str, list[Unit]]:
    """`UNITS` of every module of this package that has them, by module name."""
    import g4spec.runtime.cuda as package

    found = {}
    for info in pkgutil.iter_modules(package.__path__):
        units = getattr(importlib.import_module(f"{package.__name__}.{info.name}"), "UNITS", None)
        if units is not None:
            found[info.name] = list(units)
    return found


def cached(job: Job) -> nvrtc.Cubin:
    """A cubin from the disk cache, or compiled now and kept there."""
    sources = nvrtc.closure(job.file)
    key = nvrtc.key(sources, job.names, job.arch)
    cubin = cache.load(key, job.arch)
    if cubin is None:
        cubin = nvrtc.compile(sources, job.names, job.arch)
        cache.store(key, cubin)
    return cubin


def compile_all(jobs: Sequence[Job], workers: int | None = None) -> list[nvrtc.Cubin]:
    """Cubins of all jobs, in their order; those not on disk are compiled in several processes.

    Args:
        jobs: what to compile.
        workers: processes; by default one for each CPU this process may use, at most 8.

    Raises:
        KernelCompileError: of the first job (in their order) that failed.
    """
    done: dict[int, nvrtc.Cubin | G4Error] = {}
    for i, job in enumerate(jobs):
        key = nvrtc.key(nvrtc.closure(job.file), job.names, job.arch)
        if (cubin := cache.load(key, job.arch)) is not None:
            done[i] = cubin
    missing = [i for i in range(len(jobs)) if i not in done]
    workers = min(workers or min(WORKERS, _cpus()), len(missing))
    if workers <= 1:
        return [done[i] if i in done else cached(job) for i, job in enumerate(jobs)]  # type: ignore[misc]
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for i in missing:
        waiting.put(i)
    threads = [threading.Thread(target=_feed, args=(jobs, waiting, done)) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [_result(done.get(i), jobs[i]) for i in range(len(jobs))]


def _cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _result(found: nvrtc.Cubin | G4Error | None, job: Job) -> nvrtc.Cubin:
    if found is None:
        raise EnvironmentProblem(
            f"{job.file}: the process that compiled it ended early",
            fix="see whether the machine has memory left, and start again",
        )
    if isinstance(found, G4Error):
        raise found
    return found


def _feed(
    jobs: Sequence[Job], waiting: queue.SimpleQueue[int], done: dict[int, nvrtc.Cubin | G4Error]
) -> None:
    """Starts one worker process and hands it jobs, one at a time, until none is waiting.

    A plain process, not `multiprocessing`: that would run the user's script again in each.
    """
    code = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); " \
        f"from {__name__} import _work; _work()"  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-c", code, json.dumps(sys.path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as worker:  # fmt: skip
        assert worker.stdin and worker.stdout
        while True:
            try:
                i = waiting.get_nowait()
            except queue.Empty:
                return
            job = jobs[i]
            try:
                worker.stdin.write(json.dumps([job.file, job.names, job.arch]) + "\n")
                worker.stdin.flush()
            except BrokenPipeError:
                return
            answer = worker.stdout.readline()
            if not answer:
                return
            done[i] = pickle.loads(base64.b64decode(answer))


def _work() -> None:
    """The worker process: a job a line in, an answer a line out."""
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        file, names, arch = json.loads(line)
        answer: Any
        try:
            answer = cached(Job(file, tuple(names), arch))
        except G4Error as error:
            answer = error
        answers.write(base64.b64encode(pickle.dumps(answer)).decode() + "\n")
        answers.flush()


def jobs_for(units: Iterable[Unit], arch: str) -> list[Job]:
    """What is compiled of these units for one architecture."""
    return [Job(unit.file, unit.names, arch) for unit in units if arch in unit.archs]
