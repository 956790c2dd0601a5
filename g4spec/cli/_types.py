"""`--type`, and how plans and sizes are shown: shared by convert, quantize and inspect."""

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
    """Names of types that can be written, and of mixes. Their files are read, not imported:
    `--help` must not wait for numpy."""
    formats = {f.stem for f in (QUANT / "formats").glob("*.py") if "\ndef encode(" in f.read_text()}
    return sorted(formats | {m.name for m in pkgutil.iter_modules([str(QUANT / "mixes")])})


TYPES = _types()
Type = Annotated[
    str, typer.Option("--type", help=f"Type of matrices: {', '.join(TYPES)}. Vectors stay F32.")
]
TensorTypes = Annotated[
    list[str] | None,
    typer.Option(
        "--tensor-type",
        metavar="PATTERN=TYPE",
        help="Type of the matrices in whose names this regular expression is found; may "
        "be repeated, the first that fits counts.",
    ),
]
SplitMaxSize = Annotated[
    str | None,
    typer.Option(
        "--split-max-size",
        metavar="N(M|G)",
        help="Write parts of at most so many megabytes or gigabytes (powers of ten), "
        "NAME-00001-of-0000N.gguf and on.",
    ),
]
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(n: float) -> str:
    """`n` bytes for people."""
    i = 0
    while n >= 1024 and i < len(UNITS) - 1:
        n, i = n / 1024, i + 1
    return f"{n:.0f} {UNITS[i]}" if i == 0 else f"{n:.1f} {UNITS[i]}"


def split_size(text: str | None) -> int | None:
    """Bytes of `--split-max-size`, in llama-gguf-split's spelling."""
    if text is None:
        return None
    found = re.fullmatch(r"([1-9][0-9]{0,8})([MG])", text)
    if not found:
        raise UsageError("--split-max-size", expected="a number and M or G, as 40G", found=text)
    return int(found[1]) * {"M": 10**6, "G": 10**9}[found[2]]


def show(result: Result, out: Output, **more: Any) -> None:
    """A plan (after a dry run) or what was written. `more`: further fields of the JSON answer."""
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
    verb = "wrote" if result.written else "would write"
    out.line(f"{verb} {result.out}: {size(result.nbytes)}, {types}, {result.seconds:.1f} s")
    out.result({**as_json(result), **more})


def as_json(result: Result) -> dict[str, Any]:
    fields = ("action", "source", "name", "shape", "type", "note", "nbytes")
    return {
        "out": str(result.out),
        "written": result.written,
        "bytes": result.nbytes,
        "seconds": result.seconds,
        "types": result.plan.type_counts(),
        "notes": result.notes,
        "plan": [{f: getattr(row, f) for f in fields} for row in result.plan.tensors],
    }


def _dims(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "1"
