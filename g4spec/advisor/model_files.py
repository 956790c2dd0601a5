"""Reads sizes and shapes of local targets and drafts: GGUF files and checkpoint folders.

Only headers are read. Unlike the runtime's parsers, these accept every Gemma 4 file, including
sizes that g4spec cannot run, because other engines may run them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from g4spec.advisor.checkpoint_folders import folder_draft, folder_target
from g4spec.advisor.facts import Facts
from g4spec.advisor.gguf_models import gguf_draft, gguf_target
from g4spec.advisor.named_models import DraftModel, TargetModel
from g4spec.errors import InputError


@contextmanager
def _malformed(path: Path) -> Iterator[None]:
    """Turn errors caused by malformed configuration values into InputError."""
    try:
        yield
    except (ValueError, TypeError, AttributeError, KeyError, IndexError, OverflowError) as problem:
        raise InputError(f"{path}: malformed configuration ({problem})") from problem


def read_target(facts: Facts, path: Path, given: str) -> TargetModel:
    """Read a target from a GGUF file or a checkpoint folder."""
    with _malformed(path):
        read = gguf_target if path.is_file() else folder_target
        return read(facts, path, given)


def read_draft(facts: Facts, path: Path, given: str, of: TargetModel) -> DraftModel:
    """Read a draft of target `of` from a GGUF file or a checkpoint folder."""
    with _malformed(path):
        read = gguf_draft if path.is_file() else folder_draft
        return read(facts, path, given, of)
