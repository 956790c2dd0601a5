"""Shapes in a file that kernels do not support run in torch or are refused by name. They never
cause an assertion or an access out of bounds. This file tests the decisions; kernels are
tested on GPUs."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from g4spec import cli, core
from g4spec.convert import convert
from g4spec.core import CacheShape
from g4spec.errors import InputError, Unsupported
from g4spec.models.spec import LayerSpec
from g4spec.ops.kv_size import pages_of
from g4spec.ops.spans import Span
from g4spec.runtime.cuda.build import constants, launch
from g4spec.runtime.cuda.cache.cuda_kv import CudaKV
from g4spec.runtime.cuda.ops import CudaOps
from g4spec.runtime.cuda.prefill.reader import fits
from g4spec.runtime.cuda.prefill.rotary import STILL, rotating_freqs
from g4spec.runtime.cuda.step import attention, attention_chunks, packed_rows
from g4spec.runtime.cuda.step.experts import ExpertShape, capacity
from g4spec.runtime.cuda.step.experts import fits as fits_experts
from g4spec.runtime.cuda.weights import dequant, packing
from tests.gpu.batches import rows_of, spread
from tests.support import tiny, tiny_drafts

# ---- heads

BAD_HEADS: list[dict[str, Any]] = [
    {"head_dim": 15},
    {"head_dim": 0},
    {"rope_base": 0.0},
    {"rope_base": -1.0},
    {"rope_base": math.nan},
    {"rope_base": math.inf},
    {"rope_partial": 1.5},
    {"n_expert": 2, "n_expert_used": 3},
]


@pytest.mark.parametrize("change", BAD_HEADS)
def test_layers_that_attention_cannot_compute(change: dict[str, Any]) -> None:
    good: dict[str, Any] = {
        "index": 0,
        "window": None,
        "n_head": 4,
        "n_kv": 2,
        "head_dim": 16,
        "n_ff": 32,
        "rope_base": 1e4,
    }
    LayerSpec(**good)
    with pytest.raises(InputError, match="layer 0"):
        LayerSpec(**good | change)


@pytest.mark.parametrize("shape", [{"heads": 3, "kv": 2}, {"heads": 2, "kv": 3}, {"head_dim": 15}])
def test_unsupported_targets_and_drafts_are_refused(shape: dict[str, int], tmp_path: Path) -> None:
    """These caused a RuntimeError of torch at the first prompt although all tensors had the
    declared shapes."""
    target = tiny.target(tmp_path / "t", layers=3, period=3)
    odd = tiny.target(tmp_path / "odd", layers=3, period=3, **shape)
    tiny.speculators_dflash(tmp_path / "s", target, **shape)
    if "heads" in shape:
        shape["heads_"] = shape.pop("heads")
    tiny_drafts.eagle3(tmp_path / "e", target, **shape)
    convert(target, tmp_path / "t.gguf")
    out = str(tmp_path / "o.gguf")
    assert cli.run(["convert", str(odd), "-o", out]) == 3
    for draft in ("s", "e"):
        line = ["convert", str(tmp_path / draft), "--target", str(tmp_path / "t.gguf"), "-o", out]
        assert cli.run(line) == 3


@pytest.mark.parametrize("dim", [48, 2, 80])
def test_head_sizes_that_are_not_whole_blocks(dim: int) -> None:
    """A draft with heads of 48 raised an AssertionError. F16 caches hold any size, blocks of 32 do
    not."""
    shape, rows = CacheShape(2, dim, None), torch.randn(20, 2, dim)
    cache = CudaKV(shape, spread(2, 256, device="cpu"))
    batch = rows_of([(0, 0, 20)], "cpu")
    cache.append(batch.slots, batch.positions, rows, -rows)
    keys, values = cache.read(0, 0, 19)
    assert torch.equal(keys, rows.half().float()) and torch.equal(values, -rows.half().float())
    with pytest.raises(Unsupported, match=f"q8_0 for heads of {dim}.*`cache_type` f16"):
        CudaKV(shape, spread(2, 256, device="cpu"), kind="q8_0")


@pytest.mark.parametrize(
    "n_head,n_kv,n_ctx,taken",
    [
        (256, 256, 4096, True),
        (257, 257, 4096, False),
        (512, 1, 4096, True),
        (513, 1, 4096, False),
        (8, 8, 65535 * 64, True),
        (8, 8, 65536 * 64, False),
    ],
)
def test_layers_that_work_items_of_attention_cannot_name(
    n_head: int, n_kv: int, n_ctx: int, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads from the 257th on were left uncomputed: an item has a byte for the head."""
    monkeypatch.setattr(launch, "arch", lambda device: "sm_80")
    table = torch.empty(1, n_ctx // core.PAGE, dtype=torch.int32, device="meta")
    kv: Any = SimpleNamespace(
        n_kv=n_kv,
        head_dim=64,
        kind="f16",
        rotary_pairs=0,
        space=SimpleNamespace(table=table),
        keys=table,
    )
    assert attention.takes(n_head, kv) is taken


def test_attention_of_too_many_heads_runs_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "arch", lambda device: "sm_80")
    kv, ops = (
        CudaKV(CacheShape(260, 64, None), spread(1, 64, device="cpu")),
        object.__new__(CudaOps),
    )
    ops.portable, ops.without_kernel = False, set()
    batch = rows_of([(0, 0, 3)], "cpu")
    kv.append(batch.slots, batch.positions, *torch.randn(2, 3, 260, 64))
    q, at = torch.randn(3, 260, 64).half(), batch.positions
    found = ops.attend(q, kv, Span(batch, at * 0, at), 0.125)
    keys, values = kv.read(0, 0, 2)
    scores = torch.einsum("thd,nhd->htn", q.float(), keys) * 0.125
    weights = scores.masked_fill(at[None, :, None] < at, -math.inf).softmax(-1)
    want = torch.einsum("htn,nhd->thd", weights, values).flatten(1)
    assert ops.without_kernel == {"attend"} and torch.allclose(found, want, atol=1e-5)


