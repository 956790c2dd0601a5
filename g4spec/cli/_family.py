"""The bundled model family: where it is, and its files converted and validated for `demo`."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import g4spec
from g4spec.cli.render import Output
from g4spec.errors import CheckFailed, InputError, UsageError

DRAFTS = ("dflash", "dflash-speculators", "assistant", "dflash-other")
"""Folders beside `target`; the last one was trained for another target."""

MARKS = {"bench.json": b'"command": "g4spec demo', "report.html": b"<code>g4spec demo"}
"""Results of `demo`, and what each says about the command that wrote it."""


def find(given: Path | None) -> Path:
    """The folder with the checkpoints: as given, here, or beside the source code."""
    tree = Path(g4spec.__file__).parent.parent
    places = [given] if given else [base / "examples" / "tiny" for base in (Path(), tree)]
    for place in places:
        if all((place / name / "config.json").is_file() for name in ("target", *DRAFTS)):
            return place
    raise InputError("no model family", found=", ".join(map(str, places)),
                     expected=f"folders target, {', '.join(DRAFTS)}",
                     fix="run this in the repository, or pass --family")  # fmt: skip


def convert_all(source: Path, folder: Path, out: Output) -> dict[str, Path]:
    from g4spec import convert

    check_folder(source, folder)
    out.line("1  Convert: checkpoints become GGUF files, which g4spec and llama.cpp load.", "bold")
    files: dict[str, Path] = {}
    rows = []
    for name in ("target", *DRAFTS):
        target = files.get("target")
        files[name] = folder / f"{name}.gguf"
        plan = convert.convert(source / name, files[name], target=target, dry_run=True).plan
        made = convert.convert(source / name, files[name], target=target)
        counts = [len(plan.of(a)) for a in ("copy", "make", "metadata", "drop")]
        rows.append((name, *counts, f"{made.nbytes / 2**20:.1f} MiB"))
    out.table("", ("checkpoint", "copied", "made", "kept in keys", "dropped", "file"), rows)
    out.line("The plan uses every tensor once or gives a reason for leaving it out; nothing is "
             "guessed from file names.")  # fmt: skip
    out.line("2  Quantize: the same draft in full precision, then with 8 bits a weight.", "bold",
             gap=True)  # fmt: skip
    wide = convert.convert(source / "dflash", folder / "dflash-bf16.gguf", target=files["target"],
                           type="bf16")  # fmt: skip
    small = convert.quantize(wide.out, folder / "dflash-q8_0.gguf", "q8_0")
    out.line(f"BF16 needs {wide.nbytes / 2**20:.1f} MiB and Q8_0 {small.nbytes / 2**20:.1f} MiB: "
             "half the memory to read for every drafted token.")  # fmt: skip
    return files


def check_folder(source: Path, folder: Path) -> None:
    """Raise UsageError if `demo` would replace a file in `folder` that no earlier demo made."""
    from g4spec.gguf import regular

    for name in ("target", *DRAFTS):
        _check_free(folder / f"{name}.gguf", source / name)
    for name in ("dflash-bf16", "dflash-q8_0"):
        _check_free(folder / f"{name}.gguf", source / "dflash")
    for name, mark in MARKS.items():
        path = folder / name
        if os.path.lexists(path) and not (path.is_file() and mark in regular.read(path)):
            raise _foreign(path)


def _foreign(path: Path) -> UsageError:
    return UsageError(f"{path} is there and was not made by this demo",
                      fix="name another folder with -o, or remove the file")  # fmt: skip


def _check_free(path: Path, checkpoint: Path) -> None:
    """Raise UsageError for a file that no earlier demo made of this checkpoint."""
    from g4spec.convert import detect, provenance
    from g4spec.gguf import GGUF

    if not os.path.lexists(path):
        return
    said = None
    if path.is_file():
        with suppress(InputError), GGUF(path) as file:
            said = file.get(provenance.DIGEST)
    with detect(checkpoint) as found:
        if said != provenance.digest(found.source):
            raise _foreign(path)


def validate_all(source: Path, files: dict[str, Path], out: Output) -> None:
    from g4spec.validate import validate

    out.line("3  Validate: would a file run as it was trained?", "bold", gap=True)
    for name, path in files.items():
        pair = files["target"] if name != "target" else None
        report = validate(path, pair, source / name)
        out.line(report.summary(), style=None if report.ok else "bad")
        if not report.ok:
            raise CheckFailed(report.summary(), fix=f"see `g4spec validate {path}`")
    out.line("A draft with a wrong detail still runs, only slowly; these rules find the detail.")
