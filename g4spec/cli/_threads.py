"""CPU threads: the option `-t`, and how idle threads of torch wait."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from g4spec.runtime.engine import Engine

VARIABLE = "OMP_NUM_THREADS"
"""Environment variable for the number of threads; torch, OpenMP and MKL read it on import."""

MAX_THREADS = 1024
"""Largest number for `-t`: more than any machine has cores."""

SMALL_TARGET = 256 << 20
"""Bytes of weights (4 per weight on a CPU) below which one thread is faster: waking another thread
takes about as long as an operation (benchmarks/LOG.md)."""


def _export(number: int | None) -> int | None:
    """Set the environment variable from `-t`; torch is imported after the options are parsed."""
    if number is not None:
        os.environ[VARIABLE] = str(number)
    return number


Threads = Annotated[
    int | None,
    typer.Option(
        "-t",
        "--threads",
        min=1,
        max=MAX_THREADS,
        callback=_export,
        help=f"CPU threads. Default: ${VARIABLE} if set, else 1 for a target of less than "
        f"{SMALL_TARGET // 4 >> 20} million weights and all cores for a larger one.",
    ),
]


def use_passive_wait() -> None:
    """Let idle threads sleep unless OMP_WAIT_POLICY is set; call it before importing torch.

    By default idle threads spin. On a busy machine they take the core from the thread that they
    wait for: 2 tokens/s instead of 40.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def limit_threads(engine: Engine) -> None:
    """Use one thread for a small target, unless the user chose a number."""
    if VARIABLE not in os.environ and engine.memory.weights < SMALL_TARGET:
        import torch

        torch.set_num_threads(1)
