"""Kernels are compiled without a GPU, cached on disk, and recompiled if their source or options
change."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from g4spec.errors import EnvironmentProblem, KernelCompileError, Unsupported, UsageError
from g4spec.runtime.cuda.build import constants, nvrtc, units
from g4spec.runtime.cuda.build import disk_cache as cache
from g4spec.runtime.cuda.build.units import Job

SOURCE = """
#include "scale.cuh"
#include "ptx.cuh"
template <int N> __global__ void scale(float* x) {
  __shared__ float s[N];
  s[threadIdx.x % N] = factor(x[threadIdx.x]);
  __syncthreads();
  x[threadIdx.x] = s[(threadIdx.x + 1) % N];
}
"""


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kernel file with its own header, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "include"
    folder.mkdir()
    (folder / "inner.cuh").write_text("#define FACTOR 2.0f\n")
    (folder / "scale.cuh").write_text(
        '#pragma once\n#include "inner.cuh"\n'
        "__device__ float factor(float x) { return x * FACTOR; }\n"
    )
    monkeypatch.setattr(nvrtc, "INCLUDES", (*nvrtc.INCLUDES, folder))
    file = tmp_path / "scale.cu"
    file.write_text(SOURCE)
    return file


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the names of everything compiled in this process from now on."""
    done: list[str] = []
    real = nvrtc.compile

    def compile(sources: dict[str, str], name: str, arch: str) -> nvrtc.Cubin:
        done.append(name)
        return real(sources, name, arch)

    monkeypatch.setattr(nvrtc, "compile", compile)
    return done


def entry() -> Path:
    (path,) = cache.folder().glob("*/*")
    return path


def test_cubin_of_one_architecture(kernel: Path) -> None:
    cubin = nvrtc.compile(nvrtc.closure(str(kernel)), "scale<96>", "sm_80")
    assert cubin.code[:4] == b"\x7fELF"
    assert cubin.symbol == "_Z5scaleILi96EEvPf" and cubin.symbol.encode() in cubin.code
    assert cubin.resources.shared == 4 * 96 and cubin.resources.spill == 0
    assert 0 < cubin.resources.registers <= 32
    assert "sm_80" in cubin.log


def test_instances_compiled_together_are_those_compiled_alone(kernel: Path) -> None:
    sources, names = nvrtc.closure(str(kernel)), ["scale<96>", "scale<8>"]
    together = nvrtc.compile_together(sources, names, "sm_80")
    alone = [nvrtc.compile(sources, name, "sm_80") for name in names]
    assert [(c.symbol, c.resources) for c in together] == [(c.symbol, c.resources) for c in alone]
    assert all(c.symbol in together[0].log and c.symbol.encode() in c.code for c in together)


def test_ptx_for_newer_gpus(kernel: Path, compiled: list[str]) -> None:
    """The driver of a newer GPU compiles this PTX to machine code; it is cached on disk, too."""
    job = units.Job(str(kernel), "scale<96>", nvrtc.virtual("sm_86"))
    (ptx,) = units.compile_all([job])
    assert ptx.code.startswith(b"//") and b".target sm_86" in ptx.code
    assert ptx.symbol.encode() in ptx.code
    assert units.compile_all([job]) == [ptx] and len(compiled) == 1


def test_a_gpu_runs_the_kernels_of_an_older_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert nvrtc.pretended("sm_90a") == "sm_90a"
    for asked in ("sm_80", "sm_86", "sm_89"):
        monkeypatch.setenv(nvrtc.PRETEND, asked)
        assert nvrtc.pretended("sm_90a") == asked
    for asked, on in (("sm_120", "sm_90a"), ("sm_90a", "sm_100"), ("sm_88", "sm_90a")):
        monkeypatch.setenv(nvrtc.PRETEND, asked)
        with pytest.raises(UsageError, match=r"G4SPEC_CUDA_ARCH.*sm_86"):
            nvrtc.pretended(on)


def test_includes_are_followed(kernel: Path) -> None:
    names = set(nvrtc.closure(str(kernel)))
    expected = {str(kernel), "scale.cuh", "inner.cuh", "ptx.cuh", constants.HEADER}
    assert names == expected


def test_second_time_from_disk(kernel: Path, compiled: list[str]) -> None:
    job = Job(str(kernel), "scale<8>", "sm_80")
    first = units.cached(job)
    assert units.cached(job) == first and compiled == ["scale<8>"]
    assert units.compile_all([job]) == [first] and compiled == ["scale<8>"]
    units.cached(Job(str(kernel), "scale<8>", "sm_86"))
    units.cached(Job(str(kernel), "scale<4>", "sm_80"))
    assert compiled == ["scale<8>", "scale<8>", "scale<4>"]


@pytest.mark.parametrize("name", ["scale.cu", "include/scale.cuh", "include/inner.cuh"])
def test_a_change_in_any_file_compiles_again(kernel: Path, compiled: list[str], name: str) -> None:
    job = Job(str(kernel), "scale<8>", "sm_80")
    units.cached(job)
    path = kernel.parent / name
    path.write_text(path.read_text() + "// changed\n")
    for read in (nvrtc.closure, nvrtc.sources_digest):
        read.cache_clear()  # as in another process
    units.cached(job)
    assert len(compiled) == 2


