"""Threads on the CPU: `-t`, and how torch's threads wait for each other."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from g4spec.runtime.engine import Engine

VARIABLE = "OMP_NUM_THREADS"
"""Environment variable that torch, OpenMP and MKL read when they are loaded."""

SMALL_TARGET = 256 << 20
"""Bytes of weights in memory, 4 each on a CPU, below which one thread is the better choice: an
operation is then nearly over before another thread has been woken (benchmarks/LOG.md)."""


def _export(number: int | None) -> int | None:
    """Hand `-t` to torch, which has not been loaded when options are read."""
    if number is not None:
        os.environ[VARIABLE] = str(number)
    return number


Threads = Annotated[
    int | None,
    typer.Option(
        "-t",
        "--threads",
        min=1,
        callback=_export,
        help=f"CPU threads. Default: ${VARIABLE} if set, else 1 for a target of less than "
        f"{SMALL_TARGET // 4 >> 20} million weights and all cores for a larger one.",
    ),
]


def use_passive_wait() -> None:
    """Let idle threads sleep, unless OMP_WAIT_POLICY says otherwise. Must run before torch is
    imported. By default they spin, and on a busy machine they then take the core from the thread
    that they wait for: 2 tokens/s instead of 40."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def limit_threads(engine: Engine) -> None:
    """Take one thread for a small target, unless the user chose a number."""
    if VARIABLE not in os.environ and engine.memory.weights < SMALL_TARGET:
        import torch

        torch.set_num_threads(1)
