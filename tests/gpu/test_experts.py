"""The feed-forward block of layers with experts compared with the reference; rows do not depend on
the batch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from g4spec import quant
from g4spec.ops.reference import Ops
from g4spec.ops.weights import ExpertLayer
from g4spec.runtime.cuda.build import launch
from g4spec.runtime.cuda.build.constants import INTERLEAVE_ROWS
from g4spec.runtime.cuda.ops import CudaOps
from g4spec.runtime.cuda.step import experts, packed_layout
from g4spec.runtime.cuda.step import packed_rows as rows
from g4spec.runtime.cuda.step.experts import Buffers, Experts, ExpertShape, fits
from g4spec.runtime.cuda.weights import held, packing
from g4spec.runtime.cuda.weights.dequant import Weight
from tests.gpu.device import DEVICE, EMULATED, needs_gpu
from tests.gpu.parity import matrix, numbers, quantized

pytestmark = pytest.mark.gpu

EPS = 1e-6
REF = Ops("cpu")
MANY = ExpertShape(experts=128, k=8, width=512, dense=320, expert=192)
SMALL = ExpertShape(experts=16, k=4, width=512, dense=128, expert=128)
FEW = ExpertShape(experts=12, k=3, width=320, dense=128, expert=64)


@dataclass
class Layer:
    """A layer on the GPU, and its weights as float32 on the CPU."""

    gpu: Experts
    cpu: dict[str, torch.Tensor]
    before: tuple[torch.Tensor, torch.Tensor]
    following: torch.Tensor

    def run(self, x: torch.Tensor) -> tuple[torch.Tensor, rows.PackedRows]:
        """Compute x [T, H] on the GPU -> the new residual, and its norm."""
        b = self.gpu.buffers
        for buffer in (b.scores, b.y, b.dense, b.weights):
            buffer.fill_(torch.nan)
        for hidden in (b.hidden, b.dense_hidden):
            hidden.fill_(0xFF)
        self.gpu(x, *(rows.rms_norm_rows(x, w, EPS, single=True) for w in self.before))
        assert not torch.equal(b.arrived, torch.zeros_like(b.arrived))
        out, normed = torch.empty_like(x), rows.empty(len(x), x.shape[1], x.device)
        self.gpu.finish(x, self.following, out, normed)
        assert torch.equal(b.arrived, torch.zeros_like(b.arrived))
        assert normed is not None
        return out, normed

    def reference(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Compute the same on the CPU, with intermediate results."""
        c, k = self.cpu, self.gpu.shape.k
        ids, weights = REF.route(x, c["router_norm"], c["router"], c["gains"], k, EPS)
        inner = [REF.rms_norm(x, w.cpu(), EPS) for w in self.before]
        dense = REF.gated(inner[0], c["dense_gate"], c["dense_up"], c["dense_down"], REF.gelu_tanh)
        summed = REF.experts(inner[1], ids, weights, c["gate"], c["up"], c["down"], REF.gelu_tanh)
        both, _ = REF.norm_residual_norm(
            summed, REF.rms_norm(dense, c["norm_dense"], EPS), c["norm_experts"], EPS, None
        )
        out, normed = REF.norm_residual_norm(
            both, x, c["norm"], EPS, self.following.cpu(), c["scale"]
        )
        return {
            "ids": ids,
            "weights": weights,
            "dense": dense,
            "sum": summed,
            "out": out,
            "normed": normed,
        }


