"""`g4spec inspect`: show the content of a GGUF or a checkpoint folder."""

from __future__ import annotations

import re
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from g4spec.cli import _inputs, _inspect_tables
from g4spec.cli.render import Json, Output, Quiet

if TYPE_CHECKING:
    from g4spec.convert import CheckpointFolder
    from g4spec.gguf import GGUF
    from g4spec.gguf.imatrix import Imatrix

SHOWN = 6
"""Number of entries shown of a long array."""


def command(
    path: Annotated[Path, typer.Argument(help="GGUF file, checkpoint folder or hub id.")],
    tensors: Annotated[bool, typer.Option(help="List every tensor.")] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show a model's kind, size, types, metadata and tensors."""
    from g4spec import convert
    from g4spec.gguf import GGUF, imatrix

    out = Output(json, quiet)
    path = _inputs.resolve(path, out)
    if path.is_file() and imatrix.is_older(path):
        facts = _older_imatrix(imatrix.read(path), path)
    elif path.is_file() and path.suffix != ".safetensors":
        with GGUF(path) as file:  # any architecture can be inspected
            facts = _gguf(file)
    else:
        found = convert.detect(path)
        for note in found.notes:
            out.note(note)
        if isinstance(found.source, GGUF):
            with found.source as file:
                facts = _gguf(file)
        else:
            facts = _folder(found.source, found.kind.TITLE)
    _inspect_tables.show(facts, out, tensors)
    out.result(facts)


def _gguf(file: GGUF) -> dict[str, Any]:
    from g4spec.models import find_kind, other_file

    arch = str(file.get("general.architecture"))
    kind = find_kind(arch, file.tensors)
    title = kind.TITLE if kind else f"unknown here ({arch})"
    if (other := other_file(file)) is not None:
        title = re.sub(r"^an? ", "", other[0])
    parts = f", {len(file.parts)} parts" if len(file.parts) > 1 else ""
    return _facts(
        file.path,
        title,
        f"GGUF version {file.version}, alignment {file.alignment}{parts}",
        sum(part.size for part in file.parts),
        {key: _abbreviated(file, key) for key in file},
        [(t.name, t.shape, t.format.name.upper(), t.nbytes) for t in file.tensors.values()],
    )


def _older_imatrix(found: Imatrix, path: Path) -> dict[str, Any]:
    """Describe an importance matrix of the older format as one of the newer, without counts."""
    from g4spec.gguf.imatrix import CHUNKS, DATASETS, SUMS

    return _facts(
        path,
        "importance matrix",
        "older format of llama-imatrix",
        path.stat().st_size,
        {CHUNKS: found.chunks, DATASETS: found.datasets},
        [(n + SUMS, e.sums.shape, "F32", e.sums.nbytes) for n, e in found.entries.items()],
    )


def _folder(folder: CheckpointFolder, title: str) -> dict[str, Any]:
    return _facts(
        folder.path,
        title,
        f"safetensors, {len(folder.files)} file{'s' * (len(folder.files) > 1)}",
        sum(p.stat().st_size for p in folder.files),
        dict(folder.config),
        [(t.name, t.shape, t.dtype, t.nbytes) for t in folder.tensors.values()],
    )


def _facts(
    path: Path,
    kind: str,
    container: str,
    nbytes: int,
    metadata: dict[str, Any],
    tensors: list[tuple[str, tuple[int, ...], str, int]],
) -> dict[str, Any]:
    """Return what is shown. `tensors`: name, shape, type and bytes of each."""
    keys = ("name", "shape", "type", "bytes")
    entries = [dict(zip(keys, t, strict=True)) for t in tensors]
    return {
        "path": str(path),
        "kind": kind,
        "container": container,
        "bytes": nbytes,
        **_sums(entries),
        "metadata": metadata,
        "tensors": entries,
    }


def _sums(entries: list[dict[str, Any]]) -> dict[str, Any]:
    types: dict[str, dict[str, int]] = {}
    for e in entries:
        sums = types.setdefault(e["type"], dict.fromkeys(("tensors", "parameters", "bytes"), 0))
        for key, n in zip(sums, (1, prod(e["shape"]), e["bytes"]), strict=True):
            sums[key] += n
    return {"parameters": sum(t["parameters"] for t in types.values()), "types": types}


def _abbreviated(file: GGUF, key: str) -> Any:
    """Return a value; for a long array its type, length and first entries."""
    n = file.length(key)
    if n <= 64:
        return file[key]
    return {"type": file.value_type(key).name, "length": n, "first": file.first_entries(key, SHOWN)}
