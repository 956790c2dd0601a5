"""Where a file came from, as `g4spec.*` keys, and the facts by which a pair is recognised."""

from __future__ import annotations

import hashlib
import platform
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from g4spec import __version__
from g4spec.convert.sources import Folder
from g4spec.gguf import GGUF, KV, string, u32

SOURCE = "g4spec.source"
REVISION = "g4spec.source_revision"
DIGEST = "g4spec.source_digest"
T2D_SHA256 = "g4spec.dflash.t2d_sha256"
TARGET_LAYERS = "g4spec.target.block_count"
TARGET_HIDDEN = "g4spec.target.embedding_length"
TARGET_TOKENIZER = "g4spec.target.tokenizer_sha256"
COMMAND = "g4spec.command"
VERSIONS = "g4spec.versions"

SAMPLES, SAMPLE_BYTES = 64, 4096
SMALL = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
         "chat_template.jinja")  # fmt: skip
_SNAPSHOT = re.compile(r".*/models--([^/]+)--([^/]+)/snapshots/([0-9a-f]{40})(/.*)?")
_REVISION = re.compile(r"[0-9a-f]{40}")


def keys(source: Folder | GGUF, command: str) -> KV:
    """Provenance of a conversion."""
    kv = {SOURCE: string(name(source.path))}
    snapshot, folder = _snapshot(source.path), source.path.resolve().name
    if snapshot is not None:
        kv[REVISION] = string(snapshot[3])
    elif _REVISION.fullmatch(folder):
        kv[REVISION] = string(folder)
    kv[DIGEST] = string(digest(source))
    kv[COMMAND] = string(command)
    kv[VERSIONS] = string(
        f"g4spec {__version__}, numpy {np.__version__}, Python {platform.python_version()}"
    )
    return kv


def name(path: Path) -> str:
    """What a checkpoint is called: its folder, or its repository in a Hugging Face cache."""
    snapshot = _snapshot(path)
    if snapshot is not None:
        return f"{snapshot[1]}/{snapshot[2]}"
    path = path.resolve()
    return path.stem if path.is_file() else path.name


def _snapshot(path: Path) -> re.Match[str] | None:
    """Organization, name and commit, if the path lies in a Hugging Face cache.

    Files there are links to blobs, so the path as given is what tells."""
    return _SNAPSHOT.fullmatch(path.absolute().as_posix())


def digest(source: Folder | GGUF) -> str:
    """Fingerprint of a source's content, cheap enough to compute at every start.

    sha256 over the small files in full and, of every tensor file, its size, its header and
    64 samples of 4 KiB at even distances. Weights that were trained further differ in all samples.
    """
    sha = hashlib.sha256()
    if isinstance(source, GGUF):
        files = [(source.path, source.data_start)]
    else:
        for small in SMALL:
            path = source.path / small
            if path.is_file():
                sha.update(small.encode() + b"\0" + path.read_bytes())
        files = [(p, 8 + int.from_bytes(_slice(p, 0, 8), "little")) for p in source.files]
    for path, head in files:
        size = path.stat().st_size
        sha.update(f"{path.name if len(files) > 1 else ''}\0{size}\0".encode())
        sha.update(_slice(path, 0, head))
        for i in range(SAMPLES):
            sha.update(_slice(path, head + (size - head) * i // SAMPLES, SAMPLE_BYTES))
    return "sampled-sha256:" + sha.hexdigest()


def _slice(path: Path, start: int, count: int) -> bytes:
    with open(path, "rb") as f:
        f.seek(start)
        return f.read(count)


def pairing(tokenizer: KV, n_embd: int, n_layer: int) -> KV:
    """What a draft remembers of its target, by which a pair is recognised. Quantizing the target
    does not change it."""
    lists = (tokenizer["tokenizer.ggml.tokens"].data, tokenizer["tokenizer.ggml.merges"].data)
    return {
        TARGET_LAYERS: u32(n_layer),
        TARGET_HIDDEN: u32(n_embd),
        TARGET_TOKENIZER: string(tokenizer_sha256(*lists)),
    }


def tokenizer_sha256(*lists: Iterable[str]) -> str:
    """Digest of tokens and merges: entries joined by 0 bytes, each list ended by a byte 1."""
    sha = hashlib.sha256()
    for strings in lists:
        sha.update("\0".join(strings).encode() + b"\1")
    return sha.hexdigest()
