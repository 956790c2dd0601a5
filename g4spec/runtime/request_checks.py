"""Checks of the arguments of a request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from g4spec import ranges
from g4spec.errors import InputError, PromptTooLong, UsageError
from g4spec.runtime.request import Options


def check_request(prompt: Iterable[int], options: Options, config: Any, n_ctx: int) -> list[int]:
    """Raise the errors that `Engine.submit` would raise for a request with this target. Return the
    prompt, which may be an iterator, as a list."""
    if isinstance(prompt, str | bytes):
        raise UsageError(
            "the prompt is text", expected="token ids", fix="use engine.tokenizer.encode(text)"
        )
    if not isinstance(options, Options):
        raise UsageError("`options`", expected="Options", found=f"{options!r:.80}")
    try:
        tokens = iter(prompt)
    except TypeError as e:
        raise UsageError(
            "`prompt`", expected="a sequence of token ids", found=f"{prompt!r:.80}"
        ) from e
    ids = list(tokens)
    if not ids:
        raise InputError("the prompt is empty", expected="at least one token")
    if bad := [t for t in ids if not ranges.is_token_id(t, config.n_vocab)]:
        raise InputError(
            "a prompt token is outside the vocabulary",
            expected=f"0..{config.n_vocab - 1}",
            found=bad[0],
        )
    if len(ids) > n_ctx:
        needed, trained = len(ids) + options.n_predict, config.n_ctx
        fix = (
            f"use `n_ctx` {needed}"
            if needed <= trained
            else (f"use a shorter one: the model was trained on {trained} tokens")
        )
        raise PromptTooLong(len(ids), n_ctx, len(ids), fix)
    if bad := [t for t, _ in options.sampler.logit_bias if t >= config.n_vocab]:
        raise UsageError(
            "`logit_bias`", expected=f"token ids 0 to {config.n_vocab - 1}", found=bad[0]
        )
    return [int(token) for token in ids]
