"""Which kernel instances there are, and many of them compiled at once.

A module of this package that launches kernels lists them in `UNITS`, so that a test can compile
every one for every architecture, and bound what it takes, on a machine without a GPU.
"""

from __future__ import annotations

import base64
import contextlib
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

from g4spec.errors import EnvironmentProblem, G4Error
from g4spec.runtime.cuda.build import disk_cache as cache
from g4spec.runtime.cuda.build import nvrtc

WORKERS = 8  # processes at most; NVRTC compiles one program at a time in each


@dataclass(frozen=True)
class Unit:
    """Instances of one kernel file, each compiled to a cubin of its own.

    Args:
        file: name in `kernels/`.
        names: name expressions, for instance "norm<2>".
        archs: what they are compiled for.
        max_registers, max_spill: bounds (of spills in bytes) that a test holds each instance to, on
            every architecture.
        shared: most bytes of dynamic shared memory of a block; one number, or one for each arch.
        more: further instances of the same templates, which a test compiles only where it is asked
            for all (G4SPEC_COMPILE=all).
    """

    file: str
    names: tuple[str, ...]
    archs: tuple[str, ...] = nvrtc.ARCHS
    max_registers: int = 255
    shared: int | Mapping[str, int] = 0
    max_spill: int = 0
    more: tuple[str, ...] = ()

    def shared_on(self, arch: str) -> int:
        """Most bytes of dynamic shared memory of a block on this architecture."""
        return self.shared if isinstance(self.shared, int) else self.shared.get(arch, 0)


@dataclass(frozen=True)
class Job:
    """One compilation: an instance of a kernel file for an architecture."""

    file: str
    name: str
    arch: str


def registered() -> dict[str, list[Unit]]:
    """`UNITS` of every module of this package that has them, by module name."""
    import g4spec.runtime.cuda as package

    found = {}
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        units = getattr(importlib.import_module(info.name), "UNITS", None)
        if units is not None:
            name = info.name.rpartition(".")[2]
            assert name not in found, name
            found[name] = list(units)
    return found


def _load(job: Job) -> nvrtc.Cubin | None:
    return cache.load(nvrtc.key(nvrtc.closure(job.file), job.name, job.arch), job.arch)


def cached(job: Job) -> nvrtc.Cubin:
    """A cubin from the disk cache, or compiled now and kept there."""
    sources = nvrtc.closure(job.file)
    key = nvrtc.key(sources, job.name, job.arch)
    cubin = cache.load(key, job.arch)
    if cubin is None:
        cubin = nvrtc.compile(sources, job.name, job.arch)
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
    found = [_load(job) for job in jobs]
    missing = [i for i, cubin in enumerate(found) if cubin is None]
    workers = min(workers or min(WORKERS, _cpus()), len(missing))
    if workers <= 1:
        return [cubin or cached(job) for cubin, job in zip(found, jobs, strict=True)]
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for i in missing:
        waiting.put(i)
    done: dict[int, nvrtc.Cubin | G4Error] = {}
    threads = [threading.Thread(target=_feed, args=(jobs, waiting, done)) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [cubin or _answer(done.get(i), jobs[i]) for i, cubin in enumerate(found)]


def _cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _answer(found: nvrtc.Cubin | G4Error | None, job: Job) -> nvrtc.Cubin:
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
    code = (
        "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
        f"from {__name__} import _work; _work()"
    )
    command = [sys.executable, "-c", code, json.dumps(sys.path)]
    with (
        contextlib.suppress(BrokenPipeError),  # it ended early: `_answer` says so
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as worker,
    ):
        assert worker.stdin and worker.stdout
        while True:
            try:
                i = waiting.get_nowait()
            except queue.Empty:
                return
            job = jobs[i]
            worker.stdin.write(json.dumps([job.file, job.name, job.arch]) + "\n")
            worker.stdin.flush()
            answer = worker.stdout.readline()
            if not answer:
                return
            done[i] = pickle.loads(base64.b64decode(answer))


def _work() -> None:
    """The worker process: a job a line in, an answer a line out."""
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        answer: nvrtc.Cubin | G4Error
        try:
            answer = cached(Job(*json.loads(line)))
        except G4Error as error:
            answer = error
        answers.write(base64.b64encode(pickle.dumps(answer)).decode() + "\n")
        answers.flush()


def jobs_for(units: Iterable[Unit], arch: str) -> list[Job]:
    """Return the compilations of these units for one architecture."""
    return [Job(u.file, name, arch) for u in units if arch in u.archs for name in u.names]
