"""Checks that the files of a draft and a target belong together, for all kinds of drafts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from g4spec.errors import InputError
from g4spec.gguf import GGUF, ValueType

TARGET_LAYERS = "g4spec.target.block_count"
TARGET_HIDDEN = "g4spec.target.embedding_length"
TOKENS = "tokenizer.ggml.tokens"
OTHER_TARGET = "use the target this draft was made for"
FIX = f"{OTHER_TARGET}, or convert the draft again for this one"


def recorded_sizes(draft: GGUF) -> tuple[Any, Any]:
    """Return the number of layers and hidden size of the target with which a draft was converted,
    as its file has them; None for what it does not record."""
    return draft.get(TARGET_LAYERS), draft.get(TARGET_HIDDEN)


def checkpoint_sizes(config: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the same two numbers of the target for which a checkpoint was trained, from its
    `config.json`. Without a key for it the target's hidden size is the draft's own, as in
    speculators and SpecForge."""
    inner = config.get("dflash_config") or {}
    own = config.get("transformer_layer_config") or config
    hidden = (
        config.get("backbone_hidden_size"),  # of assistants
        config.get("target_hidden_size"),
        inner.get("target_hidden_size"),
        own.get("hidden_size"),
    )
    layers = config.get("num_target_layers") or inner.get("num_target_layers")
    return layers, next((h for h in hidden if h is not None), None)


def check_sizes(
    path: Path, sizes: tuple[Any, Any], n_layer: int, n_embd: int, *, trained: bool = False
) -> None:
    """Raise InputError if a draft was made for a target of another depth or hidden size than
    `n_layer` and `n_embd`.

    Args:
        sizes: from `recorded_sizes` or `checkpoint_sizes`.
        trained: they are from `checkpoint_sizes`; another conversion cannot change these.
    """
    how = "trained for" if trained else "converted with"
    for what, recorded, found in (
        ("number of layers", sizes[0], n_layer),
        ("hidden size", sizes[1], n_embd),
    ):
        if isinstance(recorded, int) and recorded != found:
            raise InputError(
                f"{path}: {how} a target of another {what}",
                expected=recorded,
                found=found,
                fix=OTHER_TARGET if trained else FIX,
            )


def check(target: GGUF, config: Any, draft: GGUF) -> None:
    """Raise InputError if the draft was converted with a target of another depth, hidden size or
    token list: its token ids would mean other tokens. `config`: of the target."""
    check_sizes(draft.path, recorded_sizes(draft), len(config.layers), config.n_embd)
    if (
        draft.array_type(TOKENS) is not ValueType.STRING
        or target.array_type(TOKENS) is not ValueType.STRING
    ):
        return
    draft_tokens, target_tokens = draft.kv[TOKENS], target.kv[TOKENS]
    if len(draft_tokens) == len(target_tokens) and draft_tokens != target_tokens:
        at = next(
            i for i, (a, b) in enumerate(zip(draft_tokens, target_tokens, strict=True)) if a != b
        )
        raise InputError(
            f"{draft.path}: its tokens differ from the target's",
            expected=f"{target_tokens[at]!r:.40} as token {at}",
            found=f"{draft_tokens[at]!r:.40}",
            fix=FIX,
        )