# ---- widths and counts


def test_row_widths_that_fit_a_thread_block() -> None:
    for width in (4, 5376, 26880, packed_rows.MAX_WIDTH):
        assert packed_rows.fits(width)
        warps, loads = packed_rows.block_shape(width)
        assert warps <= 32 and warps * 32 * loads * 4 >= width
    for width in (33, 5378, packed_rows.MAX_WIDTH + 4, 1 << 20):
        assert not packed_rows.fits(width)


def stack(type: str, shape: tuple[int, int, int]) -> Any:
    """A packed matrix [matrices, rows, columns] without data, as far as sizes are read."""
    unit = packing.unit_of(type, shape[2])
    data = SimpleNamespace(shape=(1, shape[2] // unit, packing.unit_bytes(type, unit)))
    return SimpleNamespace(type=type, rows=shape[1], columns=shape[2], data=data)


@pytest.mark.parametrize(
    "experts,used,type,arch,taken",
    [
        (128, 8, "q8_0", "sm_86", True),
        (238, 16, "q8_0", "sm_86", True),
        (240, 16, "q8_0", "sm_86", False),
        (1024, 16, "q6_k", "sm_120", True),
        (1024, 16, "q6_k", "sm_90a", True),
        (1025, 1, "q4_0", "sm_90a", False),
        (16, 17, "q4_0", "sm_90a", False),
        (4, 5, "q4_0", "sm_90a", False),
    ],
)
def test_experts_that_the_kernel_has_no_room_for(
    experts: int, used: int, type: str, arch: str, taken: bool
) -> None:
    """With 240 experts of Q8_0, 16 of them used, it does not compile for an RTX 3090."""
    shape = ExpertShape(experts, used, 256, 256, 256)
    up, down = stack(type, (experts, 512, 256)), stack(type, (experts, 256, 256))
    assert fits_experts(shape, (up, down, up, down), arch) is taken


def test_expert_kernels_take_as_many_rows_as_shared_memory_holds() -> None:
    def most(experts: int, used: int, type: str, unit: int, arch: str) -> int:
        return capacity(ExpertShape(experts, used, 2816, 2112, 704), [(type, unit)] * 4, arch)

    assert most(128, 8, "q4_k", 256, "sm_90a") == most(128, 8, "q6_k", 256, "sm_90a") == 128
    assert most(128, 8, "q4_k", 256, "sm_86") == most(186, 8, "q6_k", 256, "sm_86") == 128
    assert most(190, 8, "q6_k", 256, "sm_86") == 64
    assert most(117, 16, "q8_0", 256, "sm_86") == 32
    assert most(121, 16, "q8_0", 256, "sm_86") == 16


def test_many_experts_are_dequantized_in_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grid has at most 65535 blocks in its second dimension."""
    launched = list[Any]()

    def kernel(file: str, name: str) -> Any:
        return lambda grid, block, **given: launched.append((grid, given))

    monkeypatch.setattr(dequant.launch, "kernel", kernel)
    matrices, rows = 40000, 200
    packed = torch.empty(matrices * 2, 1, 64 * 136, dtype=torch.uint8, device="meta")
    out = torch.empty(matrices * rows, 64, dtype=torch.float16, device="meta")
    dequant.dequantize(dequant.Weight("q8_0", packed, rows, 64, matrices), out)
    assert [grid for grid, _ in launched] == [(1, 65534), (1, 80000 - 65534)]
    assert sum(len(given["packed"]) for _, given in launched) == len(packed)
    assert sum(len(given["out"]) for _, given in launched) == len(out)


def test_vectors_of_another_length_reach_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short norm was read out of bounds, by pointer."""
    launched = list[str]()
    kernel = lambda file, name: lambda *sizes, **given: launched.append(name)  # noqa: E731
    monkeypatch.setattr(packed_rows.launch, "kernel", kernel)
    monkeypatch.setattr(packed_rows, "splits", lambda *_: True)  # asks for the GPU's size
    x = torch.zeros(2, 64)
    packed_rows.rms_norm(x, torch.ones(64), 1e-6)
    assert len(launched) == 1
    residual = packed_rows.Residual(torch.ones(60), 1e-6)
    for wrong in (
        lambda: packed_rows.rms_norm(x, torch.ones(60), 1e-6),
        lambda: residual(x, x),
        lambda: packed_rows.Residual(torch.ones(64), 1e-6).numbers(x, x, torch.ones(1, 64)),
    ):
        with pytest.raises(AssertionError):
            wrong()
    assert len(launched) == 1


@pytest.mark.parametrize("window", [None, 1, 512, 1 << 20])
@pytest.mark.parametrize("n_kv", [1, 2, 16, 64, 128, 1000])
@pytest.mark.parametrize("n_ctx", [64, 4096, 1 << 18, 1 << 20, 1 << 24])
def test_the_number_of_chunks_is_bounded_for_any_context(
    n_ctx: int, n_kv: int, window: int | None
) -> None:
    """A context beyond 262144 with one KV head raised an AssertionError."""
    for head_dim in (64, 512):
        held = pages_of(min(n_ctx, (window or n_ctx) + 64)) * 64
        cache: Any = SimpleNamespace(head_dim=head_dim, n_kv=n_kv, window=window, positions=held)
        chunks = attention_chunks.Chunks.of(cache, cache.positions)
        assert chunks.most(cache.positions, cache.positions) <= constants.MAX_ROW_CHUNKS
        assert not chunks.growing or chunks.shift <= constants.GROWTH_SHIFT


def test_chunks_of_published_contexts_are_unchanged() -> None:
    """The chunks decide the order of sums."""
    for n_ctx in (4096, 131072, 262144):
        for n_kv in (1, 4, 16, 64):
            cache: Any = SimpleNamespace(head_dim=512, n_kv=n_kv, window=None, positions=n_ctx)
            first = max(attention_chunks.tile_keys(512), 32 * n_kv).bit_length() - 1
            many = (
                attention_chunks.Chunks(first, True).most(n_ctx, n_ctx) > constants.MAX_ROW_CHUNKS
            )
            assert attention_chunks.Chunks.of(cache, cache.positions).shift == first + many


@pytest.mark.parametrize(
    "change,taken",
    [
        ({}, True),
        ({"hidden": 33}, False),
        ({"inter": 30}, False),
        ({"global_head_dim": 48}, False),
        ({"experts": 64, "top_k": 64, "expert_inter": 8}, True),
        ({"experts": 65, "top_k": 65, "expert_inter": 8}, False),
        ({"experts": 513, "top_k": 1, "expert_inter": 8}, False),
    ],
)
def test_prompts_of_odd_targets_are_read_in_steps(
    change: dict[str, int], taken: bool, tmp_path: Path
) -> None:
    """Prefill kernels read whole vectors: 33 columns would be read out of bounds."""
    from g4spec.gguf import GGUF
    from g4spec.models import gemma4

    shape = {"head_dim": 256, "global_head_dim": 256, "hidden": 64, "inter": 64} | change
    folder = tiny.target(tmp_path / "t", layers=3, period=3, heads=1, kv=1, **shape)  # type: ignore[arg-type]
    convert(folder, tmp_path / "t.gguf", type="bf16")
    with GGUF(tmp_path / "t.gguf") as g:
        assert fits(gemma4.parse_gguf(g.kv, g.shapes())) is taken


def test_rotated_pairs_come_first() -> None:
    freqs = torch.tensor([1.0, 0.5, STILL / 2])
    assert rotating_freqs(freqs).tolist() == [1.0, 0.5]
    with pytest.raises(InputError, match=r"rope_freqs\.weight.*pairs that rotate before"):
        rotating_freqs(freqs.flip(0))
