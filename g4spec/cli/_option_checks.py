"""Checks of option values before a command runs: they import no torch and load no model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import typer

from g4spec import ranges
from g4spec.cli import _field_names, _inputs, _options
from g4spec.errors import UsageError

UNTIL_FULL = -1
"""Value of -n that means: until the context is full."""


def check(values: Mapping[str, Any]) -> None:
    """Raise an error for the first value that no run can use.

    Args:
        values: parameter of the command -> value.
    """
    if "" in (values.get("stop") or ()):
        raise UsageError("--stop: an empty text would stop everything", fix="leave it out")
    if "categories" in values:
        _check_prompts(values)
    if "chunks" in values:
        _check_chunks(values)
    n_ctx, n_predict = values.get("ctx_size"), values.get("n_predict")
    if ("categories" in values or "cases" in values) and n_ctx and (n_predict or 0) >= n_ctx > 0:
        raise UsageError(
            "`n_predict`", expected=f"less than the context, `n_ctx` {n_ctx}", found=n_predict
        )
    fields = {alias: field for field, names in _field_names.SAME.items() for alias in names}
    for name, value in values.items():
        field = fields.get(name, name)
        if name == "draft_max" and value is not None:
            _check_draft_max(value, several="categories" in values)
        elif name == "n_predict" and value is not None:
            if value < 1 and value != UNTIL_FULL:
                expected = "1 or more, or -1 to continue until the context is full"
                raise UsageError("`n_predict`", expected=expected, found=value)
        elif field in ranges.RANGES:
            ranges.check_given(**{field: value})
    if "cache_type" in values or "device" in values:
        _check_load_options(values)


def _check_draft_max(text: str, several: bool) -> None:
    """Check --draft-max. `several`: the command takes a list of draft lengths."""
    if several:
        from g4spec.measure import draft_lengths

        draft_lengths.parse_lengths(text, None)
    else:
        ranges.check(draft_max=_options.draft_max(text))


def _check_load_options(values: Mapping[str, Any]) -> None:
    from g4spec.runtime import load_options

    load_options.check_cache_type(values.get("cache_type"))
    load_options.parse_device(values.get("device", "auto"))
    has_file = values.get("draft") not in (None, _inputs.NGRAM)
    load_options.check_draft(values.get("draft_p_min"), values.get("draft_window"), has_file)


def _check_chunks(values: Mapping[str, Any]) -> None:
    from g4spec.measure import text_chunks

    text_chunks.check_size(values["ctx_size"], values["chunks"])


def _check_prompts(values: Mapping[str, Any]) -> None:
    from g4spec.measure import prompts

    names = prompts.parse_categories(values["categories"])
    prompts.check_categories(names, None if values.get("preset") else values["count"])


def given_flags(context: typer.Context) -> dict[str, str]:
    """Return the options of the command line: parameter name -> flag, in the command's order."""
    sources = {o: context.get_parameter_source(o.name or "") for o in context.command.params}
    given = [o for o, source in sources.items() if source and source.name == "COMMANDLINE"]
    flags = {}
    for o in given:
        off = context.params.get(o.name or "") is False and o.secondary_opts
        names = o.secondary_opts if off else o.opts
        flags[o.name or ""] = next((name for name in names if name[:2] == "--"), names[0])
    return flags


def refuse_without_effect(flags: Mapping[str, str], names: Collection[str], why: str) -> None:
    """Raise UsageError for those of the `flags` (see `given_flags`) whose parameters are `names`.

    Args:
        why: when they have no effect, such as "with --url".
    """
    if found := [flag for name, flag in flags.items() if name in names]:
        raise UsageError(f"{', '.join(found)}: no effect {why}", fix="leave it out")


def refuse(why: str, fix: str, **options: object) -> None:
    """Raise UsageError for the first of `options` that is given, which is neither None nor False.

    Args:
        why: the end of the message, such as "needs a draft".
    """
    for name, value in options.items():
        if value is not None and value is not False:
            raise UsageError(f"--{name.replace('_', '-')} {why}", fix=fix)


def require_draft(draft: str | None, **options: object) -> None:
    """Raise UsageError if one of `options` is given and there is no draft."""
    if draft is None:
        refuse("needs a draft", "pass one with -md", **options)
