"""Read safetensors files and folders: headers are checked, tensors are memory-mapped.

The safetensors library is the authority on what a valid file is; it checks every header after our
own checks, whose errors say more.
Source: safetensors format description; Hugging Face sharding by `model.safetensors.index.json`.
"""

from __future__ import annotations

import json
import mmap
import re
from collections import Counter
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from g4spec import quant
from g4spec.convert.tensors import StoredTensor
from g4spec.errors import InputError, Unsupported
from g4spec.gguf import regular_files

MAX_HEADER = 100 << 20
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
AGAIN = "download the index again"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
DTYPES = {
    "F64": ("f64", 8),
    "F32": ("f32", 4),
    "F16": ("f16", 2),
    "BF16": ("bf16", 2),
    "I64": ("i64", 8),
    "I32": ("i32", 4),
    "I16": ("i16", 2),
    "I8": ("i8", 1),
    "U64": (None, 8),
    "U32": (None, 4),
    "U16": (None, 2),
    "U8": (None, 1),
    "BOOL": (None, 1),
    "F8_E4M3": (None, 1),
    "F8_E5M2": (None, 1),
}
"""safetensors type -> (quant type that decodes it, bytes per value)."""


def load_json(path: Path, what: str = "a JSON object") -> dict[str, Any]:
    """Read a JSON object from a file of a checkpoint. Raises InputError if it is missing or
    malformed.

    Args:
        what: description of the file for the error.
    """
    try:
        raw = regular_files.read_regular(regular_files.check_link(path))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file", expected=what) from None
    except OSError as e:
        raise InputError(f"{path}: {e.strerror}") from e
    regular_files.refuse_lfs_pointer(path, raw)
    return parse_json(raw, str(path))


