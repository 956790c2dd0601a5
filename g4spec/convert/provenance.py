"""Origin of a file as `g4spec.*` keys, and the keys by which a draft recognizes its target."""

from __future__ import annotations

import hashlib
import platform
import re
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from g4spec import __version__
from g4spec.convert.plan import canonical_name
from g4spec.convert.sources import CheckpointFolder
from g4spec.convert.tensors import LazyTensor, StoredTensor
from g4spec.gguf import GGUF, KV, regular_files, string, u32
from g4spec.models import pairing as pairs

SOURCE = "g4spec.source"
REVISION = "g4spec.source_revision"
DIGEST = "g4spec.source_digest"
WEIGHTS = "g4spec.weights_digest"
T2D_SHA256 = "g4spec.dflash.t2d_sha256"
TARGET_LAYERS, TARGET_HIDDEN = pairs.TARGET_LAYERS, pairs.TARGET_HIDDEN
TARGET_TOKENIZER = "g4spec.target.tokenizer_sha256"
TARGET_WEIGHTS = "g4spec.target.weights_digest"
TARGET_SOURCE = "g4spec.target.source"
TARGET_REVISION = "g4spec.target.source_revision"
COMMAND = "g4spec.command"
VERSIONS = "g4spec.versions"

SAMPLES, SAMPLE_BYTES = 64, 4096
ROW_BYTES = 1 << 16
"""Maximum number of bytes read of one row for the digest of weights."""
SMALL = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
)
_SNAPSHOT = re.compile(r".*/models--([^/]+)--([^/]+)/snapshots/([0-9a-f]{40})(/.*)?")
_REVISION = re.compile(r"[0-9a-f]{40}")


def source_keys(source: CheckpointFolder | GGUF, command: str) -> KV:
    """Return the provenance keys of a conversion."""
    kv = {SOURCE: string(checkpoint_name(source.path))}
    if found := revision(source.path):
        kv[REVISION] = string(found)
    kv[DIGEST] = string(digest(source))
    kv[COMMAND] = string(_readable(command))
    kv[VERSIONS] = string(
        f"g4spec {__version__}, numpy {np.__version__}, Python {platform.python_version()}"
    )
    return kv


def checkpoint_name(path: Path) -> str:
    """Return the name of a checkpoint: its folder, or its repository in a Hugging Face cache."""
    snapshot = _snapshot(path)
    if snapshot is not None:
        return f"{snapshot[1]}/{snapshot[2]}"
    path = path.resolve()
    return _readable(path.stem if path.is_file() else path.name)


def _readable(name: str) -> str:
    """Replace what is not UTF-8 in the name of a file, as no string of a GGUF may contain it."""
    return name.encode(errors="surrogateescape").decode(errors="replace")


def revision(path: Path) -> str | None:
    """Return the commit of a checkpoint in a Hugging Face cache or in a folder named after it."""
    snapshot, folder = _snapshot(path), path.resolve().name
    if snapshot is not None:
        return snapshot[3]
    return folder if _REVISION.fullmatch(folder) else None


def _snapshot(path: Path) -> re.Match[str] | None:
    """Match organization, name and commit if the path is in a Hugging Face cache.

    Files there are links to blobs, so the path is not resolved."""
    return _SNAPSHOT.fullmatch(path.absolute().as_posix())


