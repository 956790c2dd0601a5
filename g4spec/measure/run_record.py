"""Records where a result comes from: files, versions, machine, command."""

from __future__ import annotations

import datetime
import hashlib
import os
import platform
import re
import shlex
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import g4spec
from g4spec import quant
from g4spec.backend import Backend
from g4spec.convert import provenance
from g4spec.gguf import GGUF
from g4spec.ops.reference import Ops


def describe(
    target: Path, draft: Path | str | None, backend: Backend, command: Sequence[str]
) -> dict[str, Any]:
    """Return everything needed to judge and repeat a measurement, as JSON types.

    Args:
        draft: a draft file, "ngram", or None.
        command: the command-line arguments; paths are reduced to their file names.
    """
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(without_folders(command)),
        "target": describe_file(target),
        "draft": describe_file(draft)
        if isinstance(draft, Path)
        else draft and {"kind": draft, "name": draft},
        "g4spec": g4spec.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": describe_machine(),
        "ops": type(backend.ops).__name__,
        "device": backend.title,
        "overridden_ops": overridden(backend.ops),
        "ops_without_kernel": sorted(backend.ops.without_kernel),
    }


TEXTS = ("-p", "--prompt", "--system", "--stop")
"""Options whose values are texts, in which a slash separates no folders."""


def without_folders(command: Sequence[str]) -> list[str]:
    """Remove the folders from paths in arguments: results are shared, and folders may identify the
    user, the machine or other work. Hub ids are kept."""
    shown = []
    for before, argument in zip(["", *command], command, strict=False):
        flag, value = "", argument
        if before in TEXTS:
            value = ""
        elif argument[:2] == "--":
            flag, equals, value = argument.partition("=")
            flag += equals
        elif attached := re.match(r"-\w+?(?=[/~.])|-\w", argument):  # -m/models/t.gguf
            flag = attached[0]
            value = argument[len(flag) :]
        path = Path(value)
        away = path.is_absolute() or value[:1] in ("~", ".") or path.exists()
        shown.append(flag + path.name if "/" in value and away else argument)
    return shown


def describe_file(path: Path) -> dict[str, Any]:
    """Return name, size, SHA-256, digest of the source of a conversion, architecture and quant
    types of a GGUF file. For a split model, size and SHA-256 are those of the concatenated
    parts."""
    digest = hashlib.sha256()
    with GGUF(path) as opened:
        for part in opened.parts:
            with part.path.open("rb") as stream:
                while block := stream.read(1 << 20):
                    digest.update(block)
        size = sum(part.size for part in opened.parts)
        types = Counter(quant.by_type(t.type).name for t in opened.tensors.values())
        kind, source = opened.kv.get("general.architecture"), opened.kv.get(provenance.DIGEST)
    return {
        "name": path.name,
        "bytes": size,
        "sha256": digest.hexdigest(),
        "source": source,
        "kind": kind,
        "types": dict(types.most_common()),
    }


def describe_machine() -> dict[str, Any]:
    """Return processor, threads and operating system, without host or user name."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "os": f"{platform.system()} {platform.release()}",
    }


def driver() -> str | None:
    """Return the version of NVIDIA's driver, or None."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [x.partition(":")[2].strip() for x in lines if x.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def commit() -> str | None:
    """Return the commit of the running source tree, with a "+" if it has changes; None for an
    installed package."""
    root = Path(g4spec.__file__).parent.parent
    if not (root / ".git").exists():
        return None
    try:
        head = _git(root, "rev-parse", "--short=12", "HEAD")
        dirty = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if dirty else "")


def _git(root: Path, *args: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *args], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def overridden(ops: object) -> list[str]:
    """Return the names of the ops that a backend overrides; [] for the reference."""
    kind = type(ops)
    return sorted(n for n in dir(Ops) if n[0] != "_" and getattr(kind, n) is not getattr(Ops, n))
