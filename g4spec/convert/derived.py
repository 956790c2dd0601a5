"""Tensors and arrays of a GGUF that are computed, because no source tensor holds them as needed."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from g4spec.convert.tensors import StoredTensor
from g4spec.errors import InputError, Unsupported

UNROTATED = np.float32(1e30)
"""Divisor that makes a rotation angle zero, so that a pair is not rotated."""


def rope_freqs(config: Any) -> NDArray[np.float32]:
    """Return the divisors of the RoPE angles of full-attention layers, [head_dim / 2]: 1 for
    rotated pairs, 1e30 for the others. In a draft whose layers all slide, those of its layers.

    Source: llama.cpp `conversion/gemma.py` (generate_extra_tensors).
    """
    full = [s for s in config.layers if s.window is None] or config.layers
    if len({(s.head_dim, s.rope_partial) for s in full}) != 1:
        raise Unsupported("full-attention layers with different rotations in one model")
    out = np.full(full[0].head_dim // 2, UNROTATED, np.float32)
    out[: full[0].rotary_pairs] = 1
    return out


def absolute_d2t(d2t: StoredTensor, t2d: StoredTensor | None, n_vocab: int) -> NDArray[np.int64]:
    """Return the target id of each draft id, [n_draft]: `i + d2t[i]` (speculators has offsets).

    Raises InputError unless the ids are in the vocabulary, strictly increase, and are exactly those
    that `t2d` marks.
    """
    where = f"tensor {d2t.name}"
    if d2t.format is None or not d2t.format.integer or len(d2t.shape) != 1:
        raise InputError(
            where, expected="one dimension of integers", found=f"{d2t.dtype} {d2t.shape}"
        )
    delta = d2t.array().astype(np.int64)
    ids: NDArray[np.int64] = delta + np.arange(len(delta))
    outside = np.flatnonzero((ids < 0) | (ids >= n_vocab) | (delta >= n_vocab))
    if outside.size:
        i = int(outside[0])
        hint = None
        if np.all(np.diff(delta) > 0) and delta[0] >= 0 and delta[-1] < n_vocab:
            hint = "these look like absolute ids; speculators stores offsets (target id - draft id)"
        raise InputError(
            f"{where}: target id of entry {i} is outside the vocabulary",
            expected=f"0 to {n_vocab - 1}",
            found=int(ids[i]),
            fix=hint,
        )
    falling = np.flatnonzero(np.diff(ids) <= 0)
    if falling.size:
        i = int(falling[0]) + 1
        raise InputError(
            f"{where}: target ids must strictly increase; entry {i}",
            expected=f"more than {ids[i - 1]}",
            found=int(ids[i]),
        )
    if t2d is not None:
        _check_t2d(t2d, ids, n_vocab)
    return ids


def _check_t2d(t2d: StoredTensor, ids: NDArray[np.int64], n_vocab: int) -> None:
    if t2d.shape != (n_vocab,) or t2d.raw.size != n_vocab:
        raise InputError(
            f"tensor {t2d.name}",
            expected=f"BOOL [{n_vocab}]",
            found=f"{t2d.dtype} {list(t2d.shape)}",
        )
    marked = np.flatnonzero(t2d.raw)
    if not np.array_equal(marked, ids):
        wrong = np.setxor1d(marked, ids)
        raise InputError(
            f"tensor {t2d.name} disagrees with d2t about {wrong.size} tokens",
            expected=f"the {ids.size} ids of d2t",
            found=f"{marked.size} marked, first difference at token {wrong[0]}",
        )


def interleave_head_rows(tensor: StoredTensor, head_dim: int) -> StoredTensor:
    """Reorder the rows of each head from halves (i, i + D/2) to neighbours (2i, 2i + 1), as in
    `TensorSpec.pairs`.

    Source: llama.cpp `conversion/llama.py` (LlamaModel.permute).
    """
    raw = tensor.read(0, tensor.nbytes)
    halves = raw.reshape(tensor.shape[0] // head_dim, 2, head_dim // 2, -1)
    raw = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(-1)
    return StoredTensor(tensor.name, tensor.shape, tensor.dtype, tensor.format, raw)


def t2d_sha256(t2d: StoredTensor) -> str:
    """Return the sha256 over one byte (0 or 1) for each token of the target."""
    return hashlib.sha256((t2d.raw != 0).tobytes()).hexdigest()


def as_int32(tensor: StoredTensor) -> NDArray[np.int32]:
    """Return a tensor of ids as int32; InputError if an id does not fit."""
    values = tensor.array()
    if tensor.format is None or not tensor.format.integer:
        raise InputError(f"tensor {tensor.name}", expected="integers", found=tensor.dtype)
    out = values.astype(np.int32)
    if not np.array_equal(out, values):
        raise InputError(f"tensor {tensor.name}: ids that do not fit 32 bits")
    return out
