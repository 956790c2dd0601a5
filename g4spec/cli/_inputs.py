"""Inputs of several commands: texts, token ids, and the files of -m and -md."""

from __future__ import annotations

import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from g4spec.cli import _missing_models
from g4spec.cli._os_errors import check_working_folder
from g4spec.cli.render import Output
from g4spec.errors import InputError

if TYPE_CHECKING:
    from g4spec.convert import hub

NGRAM = "ngram"


def read_text(path: Path) -> str:
    """Read UTF-8 text of at most 64 MiB from a file, pipe, or stdin for `-`.

    A byte order mark at the start and one newline at the end are removed.
    """
    from g4spec.gguf.regular_files import MAX_READ_BYTES

    with nullcontext(sys.stdin.buffer) if str(path) == "-" else path.open("rb") as file:
        data = file.read(MAX_READ_BYTES + 1)
    if len(data) > MAX_READ_BYTES:
        raise InputError(f"{path}: too large", expected=f"at most {MAX_READ_BYTES:,} bytes")
    try:
        return data.decode().removeprefix("\ufeff").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: not a text file",
            expected="UTF-8",
            found=f"{error.reason} at byte {error.start}",
        ) from None


def parse_ids(text: str, where: str) -> list[int]:
    """Parse token ids separated by spaces, line breaks or commas, optionally in brackets."""
    words = [w for w in re.split(r"[\s,]+", text.strip().strip("[]")) if w]
    for word in words:
        if not re.fullmatch(r"[0-9]{1,9}", word):
            raise InputError(f"{where}: not a token id", expected="a number", found=repr(word))
    return [int(word) for word in words]


def cache_folder() -> Path:
    """Return the folder of the cache of converted drafts."""
    from g4spec.gguf import user_cache

    return user_cache.folder("drafts")


def check_exists(*models: Path | str | None) -> None:
    """Raise InputError for a model that is neither an existing path nor can be a hub id, and
    EnvironmentProblem in a deleted folder. Call it before importing torch, which takes seconds.
    """
    check_working_folder()
    for path in (Path(m) for m in models if m is not None and m != NGRAM):
        _missing_models.check(path)


def resolve(
    name: Path,
    out: Output,
    want: Literal["any", "draft", "tokenizer", "gguf"] = "any",
    choose: hub.Choose | None = None,
) -> Path:
    """Return the path of a file or folder; download it into the hub's cache if it is a hub id.
    `choose`: see `hub.resolve`."""
    _missing_models.check(name)
    from g4spec.convert import hub

    path, notes = hub.resolve(name, want, choose)
    for note in notes:
        out.note(note)
    return path


def open_draft(path: Path, target: Path, out: Output) -> Path:
    """Return the GGUF of a draft.

    A checkpoint folder, or a GGUF in another program's dialect, is converted once and cached.
    """
    from g4spec import convert

    if not path.is_dir():
        with convert.detect(path, prefer_gguf=True) as found:
            if found.dialect is None:
                return path
    with out.progress(f"converting {path.name}") as progress:
        gguf, note = convert.convert_cached(path, target, cache_folder(), progress=progress)
    out.note(note)
    return gguf


def check_draft(path: Path, confident: bool = False) -> None:
    """Raise InputError unless `path` is a draft.

    Raises UsageError if it must be `confident` (have a confidence head) and is not.
    """
    from g4spec import convert, models

    with convert.detect(path, prefer_gguf=True) as found:
        if found.is_target:
            raise models.wrong_role(path, found.kind)
        if confident:
            models.require_confidence(path, found.kind, found.source.tensors)


def open_target(path: Path, n_ctx: int | None, out: Output, alone: bool) -> Path:
    """Return the GGUF of a target; of a folder, the GGUF in it, which a note says.

    Raises InputError unless it is a target's, UsageError for a too long context. `alone`: the
    command runs no drafts, so the error must not offer -md.
    """
    fix = "this is a draft, and this command runs only targets: name its target" if alone else None
    file = _gguf_in_folder(path, fix) if path.is_dir() else path
    from g4spec.runtime import target_file

    target_file.check(file, n_ctx, fix)
    if file != path:
        out.note(f"{path} holds a GGUF: took {file.name}")
    return file


def _gguf_in_folder(folder: Path, fix: str | None) -> Path:
    """Return the GGUF in a folder; raise InputError if there is none, or not a target's."""
    from g4spec import convert, models

    with convert.detect(folder, prefer_gguf=True) as found:
        if not found.is_target:
            raise models.wrong_role(folder, found.kind, fix)
        if found.path != folder:
            return found.path
    raise InputError(
        f"{folder}: a checkpoint folder",
        expected="a target's GGUF file",
        fix=f"convert it first: {convert.conversion_command(folder)}",
    )
