"""Kernels for this machine's GPU, compiled at first use and launched on torch's stream.

    scale = launch.kernel("rows.cu", "scale_rows<2>")
    scale(grid, block, x=x, n=len(x), factor=0.5, shared=1024)

Arguments have the names of the kernel's parameters (`signature`). The same call works eagerly and
inside `torch.cuda.graph`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from g4spec.errors import EnvironmentProblem
from g4spec.runtime.cuda.build import nvrtc
from g4spec.runtime.cuda.build.signature import Signature, Strided, signature
from g4spec.runtime.cuda.build.units import Job, Unit, compile_all

__all__ = ["Grid", "Kernel", "Strided", "arch", "kernel", "module", "own_arch", "warm"]

Grid = int | tuple[int, ...]

_limits = threading.Lock()
"""Held while a thread raises a kernel's limit of shared memory."""


class Kernel:
    """One kernel instance on one device.

    Args:
        signature: file and name expression, and parameters.
        device: index of the device.
        handle: cuda.core's kernel.
        resources: registers and memory that it uses.
    """

    def __init__(
        self, signature: Signature, device: int, handle: Any, resources: nvrtc.Resources
    ) -> None:
        self.name, self.device, self.resources = signature.kernel, device, resources
        self._handle, self._signature = handle, signature
        self._on = torch.device("cuda", device)
        compiled, parsed = _argument_sizes(handle), [p.bytes for p in signature.parameters]
        assert compiled in (None, parsed), (self.name, compiled, parsed)
        self._pdl = nvrtc.number(arch(device)) >= 90
        self._shared = nvrtc.STATIC_SHARED - resources.shared  # dynamic bytes allowed so far
        self._configs: dict[tuple[Grid, Grid, int, bool], Any] = {}

    def __call__(
        self, grid: Grid, block: Grid, /, *, shared: int = 0, pdl: bool = True, **arguments: Any
    ) -> None:
        """Launch on torch's current stream of the kernel's device.

        Args:
            grid, block: blocks and threads, up to three dimensions.
            shared: bytes of dynamic shared memory of a block.
            pdl: use programmatic dependent launch: in a graph on sm_90 and later, the kernel starts
                before its predecessor has ended. It must call `griddep_wait()` before it reads what
                others write, or writes what others read. Before that it may read only data older
                than the graph (weights, norms, frequencies); an exception needs a reason in the
                kernel's docs. Outside of graphs kernels run in order, because such data may just
                have been written.
            arguments: by the names of the kernel's parameters: contiguous (or `Strided`) tensors on
                the kernel's device or in pinned host memory, None for a null pointer, and numbers,
                which are converted to the parameter's type.

        Raises:
            TypeError: a name is unknown or missing, or an argument has the wrong type.
        """
        values = self._signature.bind(arguments, self._on)
        pdl = pdl and self._pdl and overlaps()
        key = (grid, block, shared, pdl)
        config = self._configs.get(key)
        if config is None:
            config = self._configs[key] = self._config(grid, block, shared, pdl)
        stream = _stream(torch.cuda.current_stream(self.device).cuda_stream)
        if torch.cuda.current_device() == self.device:
            _core().launch(stream, config, self._handle, *values)
        else:
            with torch.cuda.device(self.device):
                _core().launch(stream, config, self._handle, *values)

    def _config(self, grid: Grid, block: Grid, shared: int, pdl: bool) -> Any:
        with _limits:  # engines in two threads may have the same kernel
            if shared > self._shared:
                self._allow_shared(shared)
        return _core().LaunchConfig(
            grid=grid, block=block, shmem_size=shared, programmatic_stream_serialization=pdl
        )

    def _allow_shared(self, shared: int) -> None:
        """Raise the kernel's limit of dynamic shared memory, which is 48 KB at first."""
        from cuda.bindings import driver

        limit = _core().Device(self.device).properties.max_shared_memory_per_block_optin
        limit = min(limit, nvrtc.SHARED_LIMIT.get(arch(self.device), limit))
        if shared + self.resources.shared > limit:
            raise EnvironmentProblem(
                f"{self.name}: shared memory of a block on cuda:{self.device}",
                expected=f"at most {limit} bytes",
                found=f"{shared} dynamic and {self.resources.shared} static",
            )
        (status,) = driver.cuKernelSetAttribute(
            driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
            shared,
            driver.CUkernel(int(self._handle.handle)),
            driver.CUdevice(self.device),
        )
        if status != driver.CUresult.CUDA_SUCCESS:
            raise EnvironmentProblem(f"{self.name}: {shared} bytes of shared memory", found=status)
        self._shared = shared


def _argument_sizes(handle: Any) -> list[int] | None:
    """Return the size of each kernel parameter in bytes, or None if the driver cannot tell (before
    CUDA 12.4)."""
    try:
        return [info.size for info in handle.arguments_info]
    except NotImplementedError:
        return None


