"""Tensors of Gemma 4 that other programs store otherwise.

`convert_hf_to_gguf.py --fuse-qkv` writes queries, keys and values of a layer in one tensor,
`blk.N.attn_qkv.weight`, for layers that have all three. Ollama's older files have another name for
the factors of experts.

Rows are contiguous in every type, so each of the three is a range of its bytes.
Source: llama.cpp `conversion/base.py`, `src/models/gemma4.cpp`; ollama `llama/compat`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from g4spec.gguf.header import TensorInfo

_PART = re.compile(r"\.attn_[qkv]\.")
_WHOLE = ".attn_qkv."
_HALF, _BOTH = re.compile(r"\.ffn_(gate|up)_exps\."), ".ffn_gate_up_exps."
_HALVES = ".ffn_gate_exps.", ".ffn_up_exps."
_GAINS, _OLD_GAINS = ".ffn_down_exps.scale", ".ffn_gate_inp.per_expert_scale"


def whole_name(name: str) -> str:
    """Return the name of the tensor that may hold tensor `name` too; of other tensors their own."""
    return _PART.sub(_WHOLE, name)


def same_inputs(name: str) -> tuple[str, ...]:
    """Return the names of matrices that have the inputs of matrix `name`, itself first."""
    joined = _HALF.sub(_BOTH, name)
    return name, whole_name(name), joined, *(joined.replace(_BOTH, half) for half in _HALVES)


def separate(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return the tensors of a target with queries, keys and values apart and with the usual names,
    in the order of the file.

    A tensor of an unexpected shape, or beside one of its parts, stays as it is.
    """
    out: dict[str, TensorInfo] = {}
    for info in tensors.values():
        out |= _parts(info, tensors) or _named(info, tensors)
    return out


def _named(info: TensorInfo, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    name = info.name
    if name.endswith(_OLD_GAINS) and name.replace(_OLD_GAINS, _GAINS) not in tensors:
        name = name.replace(_OLD_GAINS, _GAINS)
    return {name: replace(info, name=name)}


def _parts(whole: TensorInfo, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return the parts of a tensor. Queries have as many rows as `attn_output` has columns; keys
    and values share the other rows."""
    names = [whole.name.replace(_WHOLE, f".attn_{part}.") for part in "qkv"]
    output = tensors.get(whole.name.replace(_WHOLE, ".attn_output."))
    if not whole.name.endswith(f"{_WHOLE}weight") or tensors.keys() & set(names):
        return {}
    if output is None or len(output.shape) != 2 or len(whole.shape) != 2:
        return {}
    n_q, n_kv = output.shape[1], whole.shape[0] - output.shape[1]
    if n_kv <= 0 or n_kv % 2:
        return {}
    out, at, row_bytes = {}, whole.offset, whole.nbytes // whole.shape[0]
    for name, rows in zip(names, (n_q, n_kv // 2, n_kv // 2), strict=True):
        size = rows * row_bytes
        out[name] = replace(whole, name=name, shape=(rows, whole.shape[1]), offset=at, nbytes=size)
        at += size
    return out
