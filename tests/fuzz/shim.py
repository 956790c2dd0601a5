"""Loads faults.c into a program by restarting it with LD_PRELOAD."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SHIM = "G4SPEC_FAULTS"


def restart_with_shim() -> Path | None:
    """Restart this module with faults.c loaded. Return the library, or None without a C
    compiler."""
    if SHIM in os.environ:
        return Path(os.environ[SHIM])
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    folder = tempfile.mkdtemp()
    library = Path(folder) / "faults.so"
    source = Path(__file__).with_name("faults.c")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-w", "-o", str(library), str(source), "-ldl"],
        check=True,
    )
    try:
        env = {**os.environ, "LD_PRELOAD": str(library), SHIM: str(library)}
        done = subprocess.run(
            [sys.executable, "-m", "tests.fuzz.faults", *sys.argv[1:]], check=False, env=env
        )
    finally:
        shutil.rmtree(folder)
    sys.exit(done.returncode)
