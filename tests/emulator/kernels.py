"""Stands in for `g4spec.runtime.cuda.launch` on a machine without a GPU.

    with kernels.installed("sm_90a"):
        attend(q, kv, first, last, scale)  # tensors on the CPU

Kernels are compiled from the same files by g++, with the two headers of instructions (ptx.cuh,
wgmma.cuh) replaced by those beside this file.
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

from g4spec.runtime.cuda import launch, nvrtc
from tests.emulator import runtime

HERE = Path(__file__).parent
HEADERS = ("machine.h", "cuda.h", "ptx.cuh", "wgmma.cuh")
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-shared", "-ffp-contract=off", "-w", "-x", "c++"]

_MAIN = """
#include "{file}"
static auto chosen = &{name};
extern "C" const char* emulated(const unsigned* grid, const unsigned* block, size_t dynamic,
                                unsigned seed, void** args) {{
  return machine::launch(chosen, grid, block, dynamic, seed, args);
}}
extern "C" int parameters(int* out) {{ return machine::sizes(chosen, out); }}
"""


def adapted(text: str) -> str:
    """A kernel's source with its shared memory taken from the machine."""
    text = re.sub(r"extern __shared__ __align__\(\d+\) (\w+) (\w+)\[\];",
                  r"\1* \2 = (\1*)machine::dynamic();", text)  # fmt: skip

    def declare(found: re.Match[str]) -> str:
        out = []
        for i, item in enumerate(re.split(r",\s*(?![^<]*>)", found[2])):
            name, sizes = re.fullmatch(r"(\w+)(.*)", item.strip(), re.DOTALL).groups()  # type: ignore[union-attr]
            place = f"__LINE__ * 8 + {i}"
            out.append(f"auto& {name} = machine::declared<{found[1]}{sizes}>({place});")
        return " ".join(out)

    return re.sub(r"__shared__ ([\w:]+(?:<[^;]*?>)?) ([^;]+);", declare, text)


def _sources(file: str, name: str, arch: str) -> dict[str, str]:
    sources = {k: adapted(v) for k, v in nvrtc.closure(file).items()}
    sources |= {h: (HERE / h).read_text() for h in HEADERS}
    return sources | {"main.cpp": _MAIN.format(file=file, name=name)}


def _flags(arch: str) -> list[str]:
    number = re.sub(r"\D", "", arch)
    feature = ["-D__CUDA_ARCH_FEAT_SM90_ALL"] if arch == "sm_90a" else []
    return [*FLAGS, f"-D__CUDA_ARCH__={number}0", *feature]


@functools.cache
def _library(file: str, name: str, arch: str) -> ctypes.CDLL:
    """Compiled now or before; several processes may ask at once."""
    sources, flags = _sources(file, name, arch), _flags(arch)
    text = "\0".join([*flags, *(f"{k}\0{v}" for k, v in sorted(sources.items()))])
    folder = Path(tempfile.gettempdir()) / f"g4spec-emulator-{os.getuid()}"
    made = folder / hashlib.sha256(text.encode()).hexdigest()[:32]
    made.mkdir(parents=True, exist_ok=True)
    with open(made / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (made / "kernel.so").exists():
            for other, content in sources.items():
                (made / other).write_text(content)
            command = ["g++", *flags, "main.cpp", "-o", "kernel.tmp"]
            done = subprocess.run(command, cwd=made, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{file}: {name}\n{done.stderr[:8000]}")
            os.replace(made / "kernel.tmp", made / "kernel.so")
    library = ctypes.CDLL(str(made / "kernel.so"))
    library.emulated.restype = ctypes.c_char_p
    return library


class Emulated:
    """One instance; launched like `launch.Kernel`, seeds count up."""

    seed = 0
    device = 0
    resources = nvrtc.Resources(64, 0, 0, 0)

    def __init__(self, file: str, name: str, arch: str) -> None:
        self.name = f"{file}: {name}"
        self._library = _library(file, name, arch)
        sizes = (ctypes.c_int * 64)()
        self._sizes = list(sizes[: self._library.parameters(sizes)])
        self._limit = nvrtc.SHARED_LIMIT[arch]

    def __call__(
        self,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        *args: Any,
        shared: int = 0,
        pdl: bool = True,
    ) -> None:
        values = [self._value(arg) for arg in args]
        sizes = [ctypes.sizeof(v) for v in values]
        assert sizes == self._sizes, (self.name, sizes, self._sizes)
        assert shared <= self._limit, (self.name, shared)
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        Emulated.seed += 1
        failed = self._library.emulated(
            _three(grid), _three(block), ctypes.c_size_t(shared), Emulated.seed, pointers
        )
        if failed:
            raise RuntimeError(f"{self.name}: {failed.decode()}")

    def _value(self, arg: Any) -> Any:
        if isinstance(arg, launch.Strided):
            return ctypes.c_void_p(arg.tensor.data_ptr())
        if arg is None:
            return ctypes.c_void_p(0)
        if isinstance(arg, torch.Tensor):
            assert arg.is_contiguous() and arg.device.type == "cpu", (self.name, arg.device)
            return ctypes.c_void_p(arg.data_ptr())
        assert isinstance(arg, launch.SCALARS), (self.name, arg)
        return np.ctypeslib.as_ctypes_type(type(arg))(arg.item())


def _three(size: int | tuple[int, ...]) -> Any:
    given: Sequence[int] = (size,) if isinstance(size, int) else size
    return (ctypes.c_uint * 3)(*given, *[1] * (3 - len(given)))


@contextlib.contextmanager
def installed(arch: str) -> Iterator[None]:
    """Everything that launches kernels launches these."""

    @functools.cache
    def kernel(file: str, name: str) -> Emulated:
        return Emulated(file, name, arch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "kernel", lambda file, name, device=None: kernel(file, name))
        patch.setattr(launch, "arch", lambda device=None: arch)
        patch.setattr(launch, "warm", lambda units, device=None: None)
        runtime.install(patch)
        yield
