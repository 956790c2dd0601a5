"""Every kernel instance of the CUDA runtime compiles for every architecture, within its bounds; no
GPU is needed."""

from __future__ import annotations

import ast
import os
import re
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from g4spec import core
from g4spec.runtime.cuda.build import nvrtc, signature, units
from g4spec.runtime.cuda.cache import heads
from g4spec.runtime.cuda.step import attention, linear, packed_rows
from g4spec.runtime.cuda.weights import packing

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


def _launches() -> list[tuple[str, str, set[str], bool]]:
    """Place, kernel file, argument names, and whether more follow in a dict (`**`), of each launch
    that names its file."""
    found = []
    for path in sorted(nvrtc.CUDA.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Call)):
                continue
            target = node.func
            if ast.unparse(target.func) != "launch.kernel":
                continue
            if not isinstance(target.args[0], ast.Constant):
                continue
            names = {k.arg for k in node.keywords if k.arg} - {"shared", "pdl"}
            partial = any(k.arg is None for k in node.keywords)
            place = f"{path.name}:{node.lineno}"
            found.append((place, str(target.args[0].value), names, partial))
    return found


def test_launches_name_the_parameters_of_a_kernel() -> None:
    """Also those that no test on this machine runs."""
    launches = _launches()
    assert len(launches) > 30
    for place, file, names, partial in launches:
        kernels = [{p.name for p in ps} for ps in signature.signatures(file).values()]
        assert any(names <= k if partial else names == k for k in kernels), (place, names)


def _constants(file: str) -> dict[str, int]:
    """Constants at file level, of a header or kernel, that are plain numbers or sums of others."""
    path = nvrtc.kernel_files().get(file, nvrtc.CUDA / "include" / file)
    found: dict[str, int] = {}
    for line in re.findall(r"^constexpr int ([^;]*);", path.read_text(), re.MULTILINE):
        for name, text in re.findall(r"(\w+) = ([^,]*)", line):
            if set(re.findall(r"[A-Za-z_]\w*", text)) <= set(found):
                found[name] = eval(text, {}, found)
    return found


def test_constants_of_python_and_kernels_agree() -> None:
    same: dict[tuple[str, str], int] = {
        ("kv_storage.cuh", "PAGE"): core.PAGE,
        ("prefill_heads.cu", "PAGE"): core.PAGE,
        ("gemm_tile.cuh", "PACK_ROWS"): packing.GROUP,
        ("packed_rows.cuh", "ACT_BYTES"): packed_rows.BLOCK_BYTES,
        ("packed_rows.cuh", "BYTE_ROWS"): linear.UPPER_ROWS,
        ("packed_rows.cuh", "TILE_BYTES"): linear.TILE_BYTES,
        ("accept.cu", "MOST"): core.MAX_STEP_ROWS,
        ("moe_routing.cuh", "MAX_ROWS"): core.MAX_STEP_ROWS,
        ("gemm_consumer.cuh", "CONSUMERS"): linear.CONSUMERS,
        ("gemm_consumer.cuh", "THREADS"): linear.THREADS,
        ("heads.cu", "HEADS"): heads.HEADS,
        ("head_vector.cuh", "NORM_V"): heads.NORM_V,
        ("head_vector.cuh", "V_FROM_K"): heads.V_FROM_K,
    }
    wrong = {k: (v, _constants(k[0]).get(k[1])) for k, v in same.items()}
    assert not {k: pair for k, pair in wrong.items() if pair[0] != pair[1]}
    assert core.MAX_STEP_ROWS == packed_rows.GROUP_ROWS == attention.MAX_ROWS
