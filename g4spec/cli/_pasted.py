"""Flags of llama.cpp that are pasted as they are: taken where they mean something here, else
refused with the reason, all at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand, TyperGroup

from g4spec.cli._llama_flags import REFUSED, SAME
from g4spec.errors import UsageError


class Command(TyperCommand):
    """A command that takes pasted flags."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See click; `args` are respelt first."""
        return super().parse_args(ctx, ours(self.params, args))


class Group(TyperGroup):
    """A command with commands of its own that takes pasted flags."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See click; `args` are respelt first."""
        return super().parse_args(ctx, ours(self.params, args))


def ours(params: Sequence[Any], args: Sequence[str]) -> list[str]:
    """Arguments with the flags of SAME spelt as the command spells them.

    Args:
        params: of the command, as click keeps them.

    Raises UsageError for flags that the command has not and that are known here, and for two
    spellings of one option with two values.
    """
    takes = {
        flag: p
        for p in params
        if p.param_type_name == "option"
        for flag in (*p.opts, *p.secondary_opts)
    }
    made, refused, words = list[str](), list[str](), list(args)
    values: dict[str, tuple[str, str]] = {}
    while words:
        word = words.pop(0)
        if word == "--":  # what follows are no flags
            made += [word, *words]
            break
        given, equals, value = word.partition("=") if word.startswith("-") else (word, "", "")
        flag = given if given in takes else SAME.get(given, given)
        option = takes.get(flag)
        if option is None:
            made.append(word)
            if why := REFUSED.get(given, f"this command has no {flag}" * (given in SAME)):
                refused.append(f"{given}: {why}")
            continue
        made.append(flag + equals + value)
        if option.is_flag or not (equals or words):
            continue
        if not equals:
            made.append(value := words.pop(0))
        before, first = values.setdefault(option.name, (given, value))
        if before != given and first != value and not option.multiple:
            raise UsageError(
                f"{before} {first} and {given} {value} set one option, {flag}", fix="give it once"
            )
    if refused:
        raise UsageError("; ".join(dict.fromkeys(refused)))
    return made
