"""Errors for arguments that a command does not have, with the option that was probably meant."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from g4spec.cli._likely_options import OTHER_NAMES, is_argument, meant, quoted
from g4spec.errors import G4Error, InputError, UsageError, did_you_mean

_PLAIN = {
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "less than or equal to": "at most",
    "greater than or equal to": "at least",
}
"""Words of typer for what it expected -> plain words."""


def usage(context: Any, params: Sequence[Any]) -> str:
    """Return the command with its arguments and required options: "g4spec recipe ENGINE -m MODEL
    [OPTIONS]"."""
    names = (_placeholder(p) for p in params if is_argument(p))
    options = (f"{p.opts[0]} {p.name.upper()}" for p in params if p.required and not is_argument(p))
    return f"`{' '.join((context.command_path, *names, *options, '[OPTIONS]'))}`"


def unexpected(
    context: Any, params: Sequence[Any], words: Sequence[str], typed: Collection[str]
) -> UsageError:
    """Return the error for more words without an option than the command has arguments.

    Args:
        context: click's context of the command.
        params: the command's parameters (click objects).
        words: all words without an option.
        typed: names of the parameters that have a value on the command line.
    """
    extra = words[sum(map(is_argument, params)) :]
    what = f"unexpected argument{'s' * (len(extra) > 1)} {' '.join(map(repr, extra))}"
    similar = did_you_mean(words[0], getattr(context.command, "commands", {}))
    fix = f"{similar} " if similar else meant(params, words, typed)
    return UsageError(what, expected=usage(context, params), fix=fix + see_help(context, fix))


def missing(
    context: Any, params: Sequence[Any], words: Sequence[str], typed: Collection[str]
) -> UsageError | None:
    """Return the error for the first required option or argument without a value, or None."""
    arguments = [p for p in params if is_argument(p)]
    absent = [p for p in params if p.required and not is_argument(p) and p.name not in typed]
    absent += [p for p in arguments[len(words) :] if p.required]
    if not absent:
        return None
    name, fix = " or ".join(absent[0].opts[:2]), meant(params, words, typed)
    if is_argument(absent[0]):
        name, fix = _placeholder(absent[0]), f"{absent[0].help} " if absent[0].help else fix
    fix += see_help(context, fix)
    return UsageError(f"{name} is missing", expected=usage(context, params), fix=fix)


def unknown_option(context: Any, own_flags: Iterable[str], unknown: Sequence[str]) -> UsageError:
    """Return the error for options that the command does not have."""
    commands = getattr(context.command, "commands", {}) if context.parent is None else {}
    flags = {name: {flag for p in c.params for flag in p.opts} for name, c in commands.items()}
    owner = max(flags, key=lambda name: len(flags[name] & set(unknown)), default="")
    if flags and flags[owner] & set(unknown):
        fix = f"put a command first, such as `g4spec {owner} {unknown[0]} ...`. "
    else:
        other = OTHER_NAMES.get(unknown[0])
        similar = did_you_mean(unknown[0], own_flags)
        if other is not None and other in own_flags:
            similar = f"did you mean {other}?"
        fix = f"{similar} " if similar else ""
    what = f"`{context.command_path}` has no option {' '.join(dict.fromkeys(unknown))}"
    params = context.command.params
    expected = usage(context, params) if not fix and any(map(is_argument, params)) else None
    return UsageError(what, expected=expected, fix=fix + see_help(context, fix))


def unknown_command(context: Any, commands: Sequence[str], word: str) -> UsageError:
    """Return the error for the name of a command that does not exist."""
    similar = did_you_mean(word, commands)
    if similar is None and context.parent is None and Path(word).exists():
        similar = f"put a command first, such as `g4spec inspect {quoted(word)}`."
    fix = f"{similar} " if similar else ""
    return UsageError(
        f"`{context.command_path}` has no command {word!r}",
        expected=f"one of {', '.join(commands)}",
        fix=fix + see_help(context, fix),
    )


def missing_value(context: Any, typed: str, following: str | None) -> UsageError:
    """Return the error for an option at the end, or in front of another option."""
    found = "the end of the command" if following is None else f"the option {following}"
    fix = f"write `{typed} VALUE`"
    if following is not None:
        fix += f", or `{typed}={following}` if that is the value"
    fix = f"{fix}. {see_help(context, fix)}"
    return UsageError(f"{typed} needs a value", found=found, fix=fix)


def from_click(error: Any, context: Any, values: Mapping[str, tuple[str, str]]) -> G4Error:
    """Return an error of click for one parameter as a UsageError with the value that was found, or
    as an InputError for a file that may not be read.

    Args:
        values: name of a parameter -> its option as typed, and its value.
    """
    text = error.format_message().rstrip(".")
    if locked := re.search(r"('[^']*') is not readable$", text):
        return InputError(
            f"cannot open {locked[1]}: permission denied", fix="check its permissions"
        )
    name = getattr(getattr(error, "param", None), "name", None)
    flag, value = values.get(name or "", (None, None))
    if flag is None:
        return UsageError(text, fix=see_help(context))
    reason = re.sub(r"^Invalid value for .*?: ", "", text)
    if "exceeded maximum size" in reason:
        return UsageError(flag, expected="a smaller number", found=f"{len(str(value))} digits")
    if choices := re.search(r"is not one of (.*)", reason):
        expected = f"one of {choices[1].replace(chr(39), '')}"
        return UsageError(flag, expected=expected, found=f"{value!r:.80}", fix=see_help(context))
    if not reason.startswith("Input should be "):  # such as a folder in place of a file
        return UsageError(f"{flag}: {reason}", fix=see_help(context))
    # "Input should be a valid integer, unable to parse string as an integer"
    wanted = reason.removeprefix("Input should be ").split(",")[0]
    for words, plain in _PLAIN.items():
        wanted = wanted.replace(words, plain)
    return UsageError(flag, expected=wanted, found=f"{value!r:.80}", fix=see_help(context))


def see_help(context: Any, before: str = "") -> str:
    """Return "see `g4spec bench --help`"; it begins a sentence if there is text before it."""
    return f"{'See' if before else 'see'} `{context.command_path} --help`"


def _placeholder(param: Any) -> str:
    name = (param.metavar or param.name).upper()
    return name if param.required else f"[{name}]"
