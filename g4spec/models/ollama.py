"""Files of Gemma 4 by Ollama: vision and audio are beside the text model, and the tokenizer has the
same tokens and merges, but another name and other types of tokens.

Source: ollama `convert/convert_gemma4.go`, `convert/tokenizer.go`, `llama/compat`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from g4spec.models.spec import BYTE, CONTROL, NORMAL, USER_DEFINED, VISIBLE

if TYPE_CHECKING:
    from g4spec.gguf import GGUF, TensorInfo

MODEL, PRE = "tokenizer.ggml.model", "tokenizer.ggml.pre"
_OTHER_PARTS = re.compile(r"(v|a|mm)\..*|model\.vision_tower\..*")
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def has_tokenizer(kv: Mapping[str, Any]) -> bool:
    """Return whether a file's tokenizer is Gemma 4's in Ollama's words."""
    return kv.get(MODEL) == "llama" and kv.get(PRE) == "gemma4"


def token_types(tokens: Sequence[str], types: Sequence[int] | NDArray[Any]) -> NDArray[Any]:
    """Return the types of tokens as upstream's converter writes them, as a copy. Ollama's has bytes
    as normal tokens, and marks of calls and channels, which parsers need, as control tokens."""
    out = np.array(types)
    for i, text in enumerate(tokens[: len(out)]):
        if out[i] == NORMAL and _BYTE.fullmatch(text):
            out[i] = BYTE
        elif out[i] == CONTROL and text in VISIBLE:
            out[i] = USER_DEFINED
    return out


def other_parts(file: GGUF) -> list[str]:
    """Return the names of the tensors for vision and audio in a target."""
    if file.get("general.architecture") != "gemma4":
        return []
    return [name for name in file.tensors if _OTHER_PARTS.fullmatch(name)]


def text_tensors(file: GGUF) -> dict[str, TensorInfo]:
    """Return the tensors of a file without those for vision and audio."""
    unused = frozenset(other_parts(file))
    return {name: info for name, info in file.tensors.items() if name not in unused}


def wrote(file: GGUF) -> bool:
    """Return whether a target is in Ollama's words, which llama.cpp refuses or misreads."""
    return bool(other_parts(file)) or has_tokenizer(file)


def notes(file: GGUF) -> list[str]:
    """Return a remark about tensors of a target that are not used, if there are any."""
    found = other_parts(file)
    return [f"{len(found)} tensors for vision and audio are not used"] if found else []


def changes(file: GGUF) -> str:
    """Return the remark about what another type changes in a file."""
    words = " and its tokenizer's words" if has_tokenizer(file) else ""
    left_out = "; vision and audio are left out" if other_parts(file) else ""
    return f"only its types{words} are changed{left_out}"
