"""Names of the library's parameters in the command line (see `g4spec.errors.spell`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SAME = {
    "accept_length": ("accepted",),
    "certificate": ("ssl_cert_file",),
    "count": ("cases",),
    "key": ("ssl_key_file",),
    "lengths": ("draft_max",),
    "n_ctx": ("ctx_size",),
    "repetition_penalty": ("repeat_penalty",),
    "size": ("ctx_size",),
    "target": ("model",),
    "temperature": ("temp",),
    "tensor_types": ("tensor_type",),
    "type": ("mix",),
}
"""Parameter of the library -> parameters of commands with another name; the first one counts."""

USUAL = {
    "allow_requantize": "--allow-requantize",
    "device": "--device",
    "draft": "-md",
    "n_ctx": "-c",
    "target": "-m",
}
"""Parameter of the library -> option, for messages of commands without it."""


def flags(
    params: Sequence[Any], values: Mapping[str, tuple[str, str]] | None = None
) -> dict[str, str]:
    """Return parameter of the library -> option of a command.

    Args:
        params: the command's parameters (click objects).
        values: name of a parameter -> its option as typed, and its value (see `CommandLine`).
            Options that take a value are spelled as typed.
    """
    options = [p for p in params if p.param_type_name == "option"]
    own = {p.name: p.opts[0] for p in options}
    if values is not None:
        own |= {p.name: values[p.name][0] for p in options if p.name in values and not p.is_flag}
    other = {
        name: own[alias]
        for name, aliases in SAME.items()
        for alias in reversed(aliases)
        if alias in own
    }
    return {**USUAL, **other, **own}
