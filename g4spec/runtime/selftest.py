"""The checks of `doctor --self-test`: the reference implementation and the kernels of the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from g4spec.core import MAX_STEP_ROWS
from g4spec.errors import EnvironmentProblem
from g4spec.ops.reference import Ops
from g4spec.runtime import devices
from g4spec.runtime.torch_settings import own_settings

READ_TIMES, STEP_TIMES = 5, 20
MIN_READ = 1 << 30

Check = tuple[bool | None, str]
"""Whether a check passed (None for information, as a measured bandwidth), and its description."""


def checks() -> Iterator[Check]:
    """Yield all checks of this machine."""
    yield from reference_checks()
    available = "" if torch.cuda.is_available() else "not "
    yield None, f"torch {torch.__version__}, CUDA {available}available"
    try:
        yield from kernel_checks()
    except EnvironmentProblem as missing:
        reason = missing.reason if isinstance(missing, devices.NoGpu) else missing
        yield None, f"CUDA kernels: not checked: {reason}"


def kernel_checks() -> Iterator[Check]:
    """Yield the checks of the kernels on each GPU. Raises EnvironmentProblem if they cannot run."""
    for index in range(max(1, torch.cuda.device_count())):
        backend = devices.select(f"cuda:{index}")
        if torch.cuda.device_count() > 1:
            yield None, f"cuda:{index}: {backend.ops.title}"
        with own_settings(backend.ops.device):
            yield from _gpu_checks(backend)


def _gpu_checks(backend: Any) -> Iterator[Check]:
    """Yield the checks of the kernels on the current GPU, which is the `CudaBackend`'s."""
    from g4spec.runtime.cuda import kernel_selftest, model_selftest

    yield from kernel_selftest.checks(backend.ops)
    yield from model_selftest.checks(backend)
    for rows in (1, MAX_STEP_ROWS):
        replay, nbytes = kernel_selftest.step_graph(backend.ops, rows)
        seconds = gpu_seconds(replay, STEP_TIMES)
        yield (
            None,
            f"step time measured here: {seconds * 1e6:.0f} us for the feed-forward of a 31B layer "
            f"in Q4_K, {rows} row{'s' * (rows > 1)}: {nbytes / seconds / 1e9:.0f} GB/s",
        )


def reference_checks() -> Iterator[Check]:
    """Yield the checks of the reference implementation on the CPU."""
    ops, seed = Ops(), torch.Generator().manual_seed(1)
    x = torch.randn(MAX_STEP_ROWS, 512, generator=seed)
    w = torch.randn(768, 512, generator=seed)
    whole = ops.linear(x, w)
    same = all(torch.equal(ops.linear(x[:n], w), whole[:n]) for n in range(1, len(x) + 1))
    yield same, f"reference runtime: a row has the same bits in batches of 1 to {len(x)} rows"
    error = (x.double() @ w.double().T - whole.double()).abs().max().item()
    yield error < 1e-3, f"reference runtime: largest error against 64-bit floats {error:.1e}"


def bandwidths() -> Iterator[tuple[str, str, float | None]]:
    """Yield the name of each GPU, its UUID as NVML writes it, and its read bandwidth in GB/s; None
    if it has too little free memory to measure it."""
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        found = torch.cuda.get_device_properties(i)
        with torch.cuda.device(i):
            yield found.name, f"GPU-{str(found.uuid).removeprefix('GPU-')}", bandwidth()


def bandwidth() -> float | None:
    """Measure how fast the current GPU reads its memory, in GB/s; None if half of what is free is
    so small that a cache could hold part of it."""
    size = min(torch.cuda.mem_get_info()[0] // 2, 4 << 30)
    if size < MIN_READ:
        return None
    data = torch.zeros(size // 4, device="cuda")
    return data.nbytes / gpu_seconds(data.sum, READ_TIMES) / 1e9


def gpu_seconds(launch: Callable[[], object], times: int) -> float:
    """Return the mean time on the current GPU of what `launch` launches, in seconds, after a first
    time that is not measured."""
    launch()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(times):
        launch()
    stop.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(stop) / 1e3 / times)
