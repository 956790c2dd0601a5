"""Replacement of `g4spec.runtime.cuda.build.launch` on a machine without a GPU.

    with kernels.installed("sm_90a"):
        attend(q, kv, first, last, scale)  # tensors on the CPU

Kernels are compiled from the same files by g++, with ptx.cuh, mbarrier.cuh and wgmma.cuh replaced
by the files in this folder. `installed(arch, checked=True)` is slower and also reports
out-of-bounds accesses and data races (check.cpp). See README.md.
"""

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from g4spec.runtime.cuda.build import launch, nvrtc, signature
from tests.emulator import capture_guard, runtime

HERE = Path(__file__).parent
CPU = torch.device("cpu")
HEADERS = (
    *("check.h", "machine.h", "scheduler.h", "cuda.h", "products.h"),
    *("ptx.cuh", "mbarrier.cuh", "wgmma.cuh"),
)
MACHINE = ("machine.cpp", "scheduler.cpp")
CHECKER = ("check.cpp", "check.h", "sanitizer.h")
PRODUCTS = ("products.cpp", "products.h")
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-fno-gnu-unique", "-ffp-contract=off", "-w"]
OPTIMIZED = ["-std=c++17", "-O3", "-fPIC", "-fno-gnu-unique", "-ffp-contract=off", "-w"]
CHECKED = ["-DCHECKED", "-g1", "-fsanitize=thread", "-fno-threadsafe-statics"]

_MAIN = """
#include "{file}"
#include "scheduler.h"
static auto chosen = &{name};
extern "C" const char* emulated(const unsigned* grid, const unsigned* block, size_t dynamic,
                                unsigned seed, char* stacks, void** args) {{
  return machine::launch(chosen, grid, block, dynamic, seed, stacks, args);
}}
extern "C" char* reserve() {{ return machine::reserve(); }}
extern "C" void watch(const uint64_t* ranges, size_t n) {{
  machine::watched = ranges, machine::watched_count = n;
}}
void stop_machine(const char* why) {{ machine::fail(why); }}
extern "C" int parameters(int* out) {{ return machine::sizes(chosen, out); }}
"""


def adapted(text: str) -> str:
    """Return a kernel's source with shared variables replaced by references into the machine."""
    text = re.sub(
        r"extern __shared__ __align__\(\d+\) (\w+) (\w+)\[\];",
        r"\1* \2 = (\1*)machine::dynamic();",
        text,
    )

    def declare(found: re.Match[str]) -> str:
        out = []
        for i, item in enumerate(re.split(r",\s*(?![^<]*>)", found[2])):
            name, sizes = re.fullmatch(r"(\w+)(.*)", item.strip(), re.DOTALL).groups()  # type: ignore[union-attr]
            place = f"__LINE__ * 8 + {i}"
            out.append(f"auto& {name} = machine::declared<{found[1]}{sizes}>({place});")
        return " ".join(out)

    return re.sub(r"__shared__ ([\w:]+(?:<[^;]*?>)?) ([^;]+);", declare, text)


def _sources(file: str, name: str) -> dict[str, str]:
    """Return the sources of an instance by name; `file` may be a path, in tests."""
    sources = {Path(k).name: adapted(v) for k, v in nvrtc.closure(file).items()}
    sources = {k: v for k, v in sources.items() if k not in HEADERS}
    return sources | {"main.cpp": _MAIN.format(file=Path(file).name, name=name)}


def _flags(arch: str, checked: bool) -> list[str]:
    number = re.sub(r"\D", "", arch)
    feature = ["-D__CUDA_ARCH_FEAT_SM90_ALL"] if arch == "sm_90a" else []
    return [*FLAGS, *(CHECKED if checked else ()), f"-D__CUDA_ARCH__={number}0", *feature]


