"""Reads a command line before click does, and translates llama.cpp flags to options of g4spec.

Flags without an equivalent are refused with a reason, all of them in one error. Errors name the
option that was probably meant (see `g4spec.cli._argument_errors`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from g4spec.cli import _argument_errors
from g4spec.cli._llama_flags import IMPLIED, REFUSED, SAME
from g4spec.errors import UsageError

HELP = ("-h", "--help")
MAY_BE_EMPTY = ("prompt", "system", "stop")
"""Parameters of which an empty text is a value, or has an error of its own."""
PATHS = ("out", "save", "report", "folder", "out_dir")
"""Parameters that are files or folders to write."""


@dataclass(slots=True)
class CommandLine:
    """A command line, word by word.

    Attributes:
        args: arguments for click, with llama.cpp flags replaced by the command's own options.
        words: the words without an option; of a group only the name of the subcommand.
        values: name of a parameter -> its option as typed, and its value ("" for a switch).
        refused: what is wrong with each flag that the command does not have.
    """

    args: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    values: dict[str, tuple[str, str]] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    asks_for_help: bool = False

    @classmethod
    def read(
        cls, context: Any, params: Sequence[Any], args: Sequence[str], has_subcommands: bool = False
    ) -> CommandLine:
        """Read `args`.

        Args:
            params: the command's parameters (click objects).

        Raises:
            UsageError: for flags that the command does not have, for an option without its value,
                and for two spellings of one option with different values.
        """
        line, rest = cls(), list(args)
        own_flags = {
            flag: p
            for p in params
            if p.param_type_name == "option"
            for flag in (*p.opts, *p.secondary_opts)
        }
        unknown: list[str] = []
        while rest:
            argument = rest.pop(0)
            if argument == "--":  # only words without an option follow
                line.args += [argument, *rest]
                line.words += rest
                break
            if argument == "-" or not argument.startswith("-"):
                line.args.append(argument)
                line.words.append(argument)
                if has_subcommands:  # the rest belongs to the subcommand
                    line.args += rest
                    unknown += [w for w in rest if w.startswith("-")] if unknown else []
                    break
                continue
            if argument in HELP:
                line.asks_for_help = True
                break
            if (parts := _split_short(argument, own_flags)) is not None:
                rest[:0] = parts
            elif not line._read_option(context, own_flags, argument, rest):
                unknown.append(argument.partition("=")[0])
        if line.refused and not line.asks_for_help:
            line.refused += [f"{flag}: no such option" for flag in unknown]
            raise UsageError("; ".join(dict.fromkeys(line.refused)))
        if unknown and not line.asks_for_help:
            raise _argument_errors.unknown_option(context, own_flags, unknown)
        return line

    def _read_option(
        self, context: Any, own_flags: Mapping[str, Any], argument: str, rest: list[str]
    ) -> bool:
        """Read an option, and its value from `rest`; return False if the option is unknown."""
        typed, equals, value = argument.partition("=")
        flag = typed if typed in own_flags else SAME.get(typed, typed)
        option = own_flags.get(flag)
        if option is None and typed in IMPLIED.get(context.info_name, ()):
            return True
        if option is None:
            why = REFUSED.get(typed, f"this command has no option {flag}" * (typed in SAME))
            if why:
                self.refused.append(f"{typed}: {why}")
            return bool(why)
        if option.is_flag:
            if equals:
                raise UsageError(f"{typed} takes no value", found=value, fix=f"write only {typed}")
            self.args.append(flag)
            self.values.setdefault(option.name, (typed, ""))
            return True
        if not equals:
            following = rest[0] if rest else None
            path = option.name in PATHS  # a file named as an option is written `./-q`
            if following is None or (following in own_flags and (path or following[:2] == "--")):
                raise _argument_errors.missing_value(context, typed, following)
            value = rest.pop(0)
        if not value and option.name not in MAY_BE_EMPTY:
            raise UsageError(
                f"{typed}: the value is an empty text", fix="give one, or leave it out"
            )
        self.args += [flag, value]
        before, first = self.values.setdefault(option.name, (typed, value))
        if before != typed and first != value and not option.multiple:
            raise UsageError(
                f"{before} {first} and {typed} {value} both set {flag}", fix="give it once"
            )
        self.values[option.name] = (typed, value)
        return True


def _split_short(argument: str, own_flags: Mapping[str, Any]) -> list[str] | None:
    """Return short options that are written as one word separately: -qn5 is -q -n 5.

    Returns None if `argument` is one option.
    """
    known = own_flags.keys() | SAME.keys() | REFUSED.keys()
    if argument[1] == "-" or len(argument) < 3 or argument.partition("=")[0] in known:
        return None
    if f"-{argument}" in own_flags:  # -temp for --temp
        return None
    parts: list[str] = []
    for i, letter in enumerate(argument[1:], 1):
        option = own_flags.get(f"-{letter}")
        if option is None:
            return None
        parts.append(f"-{letter}")
        if not option.is_flag:
            return parts + [argument[i + 1 :]] * (i + 1 < len(argument))
    return parts
