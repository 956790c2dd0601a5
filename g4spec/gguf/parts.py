"""Split models: several parts, `NAME-00001-of-00003.gguf` and so on, opened as one model.

All metadata are in the first part. Each part has its own header with its index and the count.
Source: llama.cpp `tools/gguf-split`, `src/llama-model-loader.cpp`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from g4spec.errors import InputError

NO, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"
KEYS = (NO, COUNT, TENSORS)
MAX_PARTS = 0xFFFF
FILES = "*.[gG][gG][uU][fF]"
"""Pattern of the GGUF files in a folder; Windows programs write the suffix in capitals, too."""
_NAME = re.compile(r"(.*)-(\d{5})(-of-)(\d{5})(\.gguf)", re.DOTALL | re.IGNORECASE)


def has_suffix(name: str) -> bool:
    """Return whether `name` ends with `.gguf`, in small or capital letters."""
    return name.lower().endswith(".gguf")


def folder_hint(folder: Path) -> str | None:
    """Return a fix for an error about a folder given instead of a GGUF file, or without a model;
    None if neither the folder nor one in it, such as the snapshots of a cache, has a model."""
    for pattern in (FILES, f"*/{FILES}", f"snapshots/*/{FILES}"):
        if found := sorted(folder.glob(pattern)):
            return f"name {'one of the files' if found[1:] else 'the file'} in it: {found[0]}"
        if (folder / "config.json").exists():
            return None
    for pattern in ("*/config.json", "snapshots/*/config.json"):
        if found := sorted(folder.glob(pattern)):
            return f"name a folder in it: {found[0].parent}"
    return None


def part_name(stem: str, no: int, count: int) -> str:
    """Return the file name of part `no` (0 is the first) of `count`."""
    return f"{stem}-{no + 1:05d}-of-{count:05d}.gguf"


def _other_part(found: re.Match[str], no: int) -> str:
    """Return the name of part `no` (0 is the first) beside the part that `_NAME` has matched."""
    return f"{found[1]}-{no + 1:05d}{found[3]}{found[4]}{found[5]}"


def unsplit_path(path: Path) -> Path | None:
    """Return the path `NAME.gguf` of the split model that `path` is a part of, judged by its name;
    None if it is not a part."""
    found = _NAME.fullmatch(path.name)
    return path.with_name(f"{found[1]}.gguf") if found else None


def model_name(name: str) -> str:
    """Return a name that all parts of a split model have in common; of another file its own."""
    found = _NAME.fullmatch(name)
    return f"{found[1]}{found[3]}{found[4]}{found[5]}" if found else name


def siblings(path: Path) -> list[Path]:
    """Return the other existing parts of the split model of `path`, judged by its name."""
    found = _NAME.fullmatch(path.name)
    names = [_other_part(found, no) for no in range(int(found[4]))] if found else []
    others = [path.with_name(n) for n in names if n != path.name]
    return [p for p in others if p.exists()]


def first_parts(paths: list[Path]) -> list[Path]:
    """Return `paths` without later parts of split models whose first part is in `paths`."""
    present = set(paths)
    out = []
    for path in paths:
        found = _NAME.fullmatch(path.name)
        if not found or path.with_name(_other_part(found, 0)) not in present - {path}:
            out.append(path)
    return out


def part_paths(path: Path, keys: Mapping[str, Any]) -> list[Path]:
    """Return all parts of the split model whose first part is `path`, with metadata `keys`.

    Raises InputError if `path` is not the first part, has an unexpected name, or a part is missing.
    """
    count, no = (_number(path, keys, key) for key in (COUNT, NO))
    if not 1 <= count <= MAX_PARTS:
        raise InputError(f"{path}: {COUNT}", expected=f"1 to {MAX_PARTS}", found=count)
    found = _NAME.fullmatch(path.name)
    if not found or (int(found[2]), int(found[4])) != (no + 1, count):
        raise InputError(
            f"{path}: the name of part {no + 1} of {count} of a split model",
            expected=part_name("NAME", no, count),
            found=path.name,
            fix="rename all parts like this, as llama.cpp asks, too, or download them again",
        )
    out = [path.with_name(_other_part(found, i)) for i in range(count)]
    missing = [p.name for p in out if not p.exists()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputError(
            f"{path}: part {missing[0]}{more} of this split model is missing",
            expected=f"{count} parts in one folder",
            found=count - len(missing),
            fix="download all parts",
        )
    if no:
        raise InputError(
            f"{path}: part {no + 1} of {count} of a split model",
            fix=f"pass the first part, {out[0]}",
        )
    return out


def join(first: Any) -> None:
    """Open the other parts of a split model; their tensors become tensors of `first`."""
    if COUNT not in first or first[COUNT] in (0, 1):
        return
    for no, path in enumerate(part_paths(first.path, first)):
        if not no:
            continue
        part = type(first)(path, join_parts=False)
        first.parts.append(part)
        for key, expected in ((NO, no), (COUNT, first[COUNT])):
            if _number(path, part, key) != expected:
                raise InputError(
                    f"{path}: {key}",
                    expected=expected,
                    found=part[key],
                    fix="download the part again",
                )
        for tensor, info in part.tensors.items():
            if tensor in first.tensors:
                raise InputError(f"{path}: tensor {tensor!r} is in an earlier part too")
            first.tensors[tensor] = replace(info, part=no)
    expected = _number(first.path, first, TENSORS)
    if len(first.tensors) != expected:
        raise InputError(
            f"{first.path}: tensors of all parts",
            expected=expected,
            found=len(first.tensors),
            fix="download all parts again",
        )


def _number(path: Path, keys: Mapping[str, Any], key: str) -> int:
    value = keys.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{path}: {key} of a split model", expected="a number", found=value)
    return value
