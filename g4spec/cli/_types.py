"""`--type`, and the display of plans and sizes, for convert, quantize and inspect."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from g4spec import __file__ as package
from g4spec.cli.render import Output
from g4spec.errors import UsageError

if TYPE_CHECKING:
    from g4spec.convert import Result

QUANT = Path(package).parent / "quant"


def _types() -> list[str]:
    """Return the names of all quant types that can be written, and of all mixes.

    Reads their files instead of importing them: `--help` must not wait for numpy.
    """
    formats = {f.stem for f in (QUANT / "formats").glob("*.py") if "\ndef encode(" in f.read_text()}
    return sorted(formats | {m.name for m in pkgutil.iter_modules([str(QUANT / "mixes")])})


TYPES = _types()
Type = Annotated[
    str,
    typer.Option(
        "--type", help=f"Quant type of the matrices: {', '.join(TYPES)}. Vectors stay F32."
    ),
]
TensorTypes = Annotated[
    list[str] | None,
    typer.Option(
        "--tensor-type",
        metavar="PATTERN=TYPE",
        help="Quant type of the matrices whose name contains a match of this regular expression. "
        "May be repeated; the first match counts.",
    ),
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Show what would happen to each tensor; write nothing."),
]
SplitMaxSize = Annotated[
    str | None,
    typer.Option(
        "--split-max-size",
        metavar="N(M|G)",
        help="Split the output into files of at most this size (M: 10^6 bytes, G: 10^9 bytes), "
        "named NAME-00001-of-0000N.gguf and so on.",
    ),
]
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(n: float) -> str:
    """Return `n` bytes as text with a unit: "1.5 GiB"."""
    i = 0
    while n >= 1024 and i < len(UNITS) - 1:
        n, i = n / 1024, i + 1
    return f"{n:.0f} {UNITS[i]}" if i == 0 else f"{n:.1f} {UNITS[i]}"


def split_size(text: str | None) -> int | None:
    """Parse `--split-max-size`, spelled as for llama-gguf-split, into bytes."""
    if text is None:
        return None
    found = re.fullmatch(r"([1-9][0-9]{0,8})([MG])", text)
    if not found:
        raise UsageError(
            "--split-max-size", expected="a number and M or G, such as 40G", found=text
        )
    return int(found[1]) * {"M": 10**6, "G": 10**9}[found[2]]


def show(result: Result, out: Output, **more: Any) -> None:
    """Show the plan of a dry run, or what was written. `more`: further fields for `--json`."""
    for note in result.notes:
        out.note(note)
    rows = result.plan.tensors
    if not result.written:
        columns = ("source", "", "result", "shape", "type", "why")
        shown = [
            (r.source or "-", r.action, r.name or "-", _dims(r.shape), r.type, r.note) for r in rows
        ]
        out.table(f"Plan for {result.out}", columns, shown)
    else:
        for row in rows:
            if row.action in ("drop", "metadata"):
                out.note(
                    f"{row.source}: {'dropped' if row.action == 'drop' else 'kept as '}"
                    f"{row.name or ''} ({row.note})"
                )
    types = ", ".join(f"{n} {t}" for t, n in result.plan.type_counts().items())
    if result.written:
        out.line(f"wrote {_files(result)}, {types}, {result.seconds:.1f} s")
    else:
        out.line(f"would write {_files(result)}, {types}")
    out.result({**as_json(result), **more})


def _files(result: Result) -> str:
    """Return the name and size of the file, or the names and sizes of the parts."""
    first, *others = result.files
    if not others:
        return f"{first}: {size(result.nbytes)}"
    most = size(max(result.files.values()))
    return (
        f"{first} to {others[-1].name}: {size(result.nbytes)} in {len(result.files)} files of at "
        f"most {most}"
    )


def as_json(result: Result) -> dict[str, Any]:
    """Return a conversion's result as the object that `--json` prints."""
    fields = ("action", "source", "name", "shape", "type", "note", "nbytes")
    return {
        "out": str(result.out),
        "written": result.written,
        "bytes": result.nbytes,
        "files": [{"path": str(path), "bytes": n} for path, n in result.files.items()],
        "seconds": result.seconds,
        "types": result.plan.type_counts(),
        "notes": result.notes,
        "plan": [{f: getattr(row, f) for f in fields} for row in result.plan.tensors],
    }


def _dims(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "1"
