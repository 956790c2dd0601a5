"""Splits a text into chunks as llama-perplexity and llama-imatrix do, and reads a chunk.

This module does not import torch, so that a wrong size is reported at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from g4spec.core import PROMPT_BLOCK, Sequence
from g4spec.errors import InputError, UsageError

if TYPE_CHECKING:
    import torch

    from g4spec.runtime.engine import Engine
    from g4spec.runtime.tokenizer import Tokenizer

SIZE = PROMPT_BLOCK
"""Default tokens per chunk, as in llama.cpp."""
SMALLEST = 4
"""Minimum number of tokens per chunk."""
FEWEST = 2
"""Minimum number of chunks of a text."""


def check_size(size: int, chunks: int | None) -> None:
    """Raise UsageError unless chunks of `size` tokens can be read, and at least one."""
    if size < SMALLEST:
        raise UsageError("`size`", expected=f"at least {SMALLEST} tokens per chunk", found=size)
    if chunks is not None and chunks < 1:
        raise UsageError("`chunks`", expected="at least 1", found=chunks)


def split_text(
    tokenizer: Tokenizer, text: str, size: int = SIZE, chunks: int | None = None
) -> list[list[int]]:
    """Tokenize a text and split it into chunks of `size` tokens; replace the first token of each by
    BOS and drop the incomplete last chunk. Return at most the first `chunks` chunks.

    Raises InputError for a text of fewer than two chunks.
    """
    check_size(size, chunks)
    ids = tokenizer.encode(text)
    if len(ids) < FEWEST * size:
        raise InputError(
            "the text is too short",
            expected=f"at least {FEWEST * size} tokens",
            found=len(ids),
            fix="take a longer one, or smaller chunks (`size`)",
        )
    starts = range(0, len(ids) - size + 1, size)[:chunks]
    return [[tokenizer.bos, *ids[at + 1 : at + size]] for at in starts]


def read_chunk(engine: Engine, ids: list[int]) -> torch.Tensor:
    """Prefill a chunk as its own prompt; return the hidden states after the final norm [T, H].

    No other request may run on the engine.
    """
    import torch

    from g4spec.runtime.torch_settings import own_settings

    one = Sequence(engine.pool.free_slots.pop(), ids, len(ids))
    engine.pool.grow(one, len(ids))
    step, found = engine.target.chunk, []
    with own_settings(engine.target.ops.device):
        for at in range(0, len(ids), step):
            rows = engine.backend.read(engine.target, one.slot, ids[at : at + step], at)
            found.append(rows.hidden.clone())  # the next chunk may take the same memory
    engine.pool.free_sequence(one)
    return torch.cat(found)