def digest(source: CheckpointFolder | GGUF) -> str:
    """Return a fingerprint of a source's content, cheap enough to compute at every start.

    It is a sha256 over all small files and, for every tensor file, its size, its header and
    64 evenly spaced samples of 4 KiB. Further training changes all samples.
    """
    sha = hashlib.sha256()
    if isinstance(source, GGUF):
        files = [(part.path, part.data_start) for part in source.parts]
    else:
        for small in SMALL:
            path = source.path / small
            if path.exists():
                sha.update(
                    small.encode()
                    + b"\0"
                    + regular_files.read_regular(regular_files.check_link(path))
                )
        files = [(p, 8 + int.from_bytes(_slice(p, 0, 8), "little")) for p in source.files]
    for path, head in files:
        size = path.stat().st_size
        sha.update(f"{path.name if len(files) > 1 else ''}\0{size}\0".encode())
        sha.update(_slice(path, 0, head))
        for i in range(SAMPLES):
            sha.update(_slice(path, head + (size - head) * i // SAMPLES, SAMPLE_BYTES))
    return "sampled-sha256:" + sha.hexdigest()


def weights_digest(
    kind: ModuleType, config: Any, tensors: Mapping[str, StoredTensor]
) -> str | None:
    """Return a fingerprint of a model's weights as published; None if there are no weights.

    It is a sha256 over GGUF name, shape, stored type and two rows of every tensor that the model
    uses (a vector is one row). Folder names, sharding, small files and dropped tensors (vision,
    audio) do not count. Files made from the checkpoint copy the digest, so a quantized target has
    the digest of its source.

    Equal digests are no proof: an edit of a few rows, such as those of new tokens, may miss the
    sampled rows. Training and merging change every row of a matrix, so another revision, a
    fine-tune or a quantized checkpoint has another digest. The same weights stored in another type
    have another digest too.
    """
    names = {canonical_name(name, kind): name for name in tensors}
    sha, seen = hashlib.sha256(), False
    for spec in sorted(kind.tensors(config), key=lambda s: str(s.name)):
        tensor = tensors.get(names.get(spec.source or "", ""))
        if tensor is None or not tensor.nbytes:
            continue
        sha.update(f"{spec.name}\0{tensor.shape}\0{tensor.dtype}\0".encode())
        rows = prod(tensor.shape[:-1])
        for i in sorted({rows // 3, 2 * rows // 3}):
            sha.update(_row(tensor, i, rows))
        seen = True
    return "rows-sha256:" + sha.hexdigest() if seen else None


def _row(tensor: StoredTensor, i: int, rows: int) -> bytes:
    """Return the first ROW_BYTES of row `i` of `rows`.

    It uses file reads where possible: touching a mapped page reads megabytes around it, which took
    16 s for 832 tensors.
    """
    if isinstance(tensor, LazyTensor):
        return tensor.rows(i, i + 1).reshape(-1)[:ROW_BYTES].tobytes()
    size = tensor.nbytes // rows
    return tensor.read(i * size, i * size + min(size, ROW_BYTES)).tobytes()


def target_source_keys(source: CheckpointFolder | GGUF, digest: str | None) -> KV:
    """Return the keys with which a draft records the checkpoint that its target was made from.

    Args:
        source: the target; of a GGUF its own provenance keys are copied, if it has them.
        digest: digest of the weights of a checkpoint.
    """
    if isinstance(source, GGUF):
        values = [source.get(key) for key in (SOURCE, REVISION, WEIGHTS)]
    else:
        values = [checkpoint_name(source.path), revision(source.path), digest]
    keys = (TARGET_SOURCE, TARGET_REVISION, TARGET_WEIGHTS)
    return {k: string(v) for k, v in zip(keys, values, strict=True) if isinstance(v, str)}


def _slice(path: Path, start: int, count: int) -> bytes:
    with open(path, "rb") as f:
        f.seek(start)
        return f.read(count)


def pairing_keys(tokenizer: KV, n_embd: int, n_layer: int) -> KV:
    """Return the keys by which a draft recognizes its target: layers, width, digest of the
    tokenizer. Quantizing the target does not change them."""
    lists = (tokenizer["tokenizer.ggml.tokens"].data, tokenizer["tokenizer.ggml.merges"].data)
    return {
        TARGET_LAYERS: u32(n_layer),
        TARGET_HIDDEN: u32(n_embd),
        TARGET_TOKENIZER: string(tokenizer_sha256(*lists)),
    }


def tokenizer_sha256(*lists: Iterable[str]) -> str:
    """Return the sha256 of tokens and merges: entries joined by byte 0, lists ended by byte 1."""
    sha = hashlib.sha256()
    for strings in lists:
        sha.update("\0".join(strings).encode() + b"\1")
    return sha.hexdigest()