def _matrix(g: np.random.Generator, type: str, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a random matrix: its stored bytes, and their values."""
    fmt = quant.get(type)
    values = g.standard_normal(shape, np.float32) / np.float32(math.sqrt(shape[-1]))
    raw = quantized(type, values)
    flat = torch.from_numpy(raw).view(-1, raw.shape[-1])
    return held.held(type, flat).view(*shape[:-1], -1), torch.from_numpy(fmt.dequantize(raw))


def _packed(type: str, raw: torch.Tensor, columns: int) -> Weight:
    """Pack bytes [matrices, rows, bytes] on the GPU."""
    unit = packing.unit_of(type, columns)
    data = torch.cat([packing.pack(type, one, unit) for one in raw]).to(DEVICE)
    return Weight(type, data, raw.shape[1], columns, len(raw))


def _turns(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Interleave two [matrices, I, bytes] in groups of 16 rows -> [matrices, 2 I, bytes]."""
    parts = [x.view(len(x), -1, INTERLEAVE_ROWS, x.shape[-1]) for x in (gate, up)]
    return torch.stack(parts, dim=2).flatten(1, 3)


def make(shape: ExpertShape, types: tuple[str, str, str, str], seed: int = 0) -> Layer:
    """Return a layer; `types`: of experts (up and gate, down) and of the dense branch."""
    g = np.random.default_rng(seed)
    up_type, down_type, dense_up_type, dense_down_type = types
    e, h = shape.experts, shape.width
    gate, up = (_matrix(g, up_type, e, shape.expert, h) for _ in range(2))
    down = _matrix(g, down_type, e, h, shape.expert)
    dense_gate, dense_up = (_matrix(g, dense_up_type, 1, shape.dense, h) for _ in range(2))
    dense_down = _matrix(g, dense_down_type, 1, h, shape.dense)

    def vector(*sizes: int) -> torch.Tensor:
        return torch.from_numpy(1 + 0.3 * g.standard_normal(sizes, np.float32))

    cpu = {
        "gate": gate[1],
        "up": up[1],
        "down": down[1],
        "dense_gate": dense_gate[1][0],
        "dense_up": dense_up[1][0],
        "dense_down": dense_down[1][0],
        "router": torch.from_numpy(g.standard_normal((e, h), np.float32)),
        "router_norm": vector(h),
        "gains": vector(e),
        "norm_dense": vector(h),
        "norm_experts": vector(h),
        "norm": vector(h),
        "scale": vector(1),
    }
    names = ("router", "router_norm", "gains", "norm_dense", "norm_experts", "norm", "scale")
    vectors = {name: cpu[name].to(DEVICE) for name in names}
    gpu = Experts(
        shape=shape,
        dense_up=_packed(dense_up_type, _turns(dense_gate[0], dense_up[0]), h),
        dense_down=_packed(dense_down_type, dense_down[0], shape.dense),
        up=_packed(up_type, _turns(gate[0], up[0]), h),
        down=_packed(down_type, down[0], shape.expert),
        eps=EPS,
        buffers=Buffers(shape, torch.device(DEVICE)),
        **vectors,
    )
    matrices = (gpu.up, gpu.down, gpu.dense_up, gpu.dense_down)
    arch = launch.arch(gpu.up.data.device.index)
    assert fits(shape, matrices, "sm_90a")
    if not fits(shape, matrices, arch):
        pytest.skip(f"no room on {arch}")
    return Layer(gpu, cpu, (vector(h).to(DEVICE), vector(h).to(DEVICE)), vector(h).to(DEVICE))


@pytest.fixture(scope="module")
def layer() -> Layer:
    return make(MANY, ("q4_k", "q8_0", "q4_k", "q8_0"))


def own_router(layer: Layer) -> Layer:
    """Return the layer with copies of the router's weights, which a test changes."""
    gpu = replace(layer.gpu, router=layer.gpu.router.clone())
    return replace(layer, gpu=gpu, cpu=dict(layer.cpu))


def randn(count: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)) * 30


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    """Return the largest error relative to the largest value of the row."""
    got, want = got.double().cpu(), want.double()
    error = (got - want).abs().amax(-1) / want.abs().amax(-1)
    assert float(error.max()) <= tolerance, float(error.max())


def check(layer: Layer, x: torch.Tensor) -> None:
    """Compare all results of a step with the reference."""
    want, n = layer.reference(x), len(x)
    out, normed = layer.run(x.to(DEVICE))
    b = layer.gpu.buffers
    assert torch.equal(b.chosen[:n].cpu().long(), want["ids"])
    assert torch.allclose(b.weights[:n].cpu(), want["weights"], rtol=2e-5)
    size = n * layer.gpu.shape.k
    summed = b.y.flatten(0, 1)[:size].view(n, -1, x.shape[1]).sum(1)
    close(b.dense[:n], want["dense"], 2e-3)
    close(summed, want["sum"], 2e-3)
    close(out, want["out"], 2e-3)
    values = packed_layout.unpack(normed)[0]
    close(values[:n], want["normed"], 2e-3)
    assert not values[n:].any()


