"""Engines that fail in their own process; see `EngineClient`'s `make`."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from g4spec.core import StepRows
from g4spec.errors import InputError
from g4spec.runtime import cycle_timing
from g4spec.runtime.engine import Engine

RAISES, CRASHES, READING, HANGS = 5, 6, 7, 8
"""Tokens that make the engine fail if a prompt ends in RAISES, CRASHES or HANGS: in a step after 4
tokens or, with READING before it, during prefill."""


def _fail(token: int) -> None:
    if token == CRASHES:
        ctypes.string_at(0)  # SIGSEGV
    if token == HANGS:
        time.sleep(3600)
    if token == RAISES:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def load(**options: Any) -> Engine:
    """Load an engine that fails on request of a prompt. After a failure during prefill, every later
    call fails too, as after a CUDA error. It has one thread, and measures each cycle once."""
    torch.set_num_threads(1)
    cycle_timing.REPEATS = 1
    engine = Engine.load(**options)
    read, collect = engine.backend.read, engine.scheduler._cycle
    drop = engine.scheduler.cycles.discard

    def failing() -> None:
        raise RuntimeError("CUDA error: it stays")

    def reading(target: Any, slot: int, ids: Sequence[int], start: int, pause: Any) -> StepRows:
        if list(ids[-2:-1]) == [READING]:
            engine.scheduler.cycles.discard = failing  # type: ignore[method-assign]
            _fail(ids[-1])
            engine.scheduler.cycles.discard = drop  # type: ignore[method-assign]
        return read(target, slot, ids, start, pause)

    def collecting(after_prefill: bool) -> None:
        collect(after_prefill)
        for task in engine.scheduler.running:
            if len(task.ids) > task.n_prompt + 4 and READING not in task.request.prompt:
                _fail(task.request.prompt[-1])

    engine.backend.read = reading  # type: ignore[method-assign]
    engine.scheduler._cycle = collecting  # type: ignore[method-assign]
    return engine


def load_once(flag: Path, **options: Any) -> Engine:
    """Load as `load` the first time; fail afterwards."""
    if flag.exists():
        raise InputError("the file is gone")
    flag.write_text("")
    return load(**options)


def load_or_exit(broken: Path, **options: Any) -> Engine:
    """Load as `load`, half a second later if there is a file "slow" beside `broken`; exit the
    process instead if `broken` exists."""
    if broken.with_name("slow").exists():
        time.sleep(0.5)
    if broken.exists():
        os._exit(9)
    return load(**options)


def end(**options: Any) -> Engine:
    """Exit the process."""
    os._exit(9)


def no_memory(**options: Any) -> Engine:
    """Fail as a full GPU does when weights are loaded."""
    raise torch.OutOfMemoryError("GPU 0 has a total capacity of 1 GiB")
