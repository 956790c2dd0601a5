"""The engine with portable kernels: on an emulated sm_75, or forced on the present GPU."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from g4spec.errors import UsageError
from g4spec.ops.reference import Ops
from g4spec.ops.sampling import Sampler
from g4spec.runtime import load_options
from g4spec.runtime.cuda.build import launch
from g4spec.runtime.cuda.ops import CudaOps
from g4spec.runtime.cuda.weights.matrix import Matrix
from g4spec.runtime.engine import Engine
from tests.emulator import kernels
from tests.gpu import family, parity
from tests.gpu.device import DEVICE, EMULATED, GPU
from tests.oracle import build
from tests.support.one_sequence import single_sequence

pytestmark = pytest.mark.gpu

ARCH = "sm_75"
FAST = ("linear.cu", "attention.cu", "experts.cu", "dequant.cu")
"""Kernel files that need tensor cores or packed matrices."""
PROMPT = build.prompt(family.WINDOW + 21, family.VOCAB, 7)
SAMPLER = Sampler(temperature=4.0, seed=2)
MORE = build.prompt(16, family.VOCAB, 9)

TARGETS = [("dense", "q8_0"), ("dense", "q4_k_m"), ("experts", "q8_0"), ("per-layer", "q8_0")]


@pytest.fixture(autouse=True)
def launched_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Yield the set of files whose kernels are launched."""
    with kernels.installed(ARCH) if EMULATED else contextlib.nullcontext():
        files: set[str] = set()
        before = launch.kernel

        def kernel(file: str, name: str, device: int | None = None) -> Any:
            files.add(file)
            return before(file, name, device)

        monkeypatch.setattr(launch, "kernel", kernel)
        yield files
        assert not files & set(FAST), files
        monkeypatch.undo()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("portable")
    with pytest.MonkeyPatch.context() as patch:
        for kind, type in TARGETS:
            (at / type).mkdir(exist_ok=True)
            patch.setitem(family.SHAPE, "layers", 6 if kind == "per-layer" else 3)
            family.random(at / type, kind, type)
            family.draft(at / type, "zlab", kind)
    return at


def load(target: Path, draft: Path | None = None, device: str = "") -> Engine:
    device = device or (GPU if EMULATED else f"{GPU}:portable")
    return Engine.load(target, draft, n_ctx=family.CTX, device=device)


CASES = (
    ("qkv", "gated", "experts")
    if EMULATED
    else (
        "embed",
        "linear",
        "logits",
        "norm_rows",
        "norm_residual_norm",
        "qkv",
        "attend",
        "gated",
        "modulated",
        "per_layer_inputs",
        "experts",
    )
)
"""Operations with portable kernels; the emulator runs only those that are no part of another."""


@pytest.mark.parametrize("name", CASES)
def test_parity(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations compared with the reference."""
    monkeypatch.setattr(parity, "Matrix", functools.partial(Matrix, file_order=True))
    cuda = CudaOps(DEVICE, portable=True)
    g = torch.Generator().manual_seed(0)
    for got, want, tolerance in parity.CASES[name](cuda, Ops(), g):
        rows = want.double().abs().amax(-1).clamp(min=1e-30)
        error = (got.double().cpu() - want.double()).abs().amax(-1) / rows
        assert float(error.max()) <= tolerance
    # One of the cases has heads of 96, which no kernel supports.
    assert cuda.without_kernel == ({"attend"} if name == "attend" else set())


@pytest.mark.parametrize(("kind", "type"), TARGETS)
def test_a_target_is_near_the_reference_and_exact(
    folder: Path, kind: str, type: str, launched_files: set[str]
) -> None:
    """Logits of a prompt read in one chunk and of steps after it; their bits in steps of 1 to 16
    rows at every place."""
    calm = folder / type / f"{kind}-calm.gguf"
    cpu, gpu = load(calm, device="cpu"), load(calm)
    with single_sequence(cpu) as reference, single_sequence(gpu) as target:
        a, b = (list(x.prefill(PROMPT))[-1].hidden for x in (reference, target))
        error = (b.cpu() - a).abs().amax(-1) / a.abs().amax(-1)
        assert float(error.median()) < 0.1 and float(error.max()) < 0.5, error
        at = len(PROMPT)
        want = reference.step(MORE, at).logits
        one = torch.stack([target.step([t], at + i).logits[0].clone() for i, t in enumerate(MORE)])
        assert float((one.cpu() - want).abs().amax(-1).median()) < 1.0
        for count in (3, 8, 16):
            assert torch.equal(target.step(MORE[:count], at).logits, one[:count]), count
        for begin in (1, 11):
            assert torch.equal(target.step(MORE[begin:], at + begin).logits, one[begin:]), begin
    assert {"portable.cu", "attention_plain.cu"} <= launched_files
    named = {"choice of experts", "experts of prompts, one by one"}
    assert gpu.target.ops.without_kernel == (named if kind == "experts" else set())
    assert gpu.target.ops.title.endswith("portable kernels")


@pytest.mark.parametrize(("kind", "type"), TARGETS[1:3] if EMULATED else TARGETS)
def test_a_draft_does_not_change_the_text(folder: Path, kind: str, type: str) -> None:
    engine = load(folder / type / f"{kind}.gguf", folder / type / f"zlab-{kind}.gguf")
    plain = family.generate(engine, PROMPT, 0, 12, SAMPLER)
    assert len(set(plain.ids)) > 1
    family.help_out(engine, PROMPT + plain.ids, lambda i: 3 * i)
    run = family.generate(engine, PROMPT, 15, 12, SAMPLER)
    assert run.ids == plain.ids and run.stats.drafted


def test_older_gpus_use_portable_kernels_by_default() -> None:
    if EMULATED:
        for arch, portable in (("sm_70", True), ("sm_75", True), ("sm_80", False)):
            with kernels.installed(arch):
                assert CudaOps(DEVICE).portable is portable
    else:
        old = torch.cuda.get_device_capability() < (8, 0)
        assert CudaOps(DEVICE).portable is old
    assert CudaOps(DEVICE, portable=True).portable


def test_device_names_are_parsed() -> None:
    assert load_options.parse_device("cuda") == (0, False)
    assert load_options.parse_device("cuda:3") == (3, False)
    assert load_options.parse_device("cuda:portable") == (0, True)
    assert load_options.parse_device("cuda:1:portable") == (1, True)
    for wrong in ("gpu", "cuda:", "cuda:portable:1", "cuda:x"):
        with pytest.raises(UsageError):
            load_options.parse_device(wrong)
