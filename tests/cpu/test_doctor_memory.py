"""Memory estimates compared with every published reading for which a formula exists."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from g4spec.advisor import cache_sizes, engines, speed
from g4spec.advisor.cards import assume
from g4spec.advisor.facts import facts
from g4spec.advisor.figures import CacheTableFact, ContextFitFact, MemoryReadingFact
from g4spec.advisor.format_choice import Question
from g4spec.advisor.machine import GIB, Gpu, Machine
from g4spec.advisor.memory_needs import Calculator
from g4spec.advisor.named_models import (
    DraftModel,
    TargetModel,
    WeightFormat,
    from_row,
    named_target,
)
from g4spec.advisor.schema import CardFact, DraftFact, SizeFact
from g4spec.core import MAX_STEP_ROWS, CacheShape
from g4spec.measure import synthetic
from g4spec.models import gemma4
from g4spec.models.spec import Checkpoint
from g4spec.runtime import memory as runtime_memory
from g4spec.runtime.backend import TorchBackend
from g4spec.runtime.cuda.gpu_memory import Card as CardMemory

FACTS = facts()


def target(size: str) -> TargetModel:
    return named_target(FACTS, FACTS.get(SizeFact, size))


def draft(id: str) -> DraftModel:
    return from_row(FACTS.get(DraftFact, id), id)


def machine(gib: float, n: int = 1) -> Machine:
    return Machine((Gpu("card", (8, 6), int(gib * GIB)),) * n)


READINGS = [r for r in FACTS.all(MemoryReadingFact) if r.check]


def computed(r: MemoryReadingFact) -> float:
    """Return the estimate for a reading, in its unit."""
    caches = target(r.model).caches
    mine = cache_sizes.shapes_per_card(caches, r.tp)
    kv = r.kv or "bf16"
    context = r.context or 1 << 18
    one = sum(cache_sizes.vllm_cache(caches, context, kv, r.tp, r.batched))
    every = cache_sizes.token_bytes(caches, kv) + cache_sizes.slot_bytes(caches, kv)
    ways: dict[str, Callable[[], float]] = {
        "total": lambda: llamacpp_total(r),
        "slope": lambda: cache_sizes.token_bytes(mine, kv) * (r.context_to - r.context) / GIB,
        "pool": lambda: one / GIB,
        "token": lambda: one / context,
        "tokens": lambda: r.pool_gib * GIB / (one / context),
        "pages": lambda: vllm_pages(caches, context, r.batched),
        "unwindowed": lambda: every / r.tp,
        "unwindowed-tokens": lambda: r.pool_gib * GIB / every,
        "full-sliding": lambda: every * context / GIB,
        "card": lambda: vllm_card(r),
    }
    return ways[r.check]()


def vllm_pages(caches: Sequence[CacheShape], context: int, batched: int) -> int:
    """Return the pages of one sequence. vLLM groups as many layers as there are global layers; a
    page holds 16 tokens of sliding layers, or as many of global layers as take the same bytes."""
    groups = sum(c.window is not None for c in caches) / sum(c.window is None for c in caches)
    sliding = next(c for c in caches if c.window is not None)
    full = next(c for c in caches if c.window is None)
    ratio = sliding.n_kv * sliding.head_dim / (full.n_kv * full.head_dim)
    per_page = int(cache_sizes.BLOCK * ratio)
    window = cache_sizes.window_of(caches)
    blocks = cache_sizes.vllm_slots(window, batched, context) // cache_sizes.BLOCK
    return math.ceil(context / per_page) + int(groups) * blocks


def llamacpp_total(r: MemoryReadingFact) -> float:
    pair = draft(r.draft) if r.draft else None
    if pair is not None:
        pair = replace(pair, gguf_bytes=int(r.draft_gb * 1e9))
    calc = Calculator(FACTS, machine(24), target(r.model), pair, 1)
    option = WeightFormat("Q4_K_S", int(r.weights_gb * 1e9), ("llama.cpp",))
    steps = calc.plan("llama.cpp", option, r.kv, r.context).items
    rest = sum(s.nbytes for s in steps if s.name not in ("global cache", "sliding cache"))
    caches = target(r.model).caches
    cache = cache_sizes.token_bytes(caches, r.kv, r.kv_v) * r.context
    ring = cache_sizes.slot_bytes(caches, r.kv, r.kv_v) * cache_sizes.llamacpp_slots(
        caches, r.context
    )
    return (rest + cache + ring) / GIB


def vllm_card(r: MemoryReadingFact) -> float:
    """Sum weights, draft, the pool that vLLM reported, and 0.5 + utilization + 0.3 GB for each
    further card."""
    caches = target(r.model).caches
    whole, ring = cache_sizes.vllm_cache(caches, r.context, r.kv, r.tp, r.batched)
    pool = r.tokens * (whole + ring) / r.context
    extra = draft(r.draft).nbytes / r.tp if r.draft else 0
    overhead = (0.5 + r.util + 0.3 * (r.tp - 1)) * 1e9
    return (r.weights_gb * 1e9 / r.tp + extra + pool + overhead) / GIB


@pytest.mark.parametrize("r", READINGS, ids=[r.id for r in READINGS])
def test_within_five_percent(r: MemoryReadingFact) -> None:
    assert r.tolerance <= 0.05
    got = computed(r)
    assert abs(got / r.value - 1) <= r.tolerance, f"{got:.4g} computed, {r.value:.4g} read"


def test_readings_of_both_engines_are_covered() -> None:
    assert {r.engine for r in READINGS} == {"llama.cpp", "vllm"}
    assert len(READINGS) >= 15


@pytest.mark.parametrize("row", FACTS.all(CacheTableFact), ids=lambda r: r.id)
def test_cache_tables(row: CacheTableFact) -> None:
    caches = target(row.model).caches
    if row.global_token:
        assert cache_sizes.token_bytes(caches, row.kv) == row.global_token
    if row.sliding_slot:
        assert cache_sizes.slot_bytes(caches, row.kv) == row.sliding_slot
    if row.unwindowed:
        every = cache_sizes.token_bytes(caches, row.kv) + cache_sizes.slot_bytes(caches, row.kv)
        assert every == row.unwindowed
    for context, gib in zip(row.contexts, row.gib, strict=True):
        if row.engine == "vllm":
            got = sum(cache_sizes.vllm_cache(caches, context, row.kv, row.tp, row.batched))
        else:
            slots = cache_sizes.llamacpp_slots(caches, context)
            got = int(
                cache_sizes.token_bytes(caches, row.kv) * context
                + cache_sizes.slot_bytes(caches, row.kv) * slots
            )
        assert got / GIB == pytest.approx(gib, rel=0.01, abs=0.006), context


def fit_option(t: TargetModel, name: str) -> WeightFormat:
    wanted = "QAT UD-Q4_K_XL" if name.startswith("QAT") else name.removeprefix("UD-")
    return next(o for o in t.formats if o.format == wanted)


@pytest.mark.parametrize("row", FACTS.all(ContextFitFact), ids=lambda r: r.id)
def test_largest_contexts(row: ContextFitFact) -> None:
    """430 cells (card, format, draft, cache type) agree within 1K or 5 %."""
    t = target(row.model)
    pair = None
    if row.draft != "none":
        maker = {"mtp": "google", "dflash": "zlab"}[row.draft]
        found = next(
            d
            for d in FACTS.all(DraftFact)
            if (d.model, d.kind, d.maker) == (row.model, row.draft, maker)
        )
        pair = from_row(found, "")
    option = fit_option(t, row.format)
    for i, gib in enumerate(row.cards):
        calc = Calculator(FACTS, machine(gib), t, pair, 1)
        for kv, listed in (("f16", row.f16[i]), ("q8_0", row.q8_0[i])):
            if listed == -2:
                continue
            expected = t.context / 1024 if listed == -1 else listed
            got = calc.plan("llama.cpp", option, kv, 1024).largest / 1024
            assert abs(got - expected) <= max(1.01, 0.05 * expected), (gib, kv, got, expected)


@dataclass
class Device:
    """A fake backend with the members that `runtime.memory.plan` uses."""

    budget: Any
    ring: int

    def ring_slack(self, chunk: int) -> int:
        return self.ring


@dataclass
class Shape:
    """A tensor of which only the shape is known."""

    shape: tuple[int, ...]


@pytest.mark.parametrize("size", synthetic.TARGETS)
@pytest.mark.parametrize("context", [300, 512, 4096, 32_768])
def test_cache_bytes_equal_those_of_the_engine(size: str, context: int) -> None:
    """Equal to the byte on a GPU with either cache type and on a CPU: pages, the spare page and
    rings."""
    config = gemma4.parse_hf(Checkpoint(synthetic.TARGETS[size], {}))
    known = target(size.partition("-")[0])

    def planned(device: Device, chunk: int) -> int:
        asked = runtime_memory.Size.of(context)
        return runtime_memory.plan(device, asked, chunk, config, [], gemma4.caches(config)).cache

    for kv in ("f16", "q8_0"):
        card = Device(CardMemory(torch.device("cpu"), kv, portable=True), 2 * MAX_STEP_ROWS)
        plan = Calculator(FACTS, machine(80), known, None, 1).plan(
            "g4spec", known.formats[0], kv, context
        )
        estimated = sum(s.nbytes for s in plan.items if s.name in ("global cache", "sliding cache"))
        assert estimated == planned(card, 4096)
    cpu = TorchBackend()
    estimated = engines._own_bytes(Question(known), None, context)
    numbers = int(4 * known.formats[0].nbytes / 0.56) + engines.OWN_WORK
    assert abs(estimated - numbers - planned(cpu, cpu.chunk)) <= 4


@pytest.mark.parametrize("size", synthetic.TARGETS)
@pytest.mark.parametrize("context", [2048, 32_768, 131_072])
def test_bytes_on_a_cpu_equal_those_of_the_engine(size: str, context: int) -> None:
    config, cpu = gemma4.parse_hf(Checkpoint(synthetic.TARGETS[size], {})), TorchBackend()
    tensors: Any = [Shape(t.shape) for t in gemma4.tensors(config)]
    asked = runtime_memory.Size.of(context)
    shapes = gemma4.caches(config)
    planned = runtime_memory.plan(cpu, asked, cpu.chunk, config, tensors, shapes).total
    known = target(size.partition("-")[0])
    row = FACTS.get(SizeFact, known.size)
    assert engines._own_bytes(Question(known), row, context) == planned


def test_steps_add_up_and_name_everything() -> None:
    calc = Calculator(FACTS, machine(24), target("31b"), draft("zlab-31b"), 1)
    plan = calc.plan("llama.cpp", target("31b").formats[5], "q8_0", 32768)
    assert plan.total == sum(s.nbytes for s in plan.items)
    names = [s.name for s in plan.items]
    assert names == [
        "weights",
        "global cache",
        "sliding cache",
        "draft",
        "draft cache",
        "working buffers",
        "CUDA context",
    ]


def test_the_largest_context_fits_and_the_next_does_not() -> None:
    calc = Calculator(FACTS, machine(24), target("31b"), None, 1)
    option = fit_option(target("31b"), "Q4_K_M")
    largest = calc.plan("llama.cpp", option, "f16", 256).largest
    assert calc.plan("llama.cpp", option, "f16", largest).fits
    assert not calc.plan("llama.cpp", option, "f16", largest + 256).fits


def test_one_global_head_is_repeated_on_every_card() -> None:
    caches = target("12b").caches
    assert cache_sizes.token_bytes(cache_sizes.shapes_per_card(caches, 2), "bf16") == 16384
    assert (
        cache_sizes.token_bytes(cache_sizes.shapes_per_card(target("31b").caches, 2), "bf16")
        == 40960
    )


# ---- speed


@pytest.mark.parametrize(
    "card", [c for c in FACTS.all(CardFact) if c.ceiling_31b or c.ceiling_26b], ids=lambda c: c.id
)
def test_published_ceilings(card: CardFact) -> None:
    """The ceiling is bandwidth / bytes of the weights read per token, without the KV cache."""
    for size, listed, gb in (("31b", card.ceiling_31b, 18.324), ("26b", card.ceiling_26b, 2.5)):
        del size
        for figure, bandwidth in zip(listed, card.bandwidth, strict=bool(listed)):
            assert bandwidth / gb == pytest.approx(figure, rel=0.02, abs=0.6)


def test_measured_speeds_are_in_the_estimated_range() -> None:
    """RTX 3090, 31B: 35 to 37 tokens/s were reported; GB10, 31B FP8: 5.53, and 15.44 with
    DFlash; H100, 31B BF16: 40.3, and 196."""
    t = target("31b")
    card = assume(FACTS, "RTX 3090")
    estimate = speed.estimate(FACTS, card, t, None, fit_option(t, "Q4_K_M"), "q8_0", 2048, 1)
    assert estimate is not None and estimate.low <= 35 and estimate.high >= 35
    spark = assume(FACTS, "GB10")
    pair = draft("redhat-dflash")
    estimate = speed.estimate(FACTS, spark, t, pair, fit_option(t, "FP8"), "bf16", 2048, 1)
    assert estimate is not None
    assert estimate.low * 0.95 <= 5.53 <= estimate.high
    assert estimate.draft_low <= 15.44 <= estimate.draft_high
    assert [r.best for r in estimate.reports] == [(15.44,)]
    card = assume(FACTS, "H100")
    estimate = speed.estimate(FACTS, card, t, pair, fit_option(t, "BF16"), "bf16", 256, 1)
    assert estimate is not None and estimate.low <= 40.3 <= estimate.high
    assert estimate.draft_low <= 196 <= estimate.draft_high


def test_without_a_bandwidth_there_is_no_estimate() -> None:
    t = target("31b")
    assert speed.estimate(FACTS, machine(24), t, None, t.formats[0], "f16", 1024, 1) is None
