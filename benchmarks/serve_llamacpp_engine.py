"""The engine under llama.cpp's server tests: texts end only with <eos>, as those of their model."""

from __future__ import annotations

from typing import Any

from g4spec.cli import _engine
from g4spec.models import spec
from g4spec.runtime.engine import Engine

load_with_threads = _engine.load_with_threads


def end_only_with_eos() -> None:
    """Let tokenizers of this process have no stop tokens but those of their file."""
    spec.GEMMA_STOP_IDS = frozenset({1})


def load(*args: Any, **options: Any) -> Engine:
    """Load an engine in its process."""
    end_only_with_eos()
    return load_with_threads(*args, **options)
