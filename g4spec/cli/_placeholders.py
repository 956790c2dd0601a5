"""Placeholders of values in `--help`, such as `-n N`; the same with every version of typer."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

BY_TYPE = {Path: "PATH", int: "N", float: "X", str: "TEXT"}


def fill(params: Sequence[Any], command: Callable[..., Any]) -> None:
    """Set the placeholder of each parameter that has none.

    Args:
        params: the command's parameters (click objects).
        command: its function, whose annotations have the types.
    """
    annotations = typing.get_type_hints(command)
    for param in params:
        if param.metavar is not None:
            continue
        if param.param_type_name == "argument":
            param.metavar = param.name.upper()
        elif not param.is_flag:
            param.metavar = _placeholder(annotations.get(param.name))


def _placeholder(annotation: Any) -> str | None:
    """Return the placeholder for a type: N for `int | None`, TEXT for `list[str] | None`."""
    if isinstance(annotation, types.UnionType):
        annotation = next(part for part in annotation.__args__ if part is not type(None))
    if typing.get_origin(annotation) is list:
        annotation = typing.get_args(annotation)[0]
    if typing.get_origin(annotation) is typing.Literal:
        return "|".join(typing.get_args(annotation))
    return BY_TYPE.get(annotation)