_overlap = ContextVar("_overlap", default=True)


def overlaps() -> bool:
    """Return whether kernels launched now may begin before the one before them has ended."""
    return _overlap.get() and torch.cuda.is_current_stream_capturing()


@contextmanager
def in_order() -> Iterator[None]:
    """Record kernels so that each begins when the one before it has ended."""
    before = _overlap.set(False)
    try:
        yield
    finally:
        _overlap.reset(before)


@functools.cache
def _core() -> Any:
    try:
        import cuda.core
    except ImportError:
        raise EnvironmentProblem(
            "CUDA kernels need the package cuda-core", fix=nvrtc.INSTALL
        ) from None
    return cuda.core


@functools.lru_cache(64)
def _stream(handle: int) -> Any:
    """Return cuda.core's object for a stream that torch owns."""
    return _core().Stream.from_handle(handle)


_loaded: dict[tuple[int, str, str], Kernel] = {}


def kernel(file: str, name: str, device: int | None = None) -> Kernel:
    """Return one instance, for instance `kernel("norm.cu", "norm<2>")`, on the current device."""
    index = torch.cuda.current_device() if device is None else device
    loaded = _loaded.get((index, file, name))
    return module(file, (name,), index)[name] if loaded is None else loaded


def module(file: str, names: Sequence[str], device: int | None = None) -> dict[str, Kernel]:
    """Return several instances of one file, compiled in parallel, by name expression."""
    index = torch.cuda.current_device() if device is None else device
    missing = tuple(name for name in names if (index, file, name) not in _loaded)
    if missing:
        warm([Unit(file, missing)], index)
    return {name: _loaded[index, file, name] for name in names}


def assert_lengths(n: int, *vectors: torch.Tensor | None) -> None:
    """Assert that each vector that a kernel reads through a pointer has n values; None is skipped.
    Loading has compared the shapes of a file with its metadata before."""
    assert all(v is None or v.shape == (n,) for v in vectors), (
        n,
        [None if v is None else v.shape for v in vectors],
    )


def arch(device: int | None = None) -> str:
    """Return the architecture whose kernels a device runs (`nvrtc.pretended`)."""
    return nvrtc.pretended(own_arch(device))


def own_arch(device: int | None) -> str:
    """Return the architecture of a device."""
    return _arch_of(torch.cuda.current_device() if device is None else device)


@functools.cache
def _arch_of(device: int) -> str:
    return nvrtc.arch_of(*torch.cuda.get_device_capability(device))


def processors(device: int | None = None) -> int:
    """Return the number of multiprocessors of a device."""
    return _processors_of(torch.cuda.current_device() if device is None else device)


@functools.cache
def _processors_of(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def warm(units: Iterable[Unit], device: int | None = None) -> None:
    """Compile every instance of these units, in parallel, and load it, also during a capture."""
    index = torch.cuda.current_device() if device is None else device
    names = dict.fromkeys((unit.file, name) for unit in units for name in unit.names)
    target = arch(index)
    target = target if target == own_arch(index) else nvrtc.virtual(target)
    jobs = [Job(*pair, target) for pair in names if (index, *pair) not in _loaded]
    for job, cubin in zip(jobs, compile_all(jobs), strict=True):
        _loaded[index, job.file, job.name] = _load(job, cubin, index)


def _load(job: Job, cubin: nvrtc.Cubin, index: int) -> Kernel:
    core = _core()
    with torch.cuda.device(index), _loading_allowed():
        core.Device(index).set_current()
        ptx = job.arch.startswith("compute")
        load = core.ObjectCode.from_ptx if ptx else core.ObjectCode.from_cubin
        handle = load(cubin.code, name=job.file).get_kernel(cubin.symbol)
        used = _driver_resources(handle, index) if ptx else cubin.resources
        return Kernel(signature(job.file, job.name), index, handle, used)


@contextmanager
def _loading_allowed() -> Iterator[None]:
    """Let this thread load code while it captures a graph."""
    if not torch.cuda.is_current_stream_capturing():
        yield
        return
    from cuda.bindings import driver

    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    _, before = driver.cuThreadExchangeStreamCaptureMode(relaxed)
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(before)


def _driver_resources(handle: Any, index: int) -> nvrtc.Resources:
    """Return the resources of a kernel that the driver compiled; spills are part of its stack."""
    from cuda.bindings import driver

    def of(name: str) -> int:
        which = getattr(driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
        status, value = driver.cuKernelGetAttribute(
            which, driver.CUkernel(int(handle.handle)), driver.CUdevice(index)
        )
        if status != driver.CUresult.CUDA_SUCCESS:
            raise EnvironmentProblem(f"the driver does not report {name} of a kernel", found=status)
        return int(value)

    return nvrtc.Resources(of("NUM_REGS"), 0, of("LOCAL_SIZE_BYTES"), of("SHARED_SIZE_BYTES"))
