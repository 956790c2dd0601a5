"""Checks that the files of a draft and a target belong together, for all kinds of drafts."""

from __future__ import annotations

from typing import Any

from g4spec.errors import InputError
from g4spec.gguf import GGUF, ValueType

TARGET_LAYERS = "g4spec.target.block_count"
TARGET_HIDDEN = "g4spec.target.embedding_length"
TOKENS = "tokenizer.ggml.tokens"
FIX = "use the target this draft was made for, or convert the draft again for this one"


def check_sizes(draft: GGUF, n_layer: int, n_embd: int) -> None:
    """Raise InputError if the draft was converted with a target of another depth or hidden size
    than `n_layer` and `n_embd`."""
    for key, what, found in (
        (TARGET_LAYERS, "number of layers", n_layer),
        (TARGET_HIDDEN, "hidden size", n_embd),
    ):
        recorded = draft.get(key)
        if isinstance(recorded, int) and recorded != found:
            raise InputError(
                f"{draft.path}: converted with a target of another {what}",
                expected=recorded,
                found=found,
                fix=FIX,
            )


def check(target: GGUF, config: Any, draft: GGUF) -> None:
    """Raise InputError if the draft was converted with a target of another depth, hidden size or
    token list: its token ids would mean other tokens. `config`: of the target."""
    check_sizes(draft, len(config.layers), config.n_embd)
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
