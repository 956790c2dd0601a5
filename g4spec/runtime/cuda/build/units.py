"""The list of kernel instances, and parallel compilation.

A module of this package that launches kernels lists them in `list_units()`. So a test can compile
every one for every architecture, and check its resources, on a machine without a GPU.
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
        file: name of the kernel file.
        names: name expressions, for instance "norm<2>".
        archs: architectures that they are compiled for.
        max_registers, max_spill: maximum registers of a thread, and bytes of spills, that a test
            allows each instance on every architecture.
        shared: maximum dynamic shared memory of a block in bytes; one number, or one for each
            architecture.
        more: further instances of the same templates, which a test compiles only with
            G4SPEC_COMPILE=all.
    """

    file: str
    names: tuple[str, ...]
    archs: tuple[str, ...] = nvrtc.ARCHS
    max_registers: int = 255
    shared: int | Mapping[str, int] = 0
    max_spill: int = 0
    more: tuple[str, ...] = ()

    def shared_on(self, arch: str) -> int:
        """Return the maximum dynamic shared memory of a block on this architecture, in bytes."""
        return self.shared if isinstance(self.shared, int) else self.shared.get(arch, 0)


@dataclass(frozen=True)
class Job:
    """One compilation: an instance of a kernel file for an architecture."""

    file: str
    name: str
    arch: str


def registered() -> dict[str, list[Unit]]:
    """Return `list_units()` of every module of this package that has it, by module name."""
    import g4spec.runtime.cuda as package

    modules = {}
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        list_units = getattr(importlib.import_module(info.name), "list_units", None)
        if list_units is not None:
            name = info.name.rpartition(".")[2]
            assert name not in modules, name
            modules[name] = list_units()
    return modules


def _load(job: Job) -> nvrtc.Cubin | None:
    return cache.load(nvrtc.key(job.file, job.name, job.arch), job.arch)


def cached(job: Job) -> nvrtc.Cubin:
    """Return a cubin from the disk cache; compile and store it if it is missing."""
    key = nvrtc.key(job.file, job.name, job.arch)
    cubin = cache.load(key, job.arch)
    if cubin is None:
        cubin = nvrtc.compile(nvrtc.closure(job.file), job.name, job.arch)
        cache.store(key, cubin)
    return cubin


def compile_all(jobs: Sequence[Job], workers: int | None = None) -> list[nvrtc.Cubin]:
    """Return the cubins of all jobs, in their order; those not on disk are compiled in several
    processes.

    Args:
        jobs: compilations.
        workers: number of processes; by default one for each CPU that this process may use, at most
            8.

    Raises:
        KernelCompileError: the error of the first job, in their order, that failed.
    """
    on_disk = [_load(job) for job in jobs]
    missing = [i for i, cubin in enumerate(on_disk) if cubin is None]
    workers = min(workers or min(WORKERS, _cpus()), len(missing))
    if workers <= 1:
        return [cubin or cached(job) for cubin, job in zip(on_disk, jobs, strict=True)]
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for i in missing:
        waiting.put(i)
    done: dict[int, nvrtc.Cubin | G4Error] = {}
    threads = [threading.Thread(target=_feed, args=(jobs, waiting, done)) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [cubin or _answer(done.get(i), jobs[i]) for i, cubin in enumerate(on_disk)]


def _cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _answer(answer: nvrtc.Cubin | G4Error | None, job: Job) -> nvrtc.Cubin:
    if answer is None:
        raise EnvironmentProblem(
            f"{job.file}: the process that compiled it ended early",
            fix="check that the machine has free memory, then start again",
        )
    if isinstance(answer, G4Error):
        raise answer
    return answer


def _feed(
    jobs: Sequence[Job], waiting: queue.SimpleQueue[int], done: dict[int, nvrtc.Cubin | G4Error]
) -> None:
    """Start one worker process and give it jobs, one at a time, until none is waiting.

    A plain process, not `multiprocessing`, which would run the user's script again in each.
    """
    code = (
        "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
        f"from {__name__} import _work; _work()"
    )
    command = [sys.executable, "-c", code, json.dumps(sys.path)]
    with (
        contextlib.suppress(BrokenPipeError),  # the worker ended early: `_answer` reports it
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
    """Main loop of a worker process: read a job per line, write an answer per line."""
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
