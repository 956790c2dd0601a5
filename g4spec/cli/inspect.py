"""`g4spec inspect`: show the content of a GGUF or a checkpoint folder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from g4spec.cli import _inputs, _types
from g4spec.cli.render import Json, Output, Quiet

if TYPE_CHECKING:
    from g4spec.convert import CheckpointFolder
    from g4spec.gguf import GGUF

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
    from g4spec.gguf import GGUF

    out = Output(json, quiet)
    path = _inputs.resolve(path, out)
    if path.is_file() and path.suffix != ".safetensors":
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
    _show(facts, out, tensors)
    out.result(facts)


def _gguf(file: GGUF) -> dict[str, Any]:
    from g4spec.models import find_kind, other_file

    entries = [
        {"name": t.name, "shape": t.shape, "type": t.format.name.upper(), "bytes": t.nbytes}
        for t in file.tensors.values()
    ]
    arch = str(file.get("general.architecture"))
    kind = find_kind(arch, file.tensors)
    title = kind.TITLE if kind else f"unknown here ({arch})"
    if (other := other_file(file)) is not None:
        title = re.sub(r"^an? ", "", other[0])
    return {
        "path": str(file.path),
        "kind": title,
        "container": f"GGUF version {file.version}, alignment {file.alignment}"
        + (f", {len(file.parts)} parts" if len(file.parts) > 1 else ""),
        "bytes": sum(part.size for part in file.parts),
        **_sums(entries),
        "metadata": {key: _abbreviated(file, key) for key in file},
        "tensors": entries,
    }


def _folder(folder: CheckpointFolder, title: str) -> dict[str, Any]:
    entries = [
        {"name": t.name, "shape": t.shape, "type": t.dtype, "bytes": t.nbytes}
        for t in folder.tensors.values()
    ]
    return {
        "path": str(folder.path),
        "kind": title,
        "container": f"safetensors, {len(folder.files)} file{'s' * (len(folder.files) > 1)}",
        "bytes": sum(p.stat().st_size for p in folder.files),
        **_sums(entries),
        "metadata": dict(folder.config),
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


def _show(facts: Mapping[str, Any], out: Output, tensors: bool) -> None:
    out.line(f"{facts['path']}: {facts['kind']}")
    listed = "" if tensors else " (--tensors lists them)"
    out.line(
        f"{facts['container']}, {_types.size(facts['bytes'])}, {facts['parameters']:,} "
        f"parameters, {len(facts['tensors'])} tensors{listed}"
    )
    rows = [
        (t, s["tensors"], s["parameters"], _types.size(s["bytes"]))
        for t, s in facts["types"].items()
    ]
    out.table("Types", ("type", "tensors", "parameters", "size"), rows)
    out.table("Metadata", ("key", "value"), [(k, _text(v)) for k, v in facts["metadata"].items()])
    if tensors:
        rows = [
            (t["name"], "x".join(map(str, t["shape"])), t["type"], _types.size(t["bytes"]))
            for t in facts["tensors"]
        ]
        out.table("Tensors", ("name", "shape", "type", "size"), rows)


def _text(value: Any) -> str:
    if isinstance(value, dict) and set(value) == {"type", "length", "first"}:
        return f"{value['type']}[{value['length']}] {str(value['first'])[1:-1]}, ..."
    text = str(value)
    return text if len(text) <= 100 else text[:97] + "..."