@pytest.mark.parametrize("count", [1, 9, 33])
def test_the_end_of_a_layer_split_among_blocks(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare both forms of a width that does not fill the block."""
    layer = make(ExpertShape(4, 2, 2368, 64, 64), ("q8_0",) * 4)
    b, x = layer.gpu.buffers, randn(count, 2368).to(DEVICE)
    for values in (b.y, b.dense):
        values.copy_(torch.randn(values.shape))
    found = []
    for split in (False, True):
        monkeypatch.setattr(rows, "splits", lambda *_, split=split: split)
        out, normed = torch.full_like(x, torch.nan), rows.empty(count, 2368, x.device)
        normed.data.fill_(0xFF)
        b.arrived.fill_(1)
        layer.gpu.finish(x, layer.following, out, normed)
        last = torch.full_like(x, torch.nan)
        layer.gpu.finish(x, None, last, None)
        assert torch.equal(last, out) and not b.arrived.any()
        found.append((out, *packed_layout.unpack(normed)))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    c, summed = layer.cpu, b.y[:count].cpu().sum(1)
    dense = REF.rms_norm(b.dense[:count].cpu(), c["norm_dense"], EPS)
    both, _ = REF.norm_residual_norm(summed, dense, c["norm_experts"], EPS, None)
    want = REF.norm_residual_norm(both, x.cpu(), c["norm"], EPS, layer.following.cpu(), c["scale"])
    close(found[0][0], want[0], 1e-5)
    close(found[0][1][:count], want[1], 2e-3)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 9, 13, 16, 17, 31, 33, 64, 97, 128])
def test_steps(layer: Layer, count: int) -> None:
    check(layer, randn(count, MANY.width, count))


@pytest.mark.parametrize(
    "types",
    [
        ("q4_k", "q5_0", "q4_k", "q8_0"),
        ("q5_k", "q5_1", "q6_k", "q4_0"),
        ("q6_k", "q4_1", "q5_k", "q5_0"),
        ("iq4_xs", "iq4_nl", "q3_k", "iq4_nl"),
        ("q2_k", "q4_0", "iq3_s", "nvfp4"),
        ("iq2_xxs", "iq4_nl", "iq1_m", "mxfp4"),
        ("q8_0", "q8_0", "q8_0", "q8_0"),
    ],
)
def test_types(types: tuple[str, str, str, str]) -> None:
    small = make(ExpertShape(experts=16, k=4, width=768, dense=256, expert=320), types)
    for count in (1, 16, 50):
        check(small, randn(count, 768))


def test_sizes_that_fill_no_tile() -> None:
    small = make(FEW, ("q8_0", "q5_0", "q4_0", "q8_0"))
    for count in (1, 7, 11, 39):
        check(small, randn(count, FEW.width))


def test_all_rows_use_the_same_experts(layer: Layer) -> None:
    x = randn(1, MANY.width) + 0.01 * randn(16, MANY.width, 1)
    want = layer.reference(x)["ids"].sort(dim=1).values
    assert bool((want == want[0]).all())
    check(layer, x)
    check(layer, x[:9])


def test_no_two_rows_share_an_expert(layer: Layer) -> None:
    """Row r uses experts 8 r .. 8 r + 7."""
    x = randn(16, MANY.width)
    other = own_router(layer)
    towards = REF.rms_norm(x, None, EPS).repeat_interleave(8, dim=0)
    other.cpu["router"] = towards + 0.1 * other.cpu["router"]
    other.gpu.router.copy_(other.cpu["router"])
    ids = other.reference(x)["ids"].sort(dim=1).values
    assert torch.equal(ids.flatten(), torch.arange(128))
    check(other, x)


def test_ties_take_the_lowest_expert(layer: Layer) -> None:
    """Groups of four experts with equal scores; also all scores equal."""
    equal = own_router(layer)
    for router in (
        equal.cpu["router"][::4].repeat_interleave(4, dim=0),
        equal.cpu["router"][:1].expand(128, -1),
    ):
        equal.gpu.router.copy_(router)
        equal.run(randn(16, MANY.width).to(DEVICE))
        ids = equal.gpu.buffers.chosen[:16].view(16, -1, 4)
        assert torch.equal(ids, ids[:, :, :1] + torch.arange(4, device=DEVICE))
        if bool((router == router[0]).all()):
            assert torch.equal(ids.flatten(1), torch.arange(8, device=DEVICE).expand(16, 8).int())


def _same(
    layer: Layer, x: torch.Tensor, whole: tuple[torch.Tensor, rows.PackedRows], part: list[int]
) -> bool:
    """Return True if rows `part` of x, computed by themselves, are bit-identical to those in
    `whole`."""
    out, normed = layer.run(x[part].contiguous())
    stored, wanted = packed_layout.unpack(normed), packed_layout.unpack(whole[1])
    return torch.equal(out, whole[0][part]) and all(
        torch.equal(a[: len(part)], b[part]) for a, b in zip(stored, wanted, strict=True)
    )


def test_a_row_does_not_depend_on_the_batch(layer: Layer) -> None:
    x = randn(16, MANY.width, 5).to(DEVICE)
    x[10:] = x[3] + 0.03 * x[10:]  # many rows use the same few experts
    whole = layer.run(x)
    for count in (1, 6, 11) if EMULATED else range(1, 17):
        for first in {0, 16 - count}:
            assert _same(layer, x, whole, list(range(first, first + count)))
    g = np.random.default_rng(0)
    for _ in range(2 if EMULATED else 20):
        order = g.permutation(16)[: g.integers(1, 17)].tolist()
        assert _same(layer, x, whole, order)


def test_a_row_does_not_depend_on_more_than_16_rows() -> None:
    """Up to 128 rows, with experts that nearly all rows use: more than 8 pairs of an expert."""
    layer = make(SMALL, ("q4_k", "q5_0", "q4_k", "q8_0"))
    x = randn(128, SMALL.width, 6).to(DEVICE)
    x[70:] = x[3] + 0.03 * x[70:]
    whole = layer.run(x)
    for count in (17, 65) if EMULATED else (17, 24, 48, 64, 65, 127):
        for first in (0, 128 - count):
            assert _same(layer, x, whole, list(range(first, first + count))), (count, first)
    for row in (3, 127) if EMULATED else range(128):
        assert _same(layer, x, whole, [row]), row
    g = np.random.default_rng(1)
    for count in (16, 40) if EMULATED else (1, 6, 16, 17, 40, 90, 128):
        assert _same(layer, x, whole, g.permutation(128)[:count].tolist()), count


def test_all_of_128_rows_use_the_same_experts() -> None:
    """Each of 4 experts has 16 tiles of 8 rows."""
    layer = make(SMALL, ("q4_k", "q5_0", "q4_k", "q8_0"))
    x = randn(1, SMALL.width) + 0.01 * randn(128, SMALL.width, 1)
    want = layer.reference(x)["ids"].sort(dim=1).values
    assert bool((want == want[0]).all())
    check(layer, x)


def expert_layer(g: torch.Generator) -> ExpertLayer:
    """Return the weights of a layer of shape SMALL as a model has them."""
    h = SMALL.width
    matrices = {
        "gate": ("q8_0", SMALL.dense, h),
        "up": ("q8_0", SMALL.dense, h),
        "down": ("q8_0", h, SMALL.dense),
        "gate_exps": ("q8_0", SMALL.experts, 2 * SMALL.expert, h),
        "down_exps": ("q8_0", SMALL.experts, h, SMALL.expert),
    }
    norms = ("post_attention", "ffn_norm", "post", "post_dense", "router_norm", "expert_norm")
    return ExpertLayer(
        n_used=SMALL.k,
        up_exps=None,
        eps=EPS,
        router=torch.randn(SMALL.experts, h, generator=g).to(DEVICE),
        gains=torch.rand(SMALL.experts, generator=g).to(DEVICE),
        **{name: matrix(g, *of)[0] for name, of in matrices.items()},
        **{n: torch.rand(h, generator=g).to(DEVICE) for n in (*norms, "post_experts")},
    )


@pytest.mark.parametrize("capacities", [(128, 64, 32, 16), (32, 16), (16,)])
def test_a_step_of_several_launches(
    capacities: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An expert layer of 70 rows, where shared memory has room for as few as 16."""
    monkeypatch.setattr(experts, "CAPACITIES", capacities)
    g, h = torch.Generator().manual_seed(8), SMALL.width
    e = expert_layer(g)
    ops, count = CudaOps(str(DEVICE)), 70
    attended, x = (torch.randn(count, h, generator=g).to(DEVICE) for _ in "ax")
    together = ops.expert_layer(attended, x, e, e.post, None)
    assert not ops.without_kernel
    for row in (0, 15, 16, 31, 32, 64, count - 1):
        at = slice(row, row + 1)
        alone = ops.expert_layer(attended[at], x[at], e, e.post, None)
        assert torch.equal(together[0][at], alone[0]), row
        assert torch.equal(numbers(together[1])[at], numbers(alone[1])[:1]), row


@pytest.mark.parametrize("count", [40, 6])
def test_after_an_interrupted_step(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between the two kernels, for instance while the second one is compiled."""
    g, h = torch.Generator().manual_seed(8), SMALL.width
    e, ops = expert_layer(g), CudaOps(str(DEVICE))
    attended, x = (torch.randn(count, h, generator=g).to(DEVICE) for _ in "ax")
    want = ops.expert_layer(attended, x, e, e.post, None)
    with monkeypatch.context() as patch:

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(Experts, "finish", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ops.expert_layer(-attended, -x, e, e.post, None)
    after = ops.expert_layer(attended, x, e, e.post, None)
    assert torch.equal(after[0], want[0])
    assert torch.equal(numbers(after[1]), numbers(want[1]))


@needs_gpu
@pytest.mark.parametrize("count", [6, 40, 128])
def test_in_a_graph(layer: Layer, count: int) -> None:
    """Replays recorded steps with other inputs each time."""
    x = torch.zeros(count, MANY.width, device=DEVICE)

    def step() -> torch.Tensor:
        y = x
        for _ in range(3):
            layer.gpu(y, *(rows.rms_norm_rows(y, w, EPS, single=True) for w in layer.before))
            out, to = torch.empty_like(y), rows.empty(len(y), y.shape[1], y.device)
            layer.gpu.finish(y, layer.following, out, to)
            y = out
        return y

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for seed in range(50):
        x.copy_(randn(count, MANY.width, seed))
        graph.replay()
        got = out.clone()
        assert torch.equal(got, step()) and bool(got.isfinite().all())