def _build(sources: dict[str, str], commands: Sequence[Sequence[str]], what: str) -> Path:
    """Return a folder with these files in which the commands have run. Cached; safe to call from
    several processes at once."""
    text = repr((sorted(sources.items()), commands))
    folder = Path(tempfile.gettempdir()) / f"g4spec-emulator-{os.getuid()}"
    path = folder / hashlib.sha256(text.encode()).hexdigest()[:32]
    path.mkdir(parents=True, exist_ok=True)
    with open(path / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (path / "made").exists():
            for other, content in sources.items():
                (path / other).write_text(content)
            for command in commands:
                done = subprocess.run(
                    command, cwd=path, check=False, capture_output=True, text=True
                )
                if done.returncode:
                    raise RuntimeError(f"{what}\n{done.stderr[:8000]}")
            (path / "made").touch()
    return path


@functools.cache
def _optimized(files: tuple[str, ...]) -> str:
    """Return the object of a part that does not depend on the kernel: its source, its headers."""
    sources = {name: (HERE / name).read_text() for name in files}
    command = ["g++", *OPTIMIZED, "-c", files[0], "-o", "part.o"]
    return str(_build(sources, [command], files[0]) / "part.o")


@functools.cache
def _headers(flags: tuple[str, ...]) -> str:
    """Return the folder of the headers, precompiled because they take longer than a kernel."""
    sources = {h: (HERE / h).read_text() for h in HEADERS}
    command = ["g++", *flags, "-x", "c++-header", "cuda.h", "-o", "cuda.h.gch"]
    return str(_build(sources, [command], "cuda.h"))


def _compile(flags: Sequence[str]) -> list[str]:
    return ["g++", *flags, "-I", _headers(tuple(flags)), "-I", ".", "-include", "cuda.h", "-c"]


@functools.cache
def _machine(flags: tuple[str, ...]) -> list[str]:
    """Return the objects that every kernel needs."""
    sources = {name: (HERE / name).read_text() for name in (*MACHINE, "state.h")}
    folder = _build(sources, [[*_compile(flags), *MACHINE]], "the machine")
    return [str(folder / name.replace(".cpp", ".o")) for name in MACHINE]


@functools.cache
def _library(file: str, name: str, arch: str, checked: bool) -> ctypes.CDLL:
    flags = _flags(arch, checked)
    compile, machine = _compile(flags), _machine(tuple(flags))
    link = ["g++", "-shared", "-Wl,--no-undefined,-Bsymbolic", "main.o", *machine]
    parts = (PRODUCTS, CHECKER) if checked else (PRODUCTS,)
    link += [*map(_optimized, parts), "-o", "kernel.so"]
    commands = [[*compile, "main.cpp"], link]
    made = _build(_sources(file, name), commands, f"{file}: {name}") / "kernel.so"
    library = ctypes.CDLL(str(made))
    library.emulated.restype = ctypes.c_char_p
    library.reserve.restype = ctypes.c_void_p
    return library


def symbolized(text: str, library: str) -> str:
    """Return a report with its call paths `{@address ...}` as function names and lines."""
    places = sorted(set(re.findall(r"@([0-9a-f]+)", text)))
    # Addresses are return addresses: the call is one byte before. Argument lists are limited.
    before = [hex(max(int(place, 16) - 1, 0)) for place in places[:999]]
    command = ["addr2line", "-aCsfie", library, *before]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    frames: dict[str, list[str]] = {}
    for line in lines:
        if line.startswith("0x"):
            frames[f"{int(line, 16) + 1:x}"] = found = []
            function = ""
        elif not function:
            function = re.sub(r"^(?:\w+ )?(\w+).*", r"\1", line) or "?"
        else:
            if line.split(":")[0] not in (*HEADERS, *MACHINE, "main.cpp", "??"):
                found.append(f"{function} {line.split(' ')[0]}")
            function = ""

    def frames_of(path: re.Match[str]) -> str:
        names = [f for place in re.findall(r"@([0-9a-f]+)", path[1]) for f in frames.get(place, [])]
        return " < ".join(names[:4]) or "the machine"

    return re.sub(r"\{(@.*?)\}", frames_of, text)


class Emulated:
    """One kernel instance, launched like `launch.Kernel`. The seed counts up per launch."""

    seed = 0
    stacks: Any = None
    device = 0
    resources = nvrtc.Resources(64, 0, 0, 0)

    def __init__(self, file: str, name: str, arch: str, checked: bool = False) -> None:
        self.name = f"{file}: {name}"
        self._library = _library(file, name, arch, checked)
        self._checked = checked
        self.signature = signature.signature(file, name)
        sizes = (ctypes.c_int * 64)()
        compiled = list(sizes[: self._library.parameters(sizes)])
        assert compiled == [p.bytes for p in self.signature.parameters], (self.name, compiled)
        self._limit = nvrtc.SHARED_LIMIT[arch]

    def __call__(
        self,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        /,
        *,
        shared: int = 0,
        pdl: bool = True,
        **arguments: Any,
    ) -> None:
        values = [_c_value(value) for value in self.signature.bind(arguments, CPU)]
        assert shared <= self._limit, (self.name, shared)
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        Emulated.seed += 1
        ranges = self._ranges(arguments)
        self._library.watch(ranges, ctypes.c_size_t(len(ranges) // 2))
        Emulated.stacks = Emulated.stacks or ctypes.c_void_p(self._library.reserve())
        failed = self._library.emulated(
            *(_three(grid), _three(block), ctypes.c_size_t(shared)),
            *(Emulated.seed, Emulated.stacks, pointers),
        )
        if failed:
            text = failed.decode()
            if self._checked:
                text = symbolized(text, self._library._name)
            raise RuntimeError(f"{self.name}: {text}")

    def _ranges(self, arguments: dict[str, Any]) -> Any:
        """Return address and bytes of each tensor's storage, which a checked launch may access."""
        pairs: list[int] = []
        for arg in arguments.values():
            x = arg.tensor if isinstance(arg, launch.Strided) else arg
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                pairs += [storage.data_ptr(), storage.nbytes()]
        return (ctypes.c_uint64 * len(pairs))(*pairs)


def _c_value(value: Any) -> Any:
    """Return a bound argument (`Signature.bind`) as ctypes takes it."""
    if isinstance(value, np.generic):
        return np.ctypeslib.as_ctypes_type(type(value))(value.item())
    return ctypes.c_void_p(value)


def _three(size: int | tuple[int, ...]) -> Any:
    given: Sequence[int] = (size,) if isinstance(size, int) else size
    return (ctypes.c_uint * 3)(*given, *[1] * (3 - len(given)))


@contextlib.contextmanager
def installed(arch: str, checked: bool = False) -> Iterator[None]:
    """Make all launches use emulated kernels, as on a GPU of architecture `arch`."""

    @functools.cache
    def kernel(file: str, name: str) -> Emulated:
        assert not capture_guard.is_active(), f"{file}: {name} is loaded inside a capture"
        return Emulated(file, name, arch, checked)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "kernel", lambda file, name, device=None: kernel(file, name))
        patch.setattr(launch, "arch", lambda device=None: arch)
        patch.setattr(launch, "own_arch", lambda device=None: arch)
        patch.setattr(launch, "warm", lambda units, device=None: None)
        runtime.install(patch)
        yield
