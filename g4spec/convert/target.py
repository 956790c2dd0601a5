"""What a conversion takes from a target: its configuration and its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from g4spec.convert import provenance, sources, tokenizer
from g4spec.convert.sources import Found
from g4spec.errors import InputError
from g4spec.gguf import GGUF, KV


@dataclass(frozen=True, slots=True)
class Target:
    """A target, as much of it as its drafts need.

    Attributes:
        config: its parsed configuration. `tokenizer`: its `tokenizer.*` keys and stop ids.
        pairing: keys by which a draft recognises it. `notes`: for the user.
    """

    config: Any
    tokenizer: KV
    pairing: KV
    notes: list[str]

    @property
    def n_tokens(self) -> int:
        return len(self.tokenizer["tokenizer.ggml.tokens"].data)


def load(path: Path) -> Target:
    """The target at `path`, a checkpoint folder or a GGUF."""
    found = sources.detect(path)
    if not found.is_target:
        raise InputError(f"{path}: must be a target", found=found.kind.TITLE)
    if isinstance(found.source, GGUF):
        with found.source:
            return of(found)
    return of(found)


def of(found: Found) -> Target:
    """The target that was found."""
    source = found.source
    if isinstance(source, GGUF):
        config = found.kind.parse_gguf(source.kv, source.shapes())
        kv = tokenizer.from_gguf(source)
    else:
        config = found.kind.parse_hf(source.checkpoint)
        kv = tokenizer.from_folder(source.path, source.config, source.generation)
    pairing = provenance.pairing(kv, config.n_embd, len(config.layers))
    return Target(config, kv, pairing, found.notes)
