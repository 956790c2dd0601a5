"""Names what a file is that is no GGUF, for errors: files that hold or name one, and older formats.

Sources: the signatures of zip, gzip, zstd and xz; ggml's older magic numbers; ollama
`manifest/manifest.go` (media types) and its folder of blobs.
"""

from __future__ import annotations

import re
from pathlib import Path

BEGIN = 1 << 16
"""Bytes of a file that are enough to tell."""
_ZIP = "a llamafile or zip file may hold a GGUF: extract it, for instance with `unzip`"
_OLD = "a format before GGUF: download or convert the model again"
_SIGNATURES = {
    b"PK\x03\x04": _ZIP,
    b"MZqFpD=": _ZIP,
    b"\x7fELF": _ZIP,
    b"\x1f\x8b": "decompress it",
    b"\x28\xb5\x2f\xfd": "decompress it",
    b"\xfd7zXZ": "decompress it",
    b"lmgg": _OLD,
    b"fmgg": _OLD,
    b"tjgg": _OLD,
    b"FROM ": "a Modelfile of Ollama: give the file that its FROM names",
}
_LAYER = re.compile(
    rb'"mediaType":\s*"application/vnd\.ollama\.image\.model",\s*"digest":\s*"sha256:([0-9a-f]{64})"'
)
_OLDER_IMATRIX = re.compile(rb".{8}(blk\.\d+\.[a-z_]+|output|token_embd)\.weight", re.DOTALL)
"""Count of matrices, length of the first one's name, and the name."""


def is_older_imatrix(begin: bytes) -> bool:
    """True for the beginning of an importance matrix by an older llama-imatrix."""
    return _OLDER_IMATRIX.match(begin) is not None


def fix(path: Path, begin: bytes) -> str | None:
    """Return a fix for a file with this beginning; None if it is nothing known."""
    for signature, known in _SIGNATURES.items():
        if begin.startswith(signature):
            return known
    if layer := _LAYER.search(begin):
        blob = f"sha256-{layer[1].decode()}"
        stores = [p.parent for p in path.absolute().parents if p.name == "manifests"]
        where = stores[0] / "blobs" / blob if stores else f"models/blobs/{blob}"
        return f"a manifest of Ollama: give the blob of its model, {where}"
    if is_older_imatrix(begin):
        return "an importance matrix of an older llama.cpp, which is for quantizing: name a model"
    if begin[8:10] == b'{"':
        return "a safetensors file: give the folder of its checkpoint"
    return None
