"""The engine under llama.cpp's server tests, with <eos> as the only stop token."""

from __future__ import annotations

from typing import Any

from g4spec.cli import _engine
from g4spec.models import spec
from g4spec.runtime.engine import Engine

load_with_threads = _engine.load_with_threads


def end_only_with_eos() -> None:
    """Remove the stop tokens that are not in the file from tokenizers of this process."""
    spec.GEMMA_STOP_IDS = frozenset({1})


def load(*args: Any, **options: Any) -> Engine:
    """Load an engine in its process."""
    end_only_with_eos()
    return load_with_threads(*args, **options)
