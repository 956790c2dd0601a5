"""Every kernel instance of the CUDA runtime compiles for every architecture, within its bounds; no
GPU is needed."""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from g4spec.runtime.cuda.build import nvrtc, units

REGISTERED = units.registered()

SIBLINGS = {"sm_75": "sm_70", "sm_89": "sm_86", "sm_100": "sm_120", "sm_121": "sm_120"}
"""Architectures that compile the same code as another: of each unit the first and the last
instance, or all with G4SPEC_COMPILE=all (two thirds as much time again)."""


PROCESSES = 1 if "PYTEST_XDIST_WORKER" in os.environ else None
"""To compile in: this one where others keep the cores busy, else one a core."""


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept from one run to the next, beside the emulator's: a key holds all that a cubin, and what
    it takes, depends on. It is five minutes of one core when nothing changed."""
    folder = Path(tempfile.gettempdir()) / f"g4spec-kernels-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))


@pytest.mark.parametrize("arch", nvrtc.ARCHS)
@pytest.mark.parametrize("module", REGISTERED)
def test_compiles_within_its_bounds(module: str, arch: str) -> None:
    if arch == "sm_70" and nvrtc.version() >= (13, 0):
        pytest.skip("NVRTC 13 has no sm_70; 12.9 (nvidia-cuda-nvrtc-cu12) does")
    declared = [unit for unit in REGISTERED[module] if arch in unit.archs]
    if os.environ.get("G4SPEC_COMPILE") == "all":
        declared = [replace(u, names=(*u.names, *u.more)) for u in declared]
    elif arch in SIBLINGS:
        ends = [tuple(dict.fromkeys((*unit.names[:1], *unit.names[-1:]))) for unit in declared]
        declared = [replace(u, names=names) for u, names in zip(declared, ends, strict=True)]
    jobs = units.jobs_for(declared, arch)
    bounds = [unit for unit in declared for _ in unit.names]
    compiled = units.compile_all(jobs, PROCESSES)
    problems = []
    for job, unit, cubin in zip(jobs, bounds, compiled, strict=True):
        took = cubin.resources
        shared = took.shared + unit.shared_on(arch)
        problems += [
            f"{job.file} {job.name}: {what}"
            for what, wrong in (
                (f"{took.spill} bytes spilled", took.spill > unit.max_spill),
                (f"{took.stack} bytes of local memory", took.stack > unit.max_spill),
                (f"{took.registers} registers", took.registers > unit.max_registers),
                (f"{took.shared} bytes of static shared memory", took.shared > nvrtc.STATIC_SHARED),
                (f"{shared} bytes of shared memory", shared > nvrtc.SHARED_LIMIT[arch]),
                ("products of warp groups that wait for each other", "wgmma" in cubin.log),
            )
            if wrong
        ]
    assert not problems, "\n".join(problems)


def test_every_kernel_is_registered() -> None:
    """Each `__global__` of each file has at least one instance that the test above compiles."""
    instances = {
        (unit.file, re.split(r"[<(]", name)[0].strip())
        for found in REGISTERED.values()
        for unit in found
        for name in unit.names
    }
    kernels = {
        (path.name, name)
        for path in nvrtc.kernel_files().values()
        for name in re.findall(
            r"__global__(?:\s+(?:void|__launch_bounds__\([^()]*(?:\([^()]*\))?[^()]*\)))*\s+(\w+)\s*\(",
            path.read_text(),
        )
    }
    assert len(kernels) >= len(list(nvrtc.kernel_files().values())) > 0
    assert kernels - instances == set()


def test_units_name_architectures_that_exist() -> None:
    for module, found in REGISTERED.items():
        for unit in found:
            assert (unit.names or unit.more) and set(unit.archs) <= set(nvrtc.ARCHS), (
                module,
                unit.file,
            )
            names = (*unit.names, *unit.more)
            assert unit.max_registers <= 255 and len(set(names)) == len(names)
