"""What must be equal between the files of a draft and its target, whatever the kind of draft."""

from __future__ import annotations

from typing import Any

from g4spec.errors import InputError
from g4spec.gguf import GGUF, ValueType

TARGET_LAYERS = "g4spec.target.block_count"
TARGET_HIDDEN = "g4spec.target.embedding_length"
TOKENS = "tokenizer.ggml.tokens"
FIX = "use the target this draft was made for, or convert the draft again with this one as --target"


def check(target: GGUF, config: Any, draft: GGUF) -> None:
    """InputError where the draft was converted beside a target of another depth, width or with
    other tokens: its proposals are then other words than it meant. `config`: the target's."""
    for key, what, its in (
        (TARGET_LAYERS, "layers", len(config.layers)),
        (TARGET_HIDDEN, "hidden size", config.n_embd),
    ):
        said = draft.get(key)
        if isinstance(said, int) and said != its:
            raise InputError(
                f"{draft.path}: converted beside a target of another {what}",
                expected=said,
                found=its,
                fix=FIX,
            )
    if (
        draft.array_type(TOKENS) is not ValueType.STRING
        or target.array_type(TOKENS) is not ValueType.STRING
    ):
        return
    mine, its = draft.kv[TOKENS], target.kv[TOKENS]
    if len(mine) == len(its) and mine != its:
        at = next(i for i, (a, b) in enumerate(zip(mine, its, strict=True)) if a != b)
        raise InputError(
            f"{draft.path}: its tokens are not the target's",
            expected=f"{its[at]!r:.40} as token {at}",
            found=f"{mine[at]!r:.40}",
            fix=FIX,
        )
