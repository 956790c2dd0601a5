"""Information that a conversion takes from a target: configuration, tokenizer, pairing keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from g4spec import models
from g4spec.convert import provenance, sources, tokenizer
from g4spec.convert.sources import DetectedSource
from g4spec.errors import InputError
from g4spec.gguf import GGUF, KV, Value, ValueType


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """The part of a target that its drafts need.

    Attributes:
        config: the parsed configuration.
        tokenizer: `tokenizer.*` keys and stop ids.
        pairing: keys by which a draft recognizes its target.
        sampling: recommended sampling settings; llama.cpp takes them as defaults.
        notes: remarks for the user.
        files: the target's files with tensors.
        weights: digest of the weights, None unless the target is a checkpoint that has them.
    """

    config: Any
    tokenizer: KV
    pairing: KV
    sampling: KV
    notes: list[str]
    files: list[Path]
    weights: str | None = None

    @property
    def n_tokens(self) -> int:
        return len(self.tokenizer["tokenizer.ggml.tokens"].data)


def load(path: Path) -> TargetInfo:
    """Read the target at `path`, a checkpoint folder (weights are optional) or a GGUF."""
    found = _detect(path)
    if not found.is_target:
        fix = "this is a draft: name it as the source, and its target with `target`"
        raise models.wrong_role(path, found.kind, fix)
    if isinstance(found.source, GGUF):
        with found.source:
            return from_source(found)
    return from_source(found)


def _detect(path: Path) -> DetectedSource:
    if path.is_dir() and any(path.glob("*.safetensors")):
        try:
            return sources.detect(path)
        except InputError:  # an incomplete download may still have configuration and tokenizer
            pass
    return sources.detect(path, weights=False)


def from_source(found: DetectedSource) -> TargetInfo:
    """Read the target in a detected source."""
    source, notes = found.source, found.notes
    if isinstance(source, GGUF):
        config = found.kind.parse_gguf(source.kv, source.shapes())
        kv, generation = tokenizer.from_gguf(source), dict[str, Any]()
    else:
        generation = dict(source.generation)
        config = found.kind.parse_hf(source.checkpoint)
        kv, more = tokenizer.from_folder(source.path, source.config, source.generation)
        notes = [*notes, *more]
    weights = None
    if not isinstance(source, GGUF):
        weights = provenance.weights_digest(found.kind, config, source.tensors)
    pairing = provenance.pairing_keys(kv, config.n_embd, len(config.layers))
    pairing |= provenance.target_source_keys(source, weights)
    return TargetInfo(config, kv, pairing, _sampling(generation), notes, found.files, weights)


def _sampling(generation: Mapping[str, Any]) -> KV:
    kv: KV = {}
    for key, name, kind in (
        ("top_k", "top_k", ValueType.I32),
        ("top_p", "top_p", ValueType.F32),
        ("min_p", "min_p", ValueType.F32),
        ("temperature", "temp", ValueType.F32),
    ):
        value = generation.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            kv[f"general.sampling.{name}"] = Value(kind, value)
    return kv
