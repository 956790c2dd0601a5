"""The kernel checks of `doctor --self-test` on this machine's GPU: results agree with the
reference, and a row has the same bits with any other rows. They take seconds if the kernels are
cached."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from g4spec import quant
from g4spec.core import MAX_STEP_ROWS, Batch, CacheShape
from g4spec.ops.kv import LayerKV, Space
from g4spec.ops.reference import Ops
from g4spec.ops.spans import Span
from g4spec.runtime.cuda.build.constants import CACHE_ROTARY_PAIRS
from g4spec.runtime.cuda.cache.cuda_kv import CudaKV
from g4spec.runtime.cuda.ops import CudaOps
from g4spec.runtime.cuda.portable import products
from g4spec.runtime.cuda.step import graphs
from g4spec.runtime.cuda.weights import packing
from g4spec.runtime.cuda.weights.matrix import Matrix

COLUMNS, ROWS = 512, 768
POSITIONS = 640
MANY, OTHER_SUM_ORDER = 40, ("q4_k", "q8_0")
"""Number of rows for the matmul of many rows, and types that it is checked for: their sums start at
zero and at another number. Whether both add to the same bits is a property of the GPU
(benchmarks/gpu_wgmma_bits.py)."""
HIDDEN, FF = 5376, 21504
"""Width of rows and of the feed-forward part in a 31B."""
STEP_TYPE = "q4_k"
BLOCKS, MIN_LARGEST, MAX_LARGEST = 1 << 14, 0.01, 1.0
"""Number of random blocks to choose from, and bounds of the largest value of a chosen one."""
TOLERANCE = 2.0**-8
"""Maximum error, relative to a row's largest value; rows, keys and values are in half precision."""


def checks(ops: CudaOps) -> Iterator[tuple[bool, str]]:
    """Yield whether each check passed, and its description."""
    seed = torch.Generator().manual_seed(1)
    for type in packing.PARTS:
        same, error = _product(ops, type, seed)
        most = MANY if type in OTHER_SUM_ORDER else MAX_STEP_ROWS
        yield same and error < TOLERANCE, _describe(f"{type.upper()} matmul", same, error, most)
    for head_dim, window in ((256, 512), (512, None)):
        same, error = _attention(ops, head_dim, window, seed)
        yield same and error < TOLERANCE, _describe(f"attention, heads of {head_dim}", same, error)


def _describe(what: str, same: bool, error: float, most: int = MAX_STEP_ROWS) -> str:
    bits = "the same bits" if same else "OTHER BITS"
    return f"kernel: {what}: a row has {bits} among 1 to {most}, largest error {error:.1e}"


def _product(ops: CudaOps, type: str, seed: torch.Generator) -> tuple[bool, float]:
    raw = _weights(quant.get(type), ROWS, COLUMNS, seed)
    x = torch.randn(MAX_STEP_ROWS, COLUMNS, generator=seed)
    want = x.double() @ torch.from_numpy(quant.get(type).dequantize(raw)).double().T
    matrix = Matrix(type, torch.from_numpy(raw).to(ops.device), ROWS, COLUMNS)
    on_gpu = x.to(ops.device)
    whole = ops.linear(on_gpu, matrix).clone()
    same = all(torch.equal(ops.linear(on_gpu[:n], matrix), whole[:n]) for n in range(1, len(x)))
    if type in OTHER_SUM_ORDER:
        repeated = torch.arange(MANY, device=on_gpu.device) % len(x)
        same = same and torch.equal(ops.linear(on_gpu[repeated], matrix), whole[repeated])
    return same, _error(whole, want)


