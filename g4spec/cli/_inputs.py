"""What several commands read: prompts, token lists, and the draft behind `-md`."""

from __future__ import annotations

import os
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Literal

import typer

from g4spec.cli.render import Output
from g4spec.errors import InputError, UsageError

NGRAM = "ngram"


def read_text(path: Path) -> str:
    """A UTF-8 file or pipe, or standard input for `-`, of at most 64 MiB; one newline at its end is
    left out."""
    from g4spec.gguf.regular_files import MAX_READ_BYTES

    with nullcontext(sys.stdin.buffer) if str(path) == "-" else path.open("rb") as file:
        data = file.read(MAX_READ_BYTES + 1)
    if len(data) > MAX_READ_BYTES:
        raise InputError(f"{path}: too large", expected=f"at most {MAX_READ_BYTES:,} bytes")
    try:
        return data.decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: not a text", expected="UTF-8", found=f"{error.reason} at byte {error.start}"
        ) from None


def parse_ids(text: str, where: str) -> list[int]:
    """Token ids between spaces, line breaks or commas; a list in brackets is fine too."""
    words = [w for w in re.split(r"[\s,]+", text.strip().strip("[]")) if w]
    for word in words:
        if not re.fullmatch(r"[0-9]{1,9}", word):
            raise InputError(f"{where}: not a token id", expected="numbers", found=repr(word))
    return [int(word) for word in words]


def cache_folder() -> Path:
    """Where converted drafts are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "g4spec" / "drafts"


def resolve(name: Path, out: Output, want: Literal["any", "tokenizer", "gguf"] = "any") -> Path:
    """What the user named: a path, or a hub id whose files are fetched into the hub's cache."""
    from g4spec.convert import hub

    path, notes = hub.resolve(name, want)
    for note in notes:
        out.note(note)
    return path


def open_draft(path: Path, target: Path, out: Output) -> Path:
    """The GGUF of a draft: a checkpoint folder, or a GGUF in another program's dialect, is
    converted once and kept in a cache."""
    from g4spec import convert

    if not path.is_dir():
        with convert.detect(path, prefer_gguf=True) as found:
            if found.dialect is None:
                return path
    with out.progress(f"converting {path.name}") as progress:
        made, note = convert.convert_cached(path, target, cache_folder(), progress=progress)
    out.note(note)
    return made


def check_draft(path: Path, confident: bool = False) -> None:
    """InputError for what is no draft; UsageError for one that lacks a confidence head, where it
    must be `confident`."""
    from g4spec import convert, models

    with convert.detect(path, prefer_gguf=True) as found:
        if found.is_target:
            raise models.misplaced(path, found.kind)
        if confident:
            models.require_confidence(path, found.kind, found.source.tensors)


def check_target(path: Path, n_ctx: int | None) -> None:
    """InputError for what is no GGUF of a target, UsageError for a context that it has not."""
    if not path.is_dir():
        from g4spec.runtime import engine

        return engine.check(path, n_ctx)
    from g4spec import convert, models

    with convert.detect(path, prefer_gguf=True) as found:
        if not found.is_target:
            raise models.misplaced(path, found.kind)
        if found.path != path:
            fix = f"name the file in it: {found.path}"
        else:
            fix = f"convert it first: g4spec convert {path} -o {path.resolve().name}.gguf"
    raise InputError(f"{path}: a folder", expected="a target's GGUF file", fix=fix)


def given_flags(context: typer.Context) -> dict[str, str]:
    """The options that were given: name of the parameter -> flag, in the command's order."""
    sources = {o: context.get_parameter_source(o.name or "") for o in context.command.params}
    return {
        o.name or "": next((flag for flag in o.opts if flag[:2] == "--"), o.opts[0])
        for o, source in sources.items()
        if source is not None and source.name == "COMMANDLINE"
    }


def require_draft(draft: str | None, **given: object) -> None:
    """UsageError for an option that is about a draft where there is none."""
    for name, value in given.items():
        if draft is None and value:
            raise UsageError(f"--{name.replace('_', '-')} needs a draft", fix="pass one with -md")
