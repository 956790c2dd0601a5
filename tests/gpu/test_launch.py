"""Kernel launches: eager, in a graph, overlapping with the previous kernel, and invalid ones."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from g4spec.errors import EnvironmentProblem, KernelCompileError
from g4spec.runtime.cuda.build import launch, nvrtc
from g4spec.runtime.cuda.build.units import Unit
from g4spec.runtime.cuda.step import graphs
from tests.gpu.device import GPU, needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]

SOURCE = """
#include "ptx.cuh"

// y = a x + y, after a wait that lets a wrong order of kernels show.
template <int A>
__global__ void axpy(const float* x, float* y, int n, float b, i64 slow) {
  griddep_launch_dependents();
  griddep_wait();
  i64 start = clock64();
  while (clock64() - start < slow) {}
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = A * (x ? x[i] : 0.0f) + y[i] * b;
}

// y = x, where x is taken for a constant: read before the wait.
__global__ void early(const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  float found = i < n ? x[i] : 0.0f;
  griddep_wait();
  if (i < n) y[i] = found;
}

// Sums floats that went through dynamic shared memory, all `n` of it.
__global__ void through_shared(const float* x, float* y, int n) {
  extern __shared__ float s[];
  for (int i = threadIdx.x; i < n; i += blockDim.x) s[i] = x[i];
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = s[n - 1 - i];
}
"""
N, BLOCK = 100_003, 256
GRID = -(-N // BLOCK)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("kernels") / "launch.cu"
    path.write_text(SOURCE)
    return str(path)


@pytest.fixture
def vectors() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(N, device=GPU), torch.randn(N, device=GPU)


def scalars(b: float = 1, slow: int = 0) -> dict[str, float]:
    return {"n": N, "b": b, "slow": slow}


def test_eager(file: str, vectors: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, y = vectors
    want = 3 * x + y * 0.5
    axpy = launch.kernel(file, "axpy<3>")
    axpy(GRID, BLOCK, x=x, y=y, **scalars(0.5))
    assert torch.equal(y, want)
    axpy((GRID, 1, 1), (BLOCK,), x=None, y=y, **scalars(2), pdl=False)
    assert torch.equal(y, want * 2)
    assert launch.kernel(file, "axpy<3>") is axpy


def test_current_stream_and_other_threads(file: str) -> None:
    x, y = torch.ones(N, device=GPU), torch.zeros(N, device=GPU)
    axpy = launch.kernel(file, "axpy<1>")
    stream = torch.cuda.Stream()

    def work() -> None:
        with torch.cuda.stream(stream):
            stream.wait_stream(torch.cuda.default_stream())
            for _ in range(5):
                axpy(GRID, BLOCK, x=x, y=y, **scalars(1, 20_000))
            done.record()

    done = torch.cuda.Event()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.cuda.current_stream().wait_event(done)
    assert torch.equal(y, torch.full_like(y, 5))


@pytest.mark.parametrize("pdl", [False, True])
def test_graph_keeps_the_order(file: str, pdl: bool) -> None:
    """A chain of kernels, each reading the output of the one before, with torch ops between
    them."""
    kernels = launch.module(file, ["axpy<2>", "axpy<5>"])
    x, y, z = (torch.randn(N, device=GPU) for _ in range(3))
    start = x.clone(), y.clone(), z.clone()

    def chain() -> None:
        for slow in (0, 50_000, 0):
            kernels["axpy<2>"](GRID, BLOCK, x=x, y=y, **scalars(0.5, slow), pdl=pdl)
            kernels["axpy<5>"](GRID, BLOCK, x=y, y=z, **scalars(0.25, slow), pdl=pdl)
            kernels["axpy<2>"](GRID, BLOCK, x=z, y=x, **scalars(0.125, 0), pdl=pdl)
            y.mul_(0.75)

    def expected() -> list[torch.Tensor]:
        a, b, c = (t.double() for t in start)
        for _ in range(3):
            b = 2 * a + 0.5 * b
            c = 5 * b + 0.25 * c
            a = 2 * c + 0.125 * a
            b = b * 0.75
        return [a, b, c]

    chain()
    eager = [t.clone() for t in (x, y, z)]
    for got, want in zip(eager, expected(), strict=True):
        assert torch.allclose(got.double(), want, rtol=1e-4, atol=1e-2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for _ in range(20):
        for tensor, value in zip((x, y, z), start, strict=True):
            tensor.copy_(value)
        graph.replay()
        for got, want in zip((x, y, z), eager, strict=True):
            assert torch.equal(got, want)


def test_a_kernel_may_overlap_the_writer_of_its_constant_input(file: str) -> None:
    """With few blocks, both kernels fit on the GPU at once. In a graph they overlap: the second
    kernel reads the old values."""
    kernels = launch.module(file, ["axpy<1>", "early"])
    n, ones = BLOCK, torch.ones(BLOCK, device=GPU)
    x, y = torch.zeros(BLOCK, device=GPU), torch.full((BLOCK,), torch.nan, device=GPU)

    def run() -> None:
        kernels["axpy<1>"](1, BLOCK, x=ones, y=x, n=n, b=1, slow=2_000_000)
        kernels["early"](1, BLOCK, x=x, y=y, n=n)

    for made in (1.0, 2.0):
        run()
        assert y.tolist() == [made] * BLOCK
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    overlap = nvrtc.number(launch.arch()) >= 90
    assert (x.tolist(), y.tolist()) == ([3.0] * BLOCK, [2.0 if overlap else 3.0] * BLOCK)


def test_shared_memory_above_48_kilobytes(file: str) -> None:
    limit = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    limit = min(limit, nvrtc.SHARED_LIMIT.get(launch.arch(), limit))
    through = launch.kernel(file, "through_shared")
    for size in (1024, limit, 65536 if limit > 65536 else 50_000):
        n = size // 4
        x, y = torch.randn(n, device=GPU), torch.zeros(n, device=GPU)
        through(1, 256, x=x, y=y, n=n, shared=size)
        assert torch.equal(y, x.flip(0)), size
    with pytest.raises(EnvironmentProblem, match=f"at most {limit} bytes"):
        through(1, 256, x=x, y=y, n=1, shared=limit + 4)


def test_wrong_arguments(file: str, vectors: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, y = vectors
    before = y.clone()
    axpy = launch.kernel(file, "axpy<3>")
    right = {"x": x, "y": y, **scalars()}
    wrong: dict[str, dict[str, Any]] = {
        f"argument x: expected a tensor on {x.device}, found cpu": {"x": x.cpu()},
        "argument x: expected a contiguous tensor": {"x": x[::2]},
        "argument n: expected bool or int or int32, found int64": {"n": np.int64(N)},
    }
    for text, change in wrong.items():
        with pytest.raises(TypeError, match=text):
            axpy(GRID, BLOCK, **right | change)
    torch.cuda.synchronize()
    assert torch.equal(y, before)


def test_unknown_instance(file: str) -> None:
    with pytest.raises(KernelCompileError, match="axpi"):
        launch.kernel(file, "axpi<3>")


def test_warm_compiles_once(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = tuple(f"axpy<{n}>" for n in range(20, 24))
    launch.warm([Unit(file, names[:2]), Unit(file, names[2:])])
    monkeypatch.setattr(launch, "compile_all", lambda jobs: jobs and pytest.fail("compiled again"))
    x, y = torch.ones(N, device=GPU), torch.zeros(N, device=GPU)
    for n, name in enumerate(names, 20):
        launch.kernel(file, name)(GRID, BLOCK, x=x, y=y, **scalars(0))
        assert torch.equal(y, x * n)


@needs_gpu
def test_kernels_are_loaded_during_a_capture(file: str) -> None:
    from cuda.bindings import driver

    x, y = torch.ones(N, device=GPU), torch.zeros(N, device=GPU)

    def run() -> tuple[torch.Tensor, ...]:
        launch.kernel(file, "axpy<77>")(GRID, BLOCK, x=x, y=y, **scalars(0))
        return ()

    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
    graph = graphs.Capture(run, None)
    assert driver.cuThreadExchangeStreamCaptureMode(mode)[1] == mode, "loading was allowed for good"
    graph.replay()
    assert torch.equal(y, 77 * x)


@needs_gpu
def test_collecting_an_old_graph_does_not_end_a_recording() -> None:
    def add() -> tuple[torch.Tensor, ...]:
        more = [[i] for i in range(1000)]  # triggers Python's garbage collector
        return (torch.zeros(3, device=GPU) + len(more),)

    add()
    old: list[object] = [graphs.Capture(add, None)]
    old.append(old)
    del old
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        made = graphs.Capture(add, None)
    finally:
        gc.set_threshold(*before)
    made.replay()
    assert made.outputs[0].tolist() == [1000.0] * 3
