"""Translates llama.cpp flags in a command line to options of g4spec.

Flags without an equivalent are refused with a reason, all of them in one error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand, TyperGroup

from g4spec.cli._llama_flags import REFUSED, SAME
from g4spec.errors import UsageError


class Command(TyperCommand):
    """A command that accepts llama.cpp flags."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Translate `args`, then parse them as click does."""
        return super().parse_args(ctx, translate(self.params, args))


class Group(TyperGroup):
    """A command with subcommands that accepts llama.cpp flags."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Translate `args`, then parse them as click does."""
        return super().parse_args(ctx, translate(self.params, args))


def translate(params: Sequence[Any], args: Sequence[str]) -> list[str]:
    """Return `args` with the flags of SAME replaced by the command's own options.

    Args:
        params: the command's parameters (click objects).

    Raises:
        UsageError: for flags of SAME or REFUSED that the command does not have, and for two
            spellings of one option with different values.
    """
    own_flags = {
        flag: p
        for p in params
        if p.param_type_name == "option"
        for flag in (*p.opts, *p.secondary_opts)
    }
    result, refused, rest = list[str](), list[str](), list(args)
    values: dict[str, tuple[str, str]] = {}
    while rest:
        argument = rest.pop(0)
        if argument == "--":  # only positional arguments follow
            result += [argument, *rest]
            break
        typed, equals, value = (
            argument.partition("=") if argument.startswith("-") else (argument, "", "")
        )
        flag = typed if typed in own_flags else SAME.get(typed, typed)
        option = own_flags.get(flag)
        if option is None:
            result.append(argument)
            if why := REFUSED.get(typed, f"this command has no option {flag}" * (typed in SAME)):
                refused.append(f"{typed}: {why}")
            continue
        result.append(flag + equals + value)
        if option.is_flag or not (equals or rest):
            continue
        if not equals:
            result.append(value := rest.pop(0))
        before, first = values.setdefault(option.name, (typed, value))
        if before != typed and first != value and not option.multiple:
            raise UsageError(
                f"{before} {first} and {typed} {value} both set {flag}", fix="give it once"
            )
    if refused:
        raise UsageError("; ".join(dict.fromkeys(refused)))
    return result
