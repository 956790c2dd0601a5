"""Reads what the installed torch was built for, without importing it."""

from __future__ import annotations

import mmap
import platform
import re
from importlib import metadata
from pathlib import Path


def torch_arches() -> tuple[str, ...]:
    """Return the compute capabilities that the installed torch has machine code for, as `8.6`.

    torch is not imported: that takes seconds and a CUDA context. The list is compiled into its
    Python library as one string, `sm_75 sm_80 ... compute_120`; `()` for builds without CUDA.
    """
    library = "torch_python.dll" if platform.system() == "Windows" else "libtorch_python.so"
    try:
        path = metadata.distribution("torch").locate_file(f"torch/lib/{library}")
        found = _arch_list(Path(str(path)))
    except (metadata.PackageNotFoundError, OSError):
        return ()
    return tuple(f"{a[:-1]}.{a[-1]}" for a in found)


_ARCHES = re.compile(rb"sm_(\d{2,3})[af]?(?: (?:sm|compute)_\d{2,3}[af]?)+")


def _arch_list(path: Path) -> list[str]:
    """Return the first list of architectures in a shared library (tens of MB)."""
    with path.open("rb") as file:
        if not file.seek(0, 2):
            return []
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            found = _ARCHES.search(data)
            return re.findall(r"sm_(\d{2,3})", found[0].decode()) if found else []
