"""Kernel instances of the CUDA runtime compile for every architecture within their register and
spill bounds: a sample, or all with G4SPEC_COMPILE=all. No GPU is needed."""

from __future__ import annotations

import ast
import multiprocessing
import os
import re
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from g4spec.runtime.cuda.build import constants, disk_cache, nvrtc, signature, units

REGISTERED = units.registered()

SAMPLED = 48
"""One of so many pairs of an instance and an architecture is compiled without G4SPEC_COMPILE."""

GROUP = 16
"""Instances that are compiled as one program, which parses the headers once."""


@dataclass(frozen=True)
class Group:
    """Instances of one kernel file that are compiled as one program for an architecture."""

    file: str
    names: tuple[str, ...]
    arch: str


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a compilation cache that is kept between runs, next to the emulator's. Its keys contain
    everything that a cubin and its resources depend on."""
    folder = Path(tempfile.gettempdir()) / f"g4spec-kernels-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))


@pytest.fixture(scope="module")
def in_parallel() -> Iterator[Callable[..., Iterable[Any]]]:
    """Return a function like `map`: `map` itself if other tests keep the cores busy, else one with
    a process per core."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        yield map
        return
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("fork")) as pool:
        yield pool.map


def _groups(declared: list[units.Unit], arch: str) -> list[Group]:
    """Return the instances of each file in groups of at most `GROUP`."""
    names: dict[str, list[str]] = defaultdict(list)
    for job in units.jobs_for(declared, arch):
        names[job.file].append(job.name)
    return [
        Group(file, tuple(found[i : i + GROUP]), arch)
        for file, found in names.items()
        for i in range(0, len(found), GROUP)
    ]


def _compiled(group: Group) -> dict[units.Job, nvrtc.Cubin]:
    """Return the cubins of a group, from the cache if all are there. The cache has only the first
    bytes of their code, by which it knows the kind: all instances have the same code."""
    keys = [nvrtc.key(group.file, name, group.arch) for name in group.names]
    cubins = [cubin for key in keys if (cubin := disk_cache.load(key, group.arch))]
    if len(cubins) < len(keys):
        found = nvrtc.compile_together(nvrtc.closure(group.file), group.names, group.arch)
        cubins = [replace(cubin, code=cubin.code[:4]) for cubin in found]
        for key, cubin in zip(keys, cubins, strict=True):
            disk_cache.store(key, cubin)
    jobs = [units.Job(group.file, name, group.arch) for name in group.names]
    return dict(zip(jobs, cubins, strict=True))


def _instances(unit: units.Unit, arch: str) -> tuple[str, ...]:
    """Return the instances to compile: all with G4SPEC_COMPILE=all, with another value those with
    this text in their name, without it a sample that depends on `arch`."""
    if wanted := os.environ.get("G4SPEC_COMPILE"):
        return tuple(n for n in (*unit.names, *unit.more) if wanted == "all" or wanted in n)
    keys = ((name, f"{unit.file} {name} {arch}".encode()) for name in unit.names)
    return tuple(name for name, key in keys if zlib.crc32(key) % SAMPLED == 0)


@pytest.mark.parametrize("arch", nvrtc.ARCHS)
@pytest.mark.parametrize("module", REGISTERED)
def test_compiles_within_its_bounds(
    module: str, arch: str, in_parallel: Callable[..., Iterable[Any]]
) -> None:
    if arch == "sm_70" and nvrtc.version() >= (13, 0):
        pytest.skip("NVRTC 13 has no sm_70; 12.9 (nvidia-cuda-nvrtc-cu12) does")
    declared = [replace(u, names=_instances(u, arch)) for u in _of(REGISTERED[module], arch)]
    jobs = units.jobs_for(declared, arch)
    bounds = [unit for unit in declared for _ in unit.names]
    compiled: dict[units.Job, nvrtc.Cubin] = {}
    for cubins in in_parallel(_compiled, _groups(declared, arch)):
        compiled |= cubins
    problems = []
    for job, unit in zip(jobs, bounds, strict=True):
        took = compiled[job].resources
        shared = took.shared + unit.shared_on(arch)
        problems += [
            f"{job.file} {job.name}: {what}"
            for what, wrong in (
                (f"{took.spill} bytes spilled", took.spill > unit.max_spill),
                (f"{took.stack} bytes of local memory", took.stack > unit.max_spill),
                (f"{took.registers} registers", took.registers > unit.max_registers),
                (f"{took.shared} bytes of static shared memory", took.shared > nvrtc.STATIC_SHARED),
                (f"{shared} bytes of shared memory", shared > nvrtc.SHARED_LIMIT[arch]),
                ("products of warp groups that wait for each other", "wgmma" in compiled[job].log),
            )
            if wrong
        ]
    assert not problems, "\n".join(problems)


def _of(found: list[units.Unit], arch: str) -> list[units.Unit]:
    return [unit for unit in found if arch in unit.archs]


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
    """Yield place, kernel file, argument names, and whether further arguments follow in a dict
    (`**`), of each launch that names its file."""
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
    """Includes launches that no test on this machine runs."""
    launches = _launches()
    assert len(launches) > 30
    for place, file, names, partial in launches:
        kernels = [{p.name for p in ps} for ps in signature.signatures(file).values()]
        assert any(names <= k if partial else names == k for k in kernels), (place, names)


def test_constants_are_defined_once() -> None:
    """No kernel redefines a name of the generated header. Each name is used in Python and CUDA, or
    is part of another constant."""
    names = set(re.findall(r"^(?:struct |  )(\w+)", constants.header(), re.MULTILINE))
    kernels = [
        *nvrtc.kernel_files().values(),
        *(path for folder in nvrtc.INCLUDES for path in folder.glob("*.cuh")),
    ]
    sources = "\n".join(path.read_text() for path in kernels)
    python = "\n".join(path.read_text() for path in nvrtc.CUDA.rglob("*.py"))
    defined = re.findall(
        r"^(?:constexpr \w+|#define|enum(?: class)?|struct) +([A-Z]\w*)", sources, re.MULTILINE
    )
    assert names & set(defined) == set()
    table = Path(constants.__file__).read_text()
    for name in names:
        found = [len(re.findall(rf"\b{name}\b", text)) for text in (sources, python, table)]
        in_kernels, in_python, in_table = found[0], found[1] - found[2], found[2]
        assert (in_kernels and in_python) or in_table > 1, name


def test_the_header_is_part_of_the_cache_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel compiled with other constants has another key."""

    def key() -> str:
        for read in (nvrtc.closure, nvrtc.sources_digest):
            read.cache_clear()  # as in another process
        return nvrtc.key("accept.cu", "accept", "sm_80")

    before = key()
    with monkeypatch.context() as patch:
        patch.setattr(constants, "header", lambda: "// other constants")
        assert key() != before
    assert key() == before
