"""The bundled model family of `demo`: finds, converts and validates it."""

from __future__ import annotations

import importlib.util
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import g4spec
from g4spec.cli.render import Output
from g4spec.errors import CheckFailed, InputError, UsageError

DRAFTS = ("dflash", "dflash-speculators", "assistant", "dflash-other")
"""Folders of the drafts; the last draft was trained for another target."""

PACKAGE = "g4spec_family"
"""The family as an installed package (packaging/family)."""
MARKS = {"bench.json": b'"command": "g4spec demo', "report.html": b"<code>g4spec demo"}
"""Result files of `demo` -> bytes in them that show that `demo` wrote them."""


def find(folder: Path | None) -> Path:
    """Return the folder of the checkpoints: `folder`, or else that of the clone or the package."""
    places = [folder] if folder else _places()
    needed = ("target", *DRAFTS)
    for place in places:
        if all((place / name / "config.json").is_file() for name in needed):
            return place
    expected = f"folders {', '.join(needed)}, each with a config.json"
    if folder is not None:
        missing = [name for name in needed if not (folder / name / "config.json").is_file()]
        raise InputError(
            f"--family {folder}: no model family",
            expected=expected,
            found="no such folder" if not folder.is_dir() else f"no {', '.join(missing)}",
            fix="pass the folder examples/tiny of the repository",
        )
    raise InputError(
        "the demo's model family is not part of the installed package",
        expected=f"{expected}, in examples/tiny here or with --family",
        fix="install it: `pip install` with the file g4spec_family-*.whl of the release, or with "
        "packaging/family of a clone; or run `g4spec demo --family REPOSITORY/examples/tiny`",
    )


def _places() -> list[Path]:
    spec = importlib.util.find_spec(PACKAGE)
    installed = map(Path, (spec and spec.submodule_search_locations) or ())
    trees = (Path(), Path(g4spec.__file__).parent.parent)
    return [*(tree / "examples" / "tiny" for tree in trees), *installed]


@dataclass(frozen=True, slots=True)
class Converted:
    """The family as GGUF files.

    Attributes:
        rows: rows of the table of converted checkpoints.
        bf16, q8_0: size of the draft in bytes, as BF16 and as Q8_0.
    """

    files: dict[str, Path]
    rows: list[tuple[object, ...]]
    bf16: int
    q8_0: int

    def show(self, out: Output) -> None:
        """Show and explain steps 1 and 2."""
        title = "1  Convert: write checkpoints as GGUF files, which g4spec and llama.cpp load."
        out.line(title, "bold", gap=True)
        columns = ("checkpoint", "copied", "made", "kept in keys", "dropped", "file")
        out.table("", columns, self.rows)
        out.line(
            "Every tensor is either used once or dropped with a reason; nothing is guessed from "
            "file names."
        )
        quantized = "2  Quantize: the same draft with 16 bits per weight, then with 8."
        out.line(quantized, "bold", gap=True)
        sizes = f"BF16 takes {self.bf16 / 2**20:.1f} MiB and Q8_0 {self.q8_0 / 2**20:.1f} MiB"
        out.line(f"{sizes}: about half the memory to read per drafted token.")


def convert_all(source: Path, folder: Path) -> Converted:
    """Convert every checkpoint, and one draft to two quant types."""
    from g4spec import convert

    check_folder(source, folder)
    files: dict[str, Path] = {}
    rows: list[tuple[object, ...]] = []
    for name in ("target", *DRAFTS):
        target = files.get("target")
        files[name] = folder / f"{name}.gguf"
        plan = convert.convert(source / name, files[name], target=target, dry_run=True).plan
        converted = convert.convert(source / name, files[name], target=target)
        counts = [len(plan.with_action(a)) for a in ("copy", "make", "metadata", "drop")]
        rows.append((name, *counts, f"{converted.nbytes / 2**20:.1f} MiB"))
    bf16 = convert.convert(
        source / "dflash", folder / "dflash-bf16.gguf", target=files["target"], type="bf16"
    )
    q8_0 = convert.quantize(bf16.out, folder / "dflash-q8_0.gguf", "q8_0")
    return Converted(files, rows, bf16.nbytes, q8_0.nbytes)


def check_folder(source: Path, folder: Path) -> None:
    """Raise UsageError if `demo` would replace a file in `folder` that `demo` did not write."""
    for name in ("target", *DRAFTS):
        _check_replaceable(folder / f"{name}.gguf", source / name)
    for type in ("bf16", "q8_0"):
        _check_replaceable(folder / f"dflash-{type}.gguf", source / "dflash")
    for path, mark in ((folder / name, mark) for name, mark in MARKS.items()):
        if os.path.lexists(path) and not (path.is_file() and mark in path.read_bytes()):
            raise _not_from_demo(path)


def _not_from_demo(path: Path) -> UsageError:
    fix = "name another folder with -o, or remove the file"
    return UsageError(f"{path} exists and was not written by this demo", fix=fix)


def _check_replaceable(path: Path, checkpoint: Path) -> None:
    """Raise UsageError if `path` exists and `demo` did not convert it from `checkpoint`."""
    from g4spec.convert import detect, provenance
    from g4spec.gguf import GGUF

    if not os.path.lexists(path):
        return
    recorded = None
    if path.is_file():
        with suppress(InputError), GGUF(path) as file:
            recorded = file.get(provenance.DIGEST)
    with detect(checkpoint) as found:
        if recorded != provenance.digest(found.source):
            raise _not_from_demo(path)


def validate_all(source: Path, files: dict[str, Path], out: Output) -> None:
    """Validate every file, with its target and its checkpoint; raise CheckFailed on errors."""
    from g4spec.validate import validate

    out.line("3  Validate: does each file run as it was trained?", "bold", gap=True)
    for name, path in files.items():
        pair = files["target"] if name != "target" else None
        report = validate(path, pair, source / name)
        out.line(report.summary(), style=None if report.ok else "bad")
        if not report.ok:
            raise CheckFailed(report.summary(), fix=f"see `g4spec validate {path}`")
    out.line("A draft with a wrong setting still runs, but slowly; these rules find the setting.")