def parse_json(raw: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object. Raises InputError for malformed JSON and for duplicate keys."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        got = dict(pairs)
        if len(got) != len(pairs):
            twice = Counter(k for k, _ in pairs).most_common(1)[0][0]
            raise InputError(f"{where}: duplicate key {twice!r}")
        return got

    try:
        value = json.loads(raw, object_pairs_hook=unique)
        if _HALF.search(raw):  # a lone surrogate cannot be encoded as UTF-8
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as e:
        raise InputError(f"{where}: not valid JSON ({e})") from e
    if not isinstance(value, dict):
        raise InputError(where, expected="a JSON object", found=type(value).__name__)
    return value


def files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder's checkpoint. Raises InputError if they do not
    match its index."""
    found = sorted(p for p in folder.glob("*.safetensors") if not p.is_dir())
    for path in found:
        regular_files.check_link(path)
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    if len(indexes) > 1:
        raise InputError(f"{folder}: several indexes", found=[p.name for p in indexes])
    if not indexes:
        if len(found) > 1:
            raise InputError(
                f"{folder}: several safetensors files but no index",
                expected="model.safetensors.index.json",
                found=[p.name for p in found][:8],
                fix="download the index too, or name one file",
            )
        return found
    names = sorted(set(weight_map(indexes[0]).values()))
    missing = [n for n in names if not (folder / n).is_file()]
    extra = [p.name for p in found if p.name not in names]
    if missing:
        whole = f", or remove {indexes[0].name} if {extra[0]} has everything" if extra else ""
        raise InputError(
            f"{folder}: shards named in the index are missing",
            expected=f"{len(names)} shards",
            found=f"{missing[:8]} missing",
            fix=f"download them again{whole}",
        )
    if extra:
        raise InputError(
            f"{folder}: safetensors files that the index does not name",
            expected=names[:8],
            found=extra[:8],
            fix="remove one of the two",
        )
    return [folder / n for n in names]


def refuse_pickles(where: str, names: Iterable[str]) -> None:
    """Raise Unsupported if `names` contains pickled weights, which can run code when loaded."""
    pickled = sorted(n for n in names if n.endswith(PICKLES))
    if pickled:
        raise Unsupported(
            f"{where}: its weights are pickles, which can run any code when they are "
            "loaded, so they are never opened",
            found=", ".join(pickled[:4]),
            fix="download or make a safetensors version",
        )


def weight_map(index: Path) -> dict[str, str]:
    """Read tensor name -> file name from an index. Raises InputError for names outside the
    folder."""
    got = load_json(index).get("weight_map")
    if not isinstance(got, dict) or not got or not all(isinstance(v, str) for v in got.values()):
        raise InputError(f"{index}: weight_map", expected="tensor name -> file name", fix=AGAIN)
    for name in set(got.values()):
        if Path(name).name != name or name in (".", "..") or "\\" in name:
            raise InputError(
                f"{index}: shard {name!r} is outside the folder",
                expected="the name of a file beside the index",
                fix=AGAIN,
            )
    return got


def read_all(paths: Iterable[Path]) -> dict[str, StoredTensor]:
    """Read all tensors of these files. Raises InputError for repeated names and if the index
    disagrees."""
    out: dict[str, StoredTensor] = {}
    place: dict[str, str] = {}
    folder = None
    for path in paths:
        folder = path.parent
        for name, tensor in read(path).items():
            if name in out:
                raise InputError(f"{folder}: tensor {name} is in {place[name]} and in {path.name}")
            out[name], place[name] = tensor, path.name
    indexes = sorted(folder.glob("*.safetensors.index.json")) if folder else []
    if indexes:
        indexed = weight_map(indexes[0])
        wrong = [n for n in indexed.keys() | place.keys() if indexed.get(n) != place.get(n)]
        if wrong:
            n = min(wrong)
            raise InputError(
                f"{indexes[0]}: weight_map disagrees with the files about "
                f"{len(wrong)} tensors, first {n}",
                expected=indexed.get(n, "not in the index"),
                found=place.get(n, "not in the files"),
                fix="download them again, from one revision",
            )
    return out


def read(path: Path) -> dict[str, StoredTensor]:
    """Read the header of one file and map its tensors."""
    try:
        with regular_files.open_regular(path) as f:
            size = f.seek(0, 2)
            f.seek(0)
            begin = f.read(64)
            regular_files.refuse_lfs_pointer(path, begin)
            f.seek(8)
            length = int.from_bytes(begin[:8], "little")
            if size < 8 or length > min(size - 8, MAX_HEADER):
                raise InputError(
                    f"{path}: not a safetensors file, or truncated",
                    expected=f"a header within {size} bytes",
                    found=length,
                )
            header = parse_json(f.read(length), f"{path}: header")
            data = np.frombuffer(mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except OSError as e:
        raise InputError(f"{path}: {e.strerror}") from e
    header.pop("__metadata__", None)
    data = data[8 + length :]
    tensors = {n: _stored(n, entry, data, path, 8 + length) for n, entry in header.items()}
    _check_with_library(path)
    return tensors


def _check_with_library(path: Path) -> None:
    """Raise InputError unless the safetensors library, whose parser is audited, accepts the file.

    Our own checks come first: their errors name the tensor.
    """
    try:
        with safe_open(path, framework="np"):
            pass
    except (SafetensorError, OSError) as e:
        raise InputError(
            f"{path}: the safetensors library rejects this file",
            found=str(e),
            fix="download it again, or report the file to whoever published it",
        ) from e


def _stored(name: str, entry: Any, data: Any, path: Path, offset: int) -> StoredTensor:
    where = f"{path}: tensor {name}"
    try:
        dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*shape, start, end]
    except (TypeError, KeyError, ValueError) as e:
        raise InputError(f"{where}: its entry needs dtype, shape and data_offsets") from e
    fine = isinstance(dtype, str) and all(type(n) is int and n >= 0 for n in numbers)
    if not fine or not quant.is_valid_shape(shape):
        raise InputError(f"{where}: malformed entry", found=f"{entry!r:.120}")
    format_name, item = DTYPES.get(dtype, (None, None))
    if end > data.size or start > end:
        raise InputError(
            f"{where} reaches beyond the end of the file; it is truncated",
            expected=f"{data.size} bytes of data",
            found=end,
        )
    if item is not None and end - start != prod(shape) * item:
        raise InputError(
            f"{where}: size of {dtype} {shape}", expected=prod(shape) * item, found=end - start
        )
    form = quant.get(format_name) if format_name else None
    return StoredTensor(name, tuple(shape), dtype, form, data[start:end], (path, offset + start))
