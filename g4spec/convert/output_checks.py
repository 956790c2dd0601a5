"""Checks of the files that `convert` and `quantize` read and write, for arguments in the wrong
order or place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from g4spec import gguf, quant
from g4spec.convert.output import Output
from g4spec.convert.plan import PlannedTensor
from g4spec.errors import UsageError
from g4spec.gguf import GGUF, parts
from g4spec.quant import policy


def refuse_type(out: Path) -> None:
    """Raise UsageError if the output has the name of a quant type, as in llama-quantize."""
    name = str(out).lower()
    if name in policy.names() or name in quant.writable_names():
        raise UsageError(
            f"{out} is a quant type: expected the file to write", fix=f"use `type` {name} for it"
        )


def refuse_copy(file: GGUF, out: Path, rows: Sequence[PlannedTensor]) -> None:
    """Raise UsageError if `out` exists and no type changes: it is probably the source, and would
    be replaced by a copy of its quantized file."""
    types = {name: info.format.name.upper() for name, info in file.tensors.items()}
    if out.exists() and all(r.type == types[r.name or ""] for r in rows):
        raise UsageError(
            f"{file.path} has these types already: {out} exists, and would be replaced by a copy",
            fix="the source comes first, then the file to write; to copy, delete that file first",
        )


def refuse_overwrite(output: Output, inputs: Sequence[Path]) -> None:
    """Raise UsageError if the output is an input, which would be destroyed while it is read, or an
    existing file that is no GGUF, such as a checkpoint's config.json."""
    out = output.path
    for path in inputs:
        whole = parts.unsplit_path(path) if output.max_size else None
        if whole and _without_suffix(whole) == _without_suffix(out):
            raise UsageError(
                f"parts of the output may overwrite the input {path.name}",
                fix="choose another name",
            )
        if out.exists() and path.exists() and out.samefile(path):
            raise UsageError(f"the output is one of the inputs: {out}", fix="choose another name")
    if out.is_file() and out.stat().st_size and not gguf.is_gguf(out):
        raise UsageError(
            f"{out} exists and is not a GGUF file", fix="choose another name, or remove it"
        )


def _without_suffix(path: Path) -> Path:
    """Return the path in its real folder without `.gguf`, which parts of an output get anyway."""
    return path.parent.resolve() / path.name.removesuffix(".gguf")
