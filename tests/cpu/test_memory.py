"""Memory is computed before loading. A run that cannot fit is refused, with a context that
would."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from g4spec import quant
from g4spec.convert import convert
from g4spec.core import CacheShape
from g4spec.errors import EnvironmentProblem, InputError, UsageError
from g4spec.gguf.header import TensorInfo
from g4spec.models import gemma4
from g4spec.models.spec import LayerSpec
from g4spec.ops.kv import LayerKV, Space
from g4spec.runtime import memory
from g4spec.runtime.backend import TorchBackend
from g4spec.runtime.cuda.backend import CudaBackend
from g4spec.runtime.cuda.cache.cache_types import KINDS, Kind
from g4spec.runtime.cuda.cache.cuda_kv_size import slot_bytes
from g4spec.runtime.cuda.gpu_memory import Card
from g4spec.runtime.cuda.weights.matrix import Matrix
from g4spec.runtime.engine import Engine
from g4spec.runtime.request import Options
from tests.support import tiny, tokens


def test_cache_bytes_are_those_of_the_caches() -> None:
    shapes = [CacheShape(2, 16, 24), CacheShape(1, 32, None)]
    budget, size = TorchBackend().budget, memory.Size.of(300, slots=3, pool=700)
    assert (size.slots, size.pages) == (3, 6)
    caches = [LayerKV(s, Space(3, 300, size.pages), 64) for s in shapes]
    rings = budget.slots(3) * budget.slot(shapes, 300, 64)
    planned = (size.pages + 1) * budget.page(shapes) + rings
    got = sum(c._rows.nbytes for c in caches)
    assert planned == got == 4 * 2 * (3 * (24 + 64) * 32 + 7 * 128 * 32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parallel", [1, 2, 3, 8])
def test_a_plan_for_a_gpu_counts_the_spare_slot_and_the_spare_page(
    kind: Kind, parallel: int
) -> None:
    """Compares the plan with caches as `CudaBackend` creates them, on the CPU."""
    shapes = [CacheShape(2, 64, 200), CacheShape(4, 512, None, 64), CacheShape(1, 32, None)]
    size = memory.Size.of(700, parallel, 1500)
    made = SimpleNamespace(device=torch.device("cpu"), cache_type=kind)
    space = CudaBackend.space(made, size.slots, size.n_ctx, size.pages)  # type: ignore[arg-type]
    ring_slack = CudaBackend.ring_slack(made, 512)  # type: ignore[arg-type]
    caches = [CudaBackend.cache(made, s, space, ring_slack) for s in shapes]  # type: ignore[arg-type]
    got = sum(plane.nbytes for cache in caches for plane in cache.planes)
    card = Card(made.device, kind, portable=True)
    layers = (LayerSpec(0, None, 2, 1, 32, 32, 1e6),)
    config = gemma4.Config(160, 64, 4096, 1e-6, 30.0, layers)
    backend: Any = SimpleNamespace(budget=card, ring_slack=lambda chunk: ring_slack)
    assert memory.plan(backend, size, 512, config, [], shapes).cache == got
    rings = sum(slot_bytes(s, 700, ring_slack, kind) for s in shapes)
    assert got - parallel * rings == 13 * card.page(shapes) + (parallel > 2) * rings


def test_a_plan_for_a_gpu_counts_the_rows_that_pad_steps() -> None:
    card = Card(torch.device("cpu"), "f16", portable=True)
    config = gemma4.Config(160, 64, 4096, 1e-6, 30.0, (LayerSpec(0, None, 2, 1, 32, 32, 1e6),))
    bytes_of = {n: card.workspace(config, 700, 512, n) for n in (16, 17, 32)}
    assert bytes_of[16] < bytes_of[17] == bytes_of[32]


@pytest.mark.parametrize("portable", [False, True])
def test_a_plan_for_a_gpu_counts_weights_as_it_holds_them(portable: bool) -> None:
    card = Card(torch.device("cpu"), "f16", portable)
    for name in (n for n, f in quant.readable().items() if f.quantized):
        for shape in ((40, 512), (3, 40, 256)):
            raw = torch.zeros(math.prod(shape[:-1]), quant.get(name).row_bytes(shape[-1])).byte()
            info = TensorInfo("w", shape, quant.get(name).type, 0, raw.numel())
            there = Matrix(
                name, raw, shape[-2], shape[-1], len(raw) // shape[-2], file_order=portable
            )
            same = card.weights([info]) == there.table.nbytes
            assert same, f"{name}: write its .cuh and PARTS (CONTRIBUTING, a quant type, step 3)"


def test_a_plan_equals_the_engines_allocations(tmp_path: Path) -> None:
    target, draft = tokens.target_file(tmp_path / "t.gguf"), tokens.draft_file(tmp_path / "d.gguf")
    for parallel, pool in ((1, None), (3, None), (3, 2000)):
        engine = Engine.load(target, draft, n_ctx=600, parallel=parallel, pool=pool)
        assert engine.draft is not None
        pages = -(-((pool or 600) + 32) // 128)
        assert engine.pool.n_pages == pages and len(engine.pool.free_slots) == parallel
        assert engine.memory.cache == sum(kv._rows.nbytes for kv in engine.target.caches)
        assert engine.memory.draft_cache == sum(kv._rows.nbytes for kv in engine.draft.caches)


def test_a_run_that_cannot_fit_names_the_largest_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tokens.target_file(tmp_path / "t.gguf")
    plans = [Engine.load(target, n_ctx=n).memory for n in (1024, 2048)]
    (small, large), weights = (p.total for p in plans), plans[0].weights
    monkeypatch.setattr(memory, "available", lambda: (small + large) // 2)
    with pytest.raises(EnvironmentProblem, match=r"Use `n_ctx` \d+") as refused:
        Engine.load(target, n_ctx=2048)
    found = re.search(r"`n_ctx` (\d+)", str(refused.value))
    assert found and 1024 <= int(found[1]) < 2048
    assert Engine.load(target, n_ctx=int(found[1])).n_ctx == int(found[1])

    for free, why in ((1000, "the weights alone need more"), (weights + 1000, "free memory")):
        monkeypatch.setattr(memory, "available", lambda free=free: free)
        with pytest.raises(EnvironmentProblem, match=f"No context fits: {why}"):
            Engine.load(target, n_ctx=512)


def test_files_in_the_cache_of_a_container_are_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = tmp_path / "sys" / "fs" / "cgroup"
    group.mkdir(parents=True)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    (group / "memory.max").write_text("5000\n")
    (group / "memory.current").write_text("4900\n")
    (group / "memory.stat").write_text("anon 900\nactive_file 3000\ninactive_file 1000\n")
    monkeypatch.setattr(memory, "Path", lambda path: tmp_path / path.lstrip("/"))
    assert memory.available() == 4100
    (group / "memory.max").write_text("max\n")
    assert memory.available() == 8000 * 1024


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads /proc")
def test_the_plan_covers_the_memory_of_the_process(tmp_path: Path) -> None:
    """Compares the plan with the peak growth of a separate process while it loads and generates."""
    folder = tiny.target(tmp_path / "target", vocab=512, hidden=512, layers=6, inter=2048)
    target = tmp_path / "t.gguf"
    convert(folder, target)
    code = f"""