def step_graph(ops: CudaOps, rows: int) -> tuple[Callable[[], object], int]:
    """Record the feed-forward part of a 31B layer in Q4_K, with its norm, as in a step.

    Returns a function that launches it, and the bytes of weights in the file that it reads.
    """
    seed, form = torch.Generator().manual_seed(1), quant.get(STEP_TYPE)
    few = torch.from_numpy(_weights(form, 64, HIDDEN, seed)).to(ops.device)
    block = few.view(-1, form.block_bytes)

    def matrix(n: int, k: int) -> Matrix:
        count = n * k // form.block
        raw = block.repeat(-(-count // len(block)), 1)[:count]
        return Matrix(STEP_TYPE, raw.view(n, -1), n, k, file_order=ops.portable)

    gate, up, down = matrix(FF, HIDDEN), matrix(FF, HIDDEN), matrix(HIDDEN, FF)
    x = torch.randn(rows, HIDDEN, generator=seed).to(ops.device)
    ones = torch.ones(HIDDEN, device=ops.device)

    def run() -> tuple[torch.Tensor, ...]:
        normed = ops.norm_rows(x, ones, 1e-6)
        return (ops.gated(normed, gate, up, down, ops.gelu_tanh, partial_sums=True),)

    run()  # compiles and packs
    replay = partial(_replay, graphs.Capture(run, None), run)
    return replay, 3 * FF * HIDDEN // form.block * form.block_bytes


def _replay(graph: graphs.Capture, run: object) -> None:
    """Launch a graph. `run` keeps the tensors that it reads."""
    del run
    graph.replay()


def _weights(form: quant.Format, n: int, columns: int, seed: torch.Generator) -> NDArray[np.uint8]:
    """Return random weights [n, row bytes] in a type: quantized from values, or, if the type is
    only read, made of random blocks whose values are neither tiny nor huge."""
    if form.encode is not None:
        values = torch.randn(n, columns, generator=seed) * columns**-0.5
        return form.quantize(values.numpy())
    drawn = torch.randint(0, 256, (BLOCKS, form.block_bytes), generator=seed, dtype=torch.uint8)
    with np.errstate(all="ignore"):  # some random scales are infinite or NaN
        values = torch.from_numpy(form.dequantize(drawn.numpy()))
    largest = values.abs().amax(-1)
    usable = drawn[(largest > MIN_LARGEST) & (largest < MAX_LARGEST)]
    picked = torch.randint(0, len(usable), (n * columns // form.block,), generator=seed)
    raw: NDArray[np.uint8] = usable[picked].view(n, -1).numpy()
    return raw


def _attention(
    ops: CudaOps, head_dim: int, window: int | None, seed: torch.Generator
) -> tuple[bool, float]:
    # As in the models: keys of global layers are their values.
    pairs = 0 if window else CACHE_ROTARY_PAIRS
    shape = CacheShape(2, head_dim, window, pairs)
    cache = CudaKV(shape, Space.single(POSITIONS, ops.device))
    reference = LayerKV(shape, Space.single(POSITIONS), 16)
    for start in range(0, POSITIONS, 16):
        on_cpu = _batch(start, torch.device("cpu"))
        rows = torch.randn(2, 16, 2, head_dim, generator=seed).half().float()
        if pairs:
            halves = rows.view(2, 16, 2, 2, -1)
            halves[0, ..., pairs:] = halves[1, ..., pairs:]
        reference.append(on_cpu.slots, on_cpu.positions, *rows)
        on_gpu = _batch(start, ops.device)
        cache.append(on_gpu.slots, on_gpu.positions, *rows.to(ops.device))
    q = (torch.randn(16, 4, head_dim, generator=seed) * head_dim**-0.5).half()
    last = on_cpu.positions
    first = (last - (window or POSITIONS) + 1).clamp(min=0)
    want = Ops().attend(q.float(), reference, Span(on_cpu, first, last), 1.0)

    def run(n: int) -> torch.Tensor:
        result = ops.attend(
            q[:n].to(ops.device),
            cache,
            Span(on_gpu.columns(0, n), first[:n].to(ops.device), last[:n].to(ops.device)),
            1.0,
        )
        return products.numbers(result)

    whole = run(16).clone()
    return all(torch.equal(run(n), whole[:n]) for n in range(1, 16)), _error(whole, want)


def _batch(start: int, device: torch.device) -> Batch:
    """16 rows of one sequence; their tokens do not matter."""
    at = torch.arange(start, start + 16, device=device)
    return Batch(at, at, torch.zeros_like(at), (16,))


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest, relative to the largest value of its row."""
    got, want = got.double().cpu(), want.double().view(got.shape)
    return float(((got - want).abs().amax(-1) / want.abs().amax(-1)).max())
