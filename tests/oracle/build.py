"""g4spec's models built from checkpoint folders without the converter: only `g4spec/models/` and
safetensors.

The converter has its own tests. Here a wrong name, shape or rule in a model kind shows up in
isolation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from g4spec import models
from g4spec.models import assistant, gemma4
from g4spec.models.spec import Checkpoint, TensorSpec
from tests.support.one_sequence import SequenceDraft, SequenceTarget, make_target

CTX = 1024


def config(folder: Path) -> dict[str, Any]:
    """Return the parsed config.json."""
    raw: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return raw


def tensors(folder: Path, prefixes: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Return stored tensors by name without prefix, floats as float32."""
    out = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, x in load_file(path).items():
            prefix = next((p for p in prefixes if name.startswith(p)), "")
            out[name.removeprefix(prefix)] = x.float() if x.is_floating_point() else x
    return out


def weights(specs: list[TensorSpec], stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return weights by GGUF name, made as `TensorSpec.make` specifies; shapes must match
    exactly."""
    out = {}
    for spec in specs:
        if spec.make == "rope_freqs":
            n = spec.shape[0]
            out[spec.name] = torch.tensor([1.0] * (n // 4) + [1e30] * (n - n // 4))
            continue
        if spec.optional and spec.source not in stored:
            continue
        x = stored[spec.source or ""]
        if spec.make == "absolute_d2t":
            x = x + torch.arange(len(x))
        assert tuple(x.shape) == spec.shape, (spec.name, x.shape, spec.shape)
        out[spec.name] = x
    return out


def checkpoint(folder: Path) -> Checkpoint:
    names = {}
    for path in sorted(folder.glob("*.safetensors")):
        names |= {n: (tuple(x.shape), str(x.dtype)) for n, x in load_file(path).items()}
    return Checkpoint(config(folder), names)


def target(folder: Path, chunk: int = 64, n_ctx: int = CTX) -> SequenceTarget:
    """Return the target of a checkpoint folder, for one sequence."""
    parsed = gemma4.parse_hf(checkpoint(folder))
    stored = tensors(folder, gemma4.PREFIXES)
    return SequenceTarget(
        make_target(parsed, weights(gemma4.tensors(parsed), stored), n_ctx, chunk)
    )


class Arrays:
    """Fake of the GGUF file that contains an assistant's centroid head."""

    def __init__(self, stored: dict[str, torch.Tensor]) -> None:
        self._stored = stored

    def number_array(self, key: str) -> Any:
        source = {v: k for k, v in assistant.METADATA_TENSORS.items()}[key]
        return self._stored[source].numpy()


def draft(folder: Path, one: SequenceTarget, window: int | None = None, **changes: Any) -> Any:
    """Return the draft of a checkpoint folder for a target, and set the target's taps.

    Args:
        changes: configuration fields to replace, to follow another engine's semantics.
    """
    from dataclasses import replace

    read, on = checkpoint(folder), one.target
    kind = next(m for m in models.drafts().values() if m.claims(read))
    parsed = replace(kind.parse_hf(read, on.config), **changes)
    stored = tensors(folder, kind.PREFIXES)
    ring_slack = on.backend.ring_slack(on.chunk)
    kv = [on.backend.cache(s, on.space, ring_slack) for s in kind.caches(parsed, window)]
    drafter = kind.Drafter(
        parsed,
        weights(kind.tensors(parsed), stored),
        on.ops,
        on,
        Arrays(stored),
        kv,
        on.n_states,
        window,
    )
    on.taps = drafter.taps
    return SequenceDraft(drafter, on)


class Recorder:
    """A chooser that records its logits and takes the largest."""

    def __init__(self) -> None:
        self.rows: list[torch.Tensor] = []

    def choose(self, logits: torch.Tensor, position: int) -> int:
        self.rows.append(logits.clone())
        return int(logits.argmax())

    def choose_rows(self, logits: torch.Tensor, position: int) -> Iterator[int]:
        return (self.choose(row, position + i) for i, row in enumerate(logits))


def prefill(on: SequenceTarget, made: SequenceDraft, prompt: list[int]) -> torch.Tensor:
    """Read a prompt with target and draft; return the logits of its last row [V]."""
    made.begin()
    for read in on.prefill(prompt):
        made.commit(read)
    logits: torch.Tensor = on.logits(read.hidden[-1:])[0]
    return logits


def prompt(n: int, vocab: int, seed: int = 0) -> list[int]:
    """Return BOS and random tokens, `n` in all."""
    g = torch.Generator().manual_seed(seed)
    return [2, *torch.randint(5, vocab, (n - 1,), generator=g).tolist()]


def with_large_layers(
    folder: Path, factor: float = 4.0, ends: str = "post_(attention|feedforward)_layernorm"
) -> Path:
    """Scale the layers of a random model so that they outweigh its embedding and it does not just
    repeat its input. `factor` applies to the last tensor of each sublayer, by default a target's
    norms. Return the folder."""
    for path in sorted(folder.glob("*.safetensors")):
        stored = load_file(path)
        for name, x in stored.items():
            if re.search(ends, name):
                stored[name] = x * factor
        save_file(stored, path, {"format": "pt"})
    return folder
