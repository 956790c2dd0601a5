"""Reads the header of a target's GGUF before weights are loaded: configuration, tokenizer, context
length, and the memory plan of target and draft."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from g4spec import models, ranges
from g4spec.backend import Backend
from g4spec.errors import InputError, UsageError
from g4spec.gguf import GGUF
from g4spec.models import gemma4, ollama, pairing
from g4spec.models.spec import check_heads
from g4spec.quant import file_types
from g4spec.runtime import loading, memory, pending_rows
from g4spec.runtime.draft_file import DraftFile
from g4spec.runtime.tokenizer import Tokenizer

DEFAULT_CTX = 8192
"""Default context length in tokens, if the model was trained on more."""


def read_tokenizer(target: Path) -> Tokenizer:
    """Read only the tokenizer of a target, in the same way as `Engine.load`."""
    with GGUF(target) as file:
        return load_tokenizer(file, parse_config(file))


def described(file: GGUF) -> dict[str, int | str]:
    """Return what llama.cpp shows of a target: n_params, size in bytes, and ftype, the name of its
    type. It guesses the type of a file without `general.file_type`, which has none here."""
    tensors = ollama.text_tensors(file).values()
    number = file.get("general.file_type")
    name = file_types.NAMES.get(number) if type(number) is int else None
    return {
        "n_params": sum(math.prod(info.shape) for info in tensors),
        "size": sum(info.nbytes for info in tensors),
        **({} if name is None else {"ftype": name}),
    }


def check(target: Path, n_ctx: int | None = None, fix: str | None = None) -> None:
    """Raise the errors that `Engine.load` would raise for a target, as far as its header shows
    them. `fix`: see `models.wrong_role`."""
    with GGUF(target) as file:
        context_length(n_ctx, parse_config(file, fix).n_ctx)


def context_length(requested: int | None, trained: int) -> int:
    """Return the context length of a request in tokens. `requested`: see `Engine.load`. Raises
    UsageError if the model was not trained on as many."""
    if requested is None:
        return min(trained, DEFAULT_CTX)
    valid = f"1 to {trained}, what the model was trained on"
    ranges.check_type("n_ctx", requested, valid)
    if requested == 0:
        return trained
    if not 1 <= requested <= trained:
        whole = ", or 0 for all of it" if requested < 0 else ""
        raise UsageError("`n_ctx`", expected=f"{valid}{whole}", found=requested)
    return int(requested)


def parse_config(file: GGUF, fix: str | None = None) -> Any:
    """Return the configuration of a target. Raises InputError if the file is not one; `fix`: see
    `models.wrong_role`."""
    models.refuse_other_files(file.path, file)
    arch = file.kv.get("general.architecture")
    if arch not in models.TARGETS:
        if (kind := models.find_kind(arch, file.tensors)) is not None:
            raise models.wrong_role(file.path, kind, fix)
        raise InputError(
            f"{file.path}: not a target",
            expected=" or ".join(models.TARGETS),
            found=f"architecture {arch!r}",
        )
    if not file.tensors:
        raise InputError(
            f"{file.path}: no tensors",
            expected="a model",
            found="only metadata, as of a vocabulary",
            fix="name the model itself",
        )
    config = gemma4.parse_gguf(file.kv, file.shapes())
    check_heads(config.layers)
    loading.check_rotation(file, config.layers)
    return config


def load_tokenizer(file: GGUF, config: Any) -> Tokenizer:
    """Read the file's tokenizer. Raise InputError if the target has no embedding for some token."""
    tokenizer = Tokenizer.from_gguf(file)
    if tokenizer.n_vocab > config.n_vocab:
        raise InputError(
            f"{file.path}: the token table has fewer rows than there are tokens",
            expected=f"at least {tokenizer.n_vocab}",
            found=config.n_vocab,
            fix="convert the target again",
        )
    return tokenizer


def plan_memory(
    file: GGUF, config: Any, draft: DraftFile, size: memory.Size, chunk: int, backend: Backend
) -> memory.MemoryPlan:
    """Check the draft and the pair, and compute the memory plan.

    Raises:
        InputError: the draft or the pair cannot be used. EnvironmentProblem: too little memory.
    """
    drafted: list[Any] = []
    if draft.file is not None and draft.kind is not None:
        draft.kind.check_pair(draft.config, config)
        pairing.check(file, config, draft.file)
        draft.check(config.n_vocab)
        drafted = list(draft.file.tensors.values())

    def plan(size: memory.Size) -> memory.MemoryPlan:
        return memory.plan(
            backend,
            size,
            chunk,
            config,
            ollama.text_tensors(file).values(),
            gemma4.caches(config),
            drafted,
            draft.shapes(),
            pending_rows.max_bytes(config.n_embd, draft.n_taps, size.slots) if draft.drafts else 0,
        )

    requested = plan(size)
    shorter = {n: plan(size.smaller(n)) for n in (*range(256, size.n_ctx, 256), size.n_ctx)}
    memory.require_fits(requested, shorter, backend.budget.available())
    return requested
