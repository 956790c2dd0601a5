"""Tables of `inspect`: types, metadata, tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from g4spec.cli import _types
from g4spec.cli.render import Output


def show(facts: Mapping[str, Any], out: Output, tensors: bool) -> None:
    """Show what `inspect` found. `tensors`: list every tensor."""
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
