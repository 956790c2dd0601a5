"""Replacements of the parts of `torch.cuda` and of CUDA graphs that the runtime uses."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from g4spec.runtime import devices
from g4spec.runtime.cuda import backend, gpu_memory
from g4spec.runtime.cuda.build import launch
from g4spec.runtime.cuda.step import graphs
from tests.emulator import capture_guard

PROCESSORS = 3
"""Number of emulated multiprocessors: few, so that each block gets several work items."""


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        pass

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: "Event") -> float:
        return 1.0


class Capture:
    """Emulation of `graphs.Capture`: a replay runs the captured function again and writes into the
    same outputs. Fails if the replay launches other kernels or reads values of tensors."""

    def __init__(self, run: Any, pool: Any, overlap: bool = True) -> None:
        self._run, self.outputs, self._overlap = run, (), overlap
        self._names: list[str] | None = None

    def replay(self) -> None:
        order = contextlib.nullcontext() if self._overlap else launch.in_order()
        with launched() as names, capture_guard.capturing(), order:
            found = self._run()
        if self._names is None:
            self._names, self.outputs = names, found
        assert names == self._names, "each replay must launch the same kernels"
        for output, new in zip(self.outputs, found, strict=True):
            output.copy_(new)


@contextlib.contextmanager
def launched() -> Iterator[list[str]]:
    """Collect the names of the kernels that are launched inside the context."""
    names: list[str] = []
    before = launch.kernel

    def kernel(file: str, name: str, device: int | None = None) -> Any:
        names.append(f"{file}: {name}")
        return before(file, name, device)

    launch.kernel = kernel  # type: ignore[assignment]
    try:
        yield names
    finally:
        launch.kernel = before  # type: ignore[assignment]


def select(device: str, cache_type: Any = None) -> Any:
    """Return the backend as `devices.select` does, with the emulated GPU as GPU."""
    if device == "cpu":
        return _select(device, cache_type)
    return backend.CudaBackend("cpu", cache_type or "f16")


_select = devices.select


def mm(a: torch.Tensor, b: torch.Tensor, out_dtype: Any = None, *, out: Any = None) -> Any:
    """Multiply as cuBLAS does: exact products, float32 sums."""
    return _mm(a.float(), b.float(), out=out) if out_dtype else _mm(a, b, out=out)


def bmm(a: torch.Tensor, b: torch.Tensor, out_dtype: Any = None, *, out: Any = None) -> Any:
    return _bmm(a.float(), b.float(), out=out) if out_dtype else _bmm(a, b, out=out)


def baddbmm(
    c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, out_dtype: Any = None, *, out: Any = None
) -> Any:
    return (
        _baddbmm(c.float(), a.float(), b.float(), out=out)
        if out_dtype
        else _baddbmm(c, a, b, out=out)
    )


_mm, _bmm, _baddbmm = torch.mm, torch.bmm, torch.baddbmm


def install(patch: pytest.MonkeyPatch) -> None:
    """Replace functions of torch and of the runtime by those of this module."""
    for function in (mm, bmm, baddbmm):
        patch.setattr(torch, function.__name__, function)
    properties = SimpleNamespace(multi_processor_count=PROCESSORS, total_memory=141 << 30)
    for name, value in {
        "get_device_properties": lambda device=None: properties,
        "get_device_name": lambda device=None: "emulator",
        "graph_pool_handle": lambda: None,
        "synchronize": lambda device=None: None,
        "current_stream": lambda device=None: SimpleNamespace(synchronize=lambda: None),
        "empty_cache": lambda: None,
        "device": lambda device: contextlib.nullcontext(),
        "mem_get_info": lambda device=None: (1 << 24, 1 << 24),
        "is_current_stream_capturing": capture_guard.is_active,
        "Event": Event,
    }.items():
        patch.setattr(torch.cuda, name, value)
    patch.setattr(torch.Tensor, "pin_memory", lambda x: x)
    patch.setattr(launch, "processors", lambda device=None: PROCESSORS)
    patch.setattr(gpu_memory, "join_free", lambda index: None)
    patch.setattr(graphs, "Capture", Capture)
    patch.setattr(devices, "select", select)
