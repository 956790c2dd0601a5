"""Classes of the commands: they read a command line before click does, for better errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from g4spec.cli import (
    _argument_errors,
    _field_names,
    _likely_options,
    _option_checks,
    _placeholders,
)
from g4spec.cli._flag_translation import HELP, CommandLine
from g4spec.cli._os_errors import CLICK_ERROR
from g4spec.cli.render import Output
from g4spec.errors import UsageError


class Command(TyperCommand):
    """A command that accepts llama.cpp flags."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help text."""
        if self.callback is not None:
            _placeholders.fill(self.params, self.callback)
        super().format_help(ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Check and translate `args`, then parse them as click does."""
        if ctx.resilient_parsing:  # completion in a shell
            return super().parse_args(ctx, args)
        params = self.get_params(ctx)
        Output.field_names = _field_names.flags(params)
        line = CommandLine.read(ctx, params, args)
        Output.field_names = _field_names.flags(params, line.values)
        if line.asks_for_help:
            _show_help(ctx)
        if len(line.words) > sum(map(_likely_options.is_argument, params)):
            raise _argument_errors.unexpected(ctx, params, line.words, line.values)
        if "" in line.words and not any(p.name == "text" for p in params):
            raise UsageError("an argument is an empty text", fix=_argument_errors.see_help(ctx))
        if error := _argument_errors.missing(ctx, params, line.words, line.values):
            raise error
        return _parse(super().parse_args, ctx, line)


class Group(TyperGroup):
    """A command with subcommands that accepts llama.cpp flags."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help text."""
        if self.callback is not None:
            _placeholders.fill(self.params, self.callback)
        super().format_help(ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Check and translate `args`, then parse them as click does."""
        if ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        params = self.get_params(ctx)
        Output.field_names = _field_names.flags(params)
        line = CommandLine.read(ctx, params, args, has_subcommands=True)
        Output.field_names = _field_names.flags(params, line.values)
        if line.asks_for_help:
            _show_help(ctx)
        _show_help_of_subcommand(ctx, line.args)
        if line.words and line.words[0] not in self.commands:
            if _likely_options.meant(params, line.words, line.values):
                raise _argument_errors.unexpected(ctx, params, line.words, line.values)
            raise _argument_errors.unknown_command(ctx, list(self.commands), line.words[0])
        return _parse(super().parse_args, ctx, line)


def _show_help(context: Any) -> NoReturn:
    """Print the help text and end the run."""
    Output().stream(context.get_help() + "\n")
    raise typer.Exit


def _show_help_of_subcommand(context: Any, args: list[str]) -> None:
    """If `args` are only the name of a subcommand and --help, print its help text and end the run.

    When click parses the name, typer imports pydantic for the defaults of the options before it.
    That takes longer than everything else.
    """
    *subcommands, last = args or [""]
    if last not in HELP:
        return
    for name in subcommands:
        command = getattr(context.command, "commands", {}).get(name)
        if command is None:
            return
        context = type(context)(command, info_name=name, parent=context)
    _show_help(context)


def _parse(parse: Callable[..., list[str]], context: Any, line: CommandLine) -> list[str]:
    """Parse with click and check the values; name option and value in errors."""
    try:
        rest = parse(context, line.args)
    except CLICK_ERROR as error:
        raise _argument_errors.from_click(error, context, line.values) from None
    _option_checks.check(context.params)
    return rest