def test_options_and_compiler_are_in_the_key(kernel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {nvrtc.key(str(kernel), "scale<8>", "sm_80")}
    monkeypatch.setenv("G4SPEC_LINEINFO", "1")
    keys.add(nvrtc.key(str(kernel), "scale<8>", "sm_80"))
    monkeypatch.setattr(nvrtc, "build", lambda: "12.9-1")
    keys.add(nvrtc.key(str(kernel), "scale<8>", "sm_80"))
    assert len(keys) == 3


def test_damaged_entries_are_replaced(kernel: Path, compiled: list[str]) -> None:
    job = Job(str(kernel), "scale<8>", "sm_80")
    want = units.cached(job)
    whole = entry().read_bytes()
    flipped = [bytearray(whole) for _ in range(3)]
    for data, place in zip(flipped, (3, len(whole) // 2, -1), strict=True):
        data[place] ^= 1
    damaged = [b"", whole[:10], whole[:60], whole[:-1], whole + b"x", b"\0" * 100, *flipped]
    for i, data in enumerate(damaged, 2):
        entry().write_bytes(data)
        assert units.cached(job).code == want.code
        assert len(compiled) == i
        assert units.cached(job).code == want.code
        assert len(compiled) == i  # whole again


def test_writers_at_once(kernel: Path) -> None:
    """Readers concurrent with many writers find a complete entry or none; no files are left
    over."""
    cubin = nvrtc.compile(nvrtc.closure(str(kernel)), "scale<8>", "sm_80")
    stop = threading.Event()
    found: list[nvrtc.Cubin | None] = []

    def read() -> None:
        while not stop.is_set():
            found.append(cache.load("key", "sm_80"))

    def write() -> None:
        for _ in range(50):
            cache.store("key", cubin)

    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=write) for _ in range(4)]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    reader.join()
    assert cubin in found and all(each in (None, cubin) for each in found)
    assert all(each == cubin for each in found[found.index(cubin) :])
    assert [path.name for path in cache.folder().glob("*/*")] == ["key.cubin"]


def test_an_unwritable_folder_is_reported(kernel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = kernel.parent / "blocked"
    blocked.write_text("a file where a folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    with pytest.warns(UserWarning, match=r"blocked.*XDG_CACHE_HOME"):
        cubin = units.cached(Job(str(kernel), "scale<8>", "sm_80"))
    assert cubin.code


def test_compiling_in_several_processes(kernel: Path, compiled: list[str]) -> None:
    sizes = range(1, 7)
    jobs = [Job(str(kernel), f"scale<{n}>", arch) for n in sizes for arch in ("sm_80", "sm_90a")]
    kernel.write_text(SOURCE.replace("scale.cuh", "reduce.cuh").replace("factor", ""))
    cubins = units.compile_all(jobs, workers=3)
    assert compiled == []  # not in this process
    assert [(c.arch, c.resources.shared) for c in cubins] == [
        (arch, 4 * n) for n in sizes for arch in ("sm_80", "sm_90a")
    ]
    assert units.compile_all(jobs, workers=3) == cubins
    assert len(list(cache.folder().glob("*/*"))) == len(jobs)


def test_the_first_error_of_several_processes(kernel: Path) -> None:
    kernel.write_text('template <int N> __global__ void f() { static_assert(N % 2, "odd only"); }')
    jobs = [Job(str(kernel), f"f<{n}>", "sm_80") for n in (1, 2, 3, 4)]
    with pytest.raises(KernelCompileError, match="f<2>") as caught:
        units.compile_all(jobs, workers=2)
    assert "odd only" in caught.value.log


def test_a_worker_that_dies_is_reported(kernel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    jobs = [Job(str(kernel), f"scale<{n}>", "sm_80") for n in (1, 2)]
    with pytest.raises(EnvironmentProblem, match=r"scale\.cu: the process.*ended early"):
        units.compile_all(jobs, workers=2)


def test_compiling_in_a_script_without_a_main_guard(kernel: Path) -> None:
    kernel.write_text("template <int N> __global__ void f(int* x) { *x = N; }")
    script = (
        "from g4spec.runtime.cuda.build.units import Job, compile_all\n"
        f"jobs = [Job({str(kernel)!r}, f'f<{{n}}>', 'sm_80') for n in range(3)]\n"
        "print(len(compile_all(jobs, workers=2)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-"],
        input=script,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (done.stdout, done.stderr) == ("3\n", "")


def test_compile_error_names_file_options_and_log(kernel: Path) -> None:
    kernel.write_text(SOURCE.replace("x[threadIdx.x])", "y[threadIdx.x])"))
    with pytest.raises(KernelCompileError) as caught:
        units.cached(Job(str(kernel), "scale<8>", "sm_80"))
    error, text = caught.value, str(caught.value)
    assert str(kernel) in error.path and str(kernel) in text
    assert "-arch=sm_80" in error.options and "-arch=sm_80" in text
    assert 'identifier "y" is undefined' in error.log and error.log.strip() in text
    assert f"{kernel}(6)" in text, "the line of the file"
    assert not cache.folder().exists(), "an error is not kept"


def test_an_unknown_instance(kernel: Path) -> None:
    with pytest.raises(KernelCompileError, match=r"shrink<8>"):
        units.cached(Job(str(kernel), "shrink<8>", "sm_80"))


@pytest.mark.parametrize(
    "line",
    [
        "#include <cuda_fp16.h>",
        '#include "missing.cuh"',
        '#include "../norm.cu"',
        '# include "formats/q4_k.cuh"',
        "#if 0\n#include <vector>\n#endif",
    ],
)
def test_includes_of_other_libraries_are_refused(kernel: Path, line: str) -> None:
    header = kernel.parent / "include" / "inner.cuh"
    header.write_text(line + "\n")
    with pytest.raises(KernelCompileError, match=r"(?s)inner.cuh: #include.*cuda.include"):
        nvrtc.closure(str(kernel))


def test_one_name_in_two_folders(kernel: Path) -> None:
    (kernel.parent / "include" / "ptx.cuh").write_text("")
    with pytest.raises(KernelCompileError, match="just one of"):
        nvrtc.closure(str(kernel))


def test_architectures_of_devices() -> None:
    known = {
        (7, 0): "sm_70",
        (7, 5): "sm_75",
        (8, 0): "sm_80",
        (8, 6): "sm_86",
        (8, 9): "sm_89",
        (9, 0): "sm_90a",
        (10, 0): "sm_100",
        (12, 0): "sm_120",
        (12, 1): "sm_121",
    }
    assert tuple(nvrtc.arch_of(*each) for each in known) == nvrtc.ARCHS == tuple(known.values())
    assert tuple(nvrtc.SHARED_LIMIT) == nvrtc.ARCHS
    assert [nvrtc.arch_of(*each) for each in ((10, 3), (12, 2))] == ["sm_100", "sm_121"]
    assert [nvrtc.arch_of(*each) for each in ((7, 2), (8, 7), (11, 0))] == [
        "sm_72",
        "sm_87",
        "sm_110",
    ]
    with pytest.raises(Unsupported, match=r"7\.0.*found 6\.1"):
        nvrtc.arch_of(6, 1)


def test_this_compiler_covers_every_architecture() -> None:
    """NVRTC 12.9 does. NVRTC 13 dropped Volta, and the error says so."""
    missing = [a for a in nvrtc.ARCHS if int(re.sub(r"\D", "", a)) not in nvrtc.supported()]
    assert missing == (["sm_70"] if nvrtc.version() >= (13, 0) else [])


def test_an_architecture_the_compiler_lacks(kernel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 0))
    monkeypatch.setattr(nvrtc, "supported", lambda: (75, 80, 90))
    with pytest.raises(EnvironmentProblem, match=r"13\.0 cannot compile for sm_70.*sm_75, sm_80"):
        units.cached(Job(str(kernel), "scale<8>", "sm_70"))


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from g4spec.runtime.cuda.build import launch

    nvrtc._library.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(EnvironmentProblem, match=r"cuda-bindings.*g4spec\[cuda\]"):
        nvrtc._library()
    launch._core.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    with pytest.raises(EnvironmentProblem, match=r"cuda-core.*g4spec\[cuda\]"):
        launch._core()


def test_resources_of_a_log() -> None:
    """Lines of NVRTC 12.9 and 13.0 differ only in their indentation."""
    log = """ptxas info    : 4 bytes gmem, 8 bytes cmem[4]
ptxas info    : Compiling entry function 'f' for 'sm_90a'
ptxas info    : Function properties for f
ptxas         .     24 bytes stack frame, 20 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 24 bytes cumulative stack size, 128 bytes smem
ptxas info    : Compiling entry function 'g' for 'sm_90a'
ptxas info    : Function properties for g
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers
"""
    assert nvrtc.resources(log) == {
        "f": nvrtc.Resources(registers=255, spill=36, stack=24, shared=128),
        "g": nvrtc.Resources(registers=8, spill=0, stack=0, shared=0),
    }


def test_spills_are_counted(kernel: Path) -> None:
    kernel.write_text(
        "__global__ void __launch_bounds__(1024, 2) f(float* x) {\n"
        "  float v[64];\n#pragma unroll\n  for (int i = 0; i < 64; i++) v[i] = x[i];\n"
        "  __syncthreads();\n#pragma unroll\n"
        "  for (int i = 0; i < 64; i++) x[i] = v[63 - i] * v[(i * 7) % 64];\n}\n"
    )
    cubin = nvrtc.compile(nvrtc.closure(str(kernel)), "f", "sm_80")
    assert cubin.resources.spill > 0 and cubin.resources.registers <= 32