import re, torch
from pathlib import Path
from g4spec.runtime.cuda.backend import CudaBackend
from g4spec.runtime.cuda.cache.cache_types import Kind
from g4spec.runtime.cuda.cache.cuda_kv_size import slot_bytes
from g4spec.runtime.cuda.gpu_memory import Card
from g4spec.runtime.cuda.weights.matrix import Matrix
from g4spec.runtime.engine import Engine
from g4spec.runtime.request import Options
torch.nn.functional.linear(torch.zeros(16, 64), torch.zeros(64, 64))
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
Path("/proc/self/clear_refs").write_text("5")  # resets the peak
before = peak()
engine = Engine.load(Path({str(target)!r}), n_ctx=2048)
list(engine.generate([2] * 1500, Options(n_predict=4, ignore_eos=True)))
print(engine.memory.total, peak() - before)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    plan, grown = map(int, out.stdout.split())
    assert 0.5 * plan < grown < 1.15 * plan + 20 * 2**20  # the allocator keeps some


@pytest.mark.parametrize("n_ctx", [-1, 10**9])
def test_impossible_contexts_are_usage_errors(tmp_path: Path, n_ctx: int) -> None:
    with pytest.raises(UsageError, match="`n_ctx`"):
        Engine.load(tokens.target_file(tmp_path / "t.gguf"), n_ctx=n_ctx)


@pytest.mark.parametrize(
    "prompt,match", [([], "empty"), ([-1], "vocabulary"), ([10**6], "vocab"), ([2] * 65, "context")]
)
def test_prompts_that_cannot_be_read(tmp_path: Path, prompt: list[int], match: str) -> None:
    engine = Engine.load(tokens.target_file(tmp_path / "t.gguf"), n_ctx=64)
    with pytest.raises(InputError, match=match):
        engine.generate(prompt, Options())


def test_a_target_is_not_a_draft_and_a_draft_not_a_target(tmp_path: Path) -> None:
    target = tokens.target_file(tmp_path / "t.gguf")
    draft = tokens.draft_file(tmp_path / "d.gguf")
    with pytest.raises(InputError, match="pass it with `draft`"):
        Engine.load(draft)
    with pytest.raises(InputError, match="not a draft"):
        Engine.load(target, target)


def test_a_pool_that_does_not_fit_is_named_before_the_context() -> None:
    def plan(cache: int, n_ctx: int = 8192) -> memory.MemoryPlan:
        return memory.MemoryPlan(n_ctx, 1, cache, 0, 0, 0)

    smaller = {256: plan(1, 256), 8192: plan(2)}
    with pytest.raises(EnvironmentProblem, match="smaller `pool`"):
        memory.require_fits(plan(1000), smaller, 10)
    with pytest.raises(EnvironmentProblem, match="`n_ctx` 256"):
        memory.require_fits(plan(20), {256: plan(1, 256), 8192: plan(20)}, 10)
