"""Losslessness of targets with experts, shared keys and values or per-layer embeddings; see
`test_exactness.py`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from g4spec.core import PAGE
from g4spec.models import gemma4
from g4spec.models.gemma4_config import shared_kv
from g4spec.models.spec import LayerSpec
from g4spec.ops.reference import TILE, Ops
from g4spec.ops.sampling import Sampler
from g4spec.runtime.engine import Engine
from tests.cpu.test_exactness import PROMPT, decode
from tests.support import memory_engine
from tests.support import memory_models as mm
from tests.support.memory_engine import DRAFTS, Make
from tests.support.one_sequence import SequenceTarget, make_target
from tests.support.selection import sample


def experts(s: LayerSpec) -> LayerSpec:
    return replace(s, n_expert=8, n_expert_used=3, n_ff_expert=32)


def _sharing(layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    sources = shared_kv([s.window is not None for s in layers], 3)
    return tuple(
        replace(s, kv_from=source, n_ple=16, n_ff=96 if source is None else 192)
        for s, source in zip(layers, sources, strict=True)
    )


CONFIGS: dict[str, Callable[[tuple[LayerSpec, ...]], tuple[LayerSpec, ...]]] = {
    "experts": lambda layers: tuple(map(experts, layers)),
    "experts, split": lambda layers: tuple(replace(experts(s), split_experts=True) for s in layers),
    "per-layer, shared": _sharing,
}


def config(name: str) -> gemma4.Config:
    base = mm.target_config()
    return replace(base, layers=CONFIGS[name](base.layers))


def target(name: str, chunk: int = 64) -> SequenceTarget:
    parsed = config(name)
    return SequenceTarget(
        make_target(parsed, mm.weights(gemma4.tensors(parsed), 0, 0.3), chunk=chunk)
    )


def engine(name: str, make: Make | None = None, suppress: tuple[int, ...] = ()) -> Engine:
    made = memory_engine.engine(make, config=config(name))
    made.tokenizer.suppress_ids = suppress
    return made


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_prefill_chunks_do_not_change_a_bit(name: str, chunk: int) -> None:
    a = list(target(name, 512).prefill(PROMPT))
    b = list(target(name, chunk).prefill(PROMPT))
    assert torch.equal(a[0].hidden, torch.cat([r.hidden for r in b]))


@pytest.mark.parametrize("name", CONFIGS)
def test_step_logits_equal_plain_decoding_at_every_row(name: str) -> None:
    plain = target(name)
    list(plain.prefill(PROMPT))
    ids = [(7 * i) % 150 + 5 for i in range(TILE)]
    one = torch.stack([plain.step([t], len(PROMPT) + i).logits[0] for i, t in enumerate(ids)])
    wide = target(name)
    list(wide.prefill(PROMPT))
    for rows in range(1, TILE + 1):
        assert torch.equal(wide.step(ids[:rows], len(PROMPT)).logits, one[:rows]), rows


@functools.cache
def undrafted(name: str, sampler: Sampler, suppress: tuple[int, ...]) -> list[tuple[int, float]]:
    return decode(engine(name, None, suppress), sampler, 0, n=40)


@pytest.mark.parametrize("name", ["experts", "per-layer, shared"])
@pytest.mark.parametrize("draft", sample(["dflash", "assistant", "ngram"], 1))
def test_text_with_a_draft_equals_text_without(name: str, draft: str) -> None:
    hot = Sampler(temperature=1.0, seed=3)
    for sampler, suppress, counts in ((Sampler(), (), (2, 15)), (hot, (5, 9), (7,))):
        want = undrafted(name, sampler, suppress)
        assert not {token for token, _ in want} & set(suppress)
        for count in counts:
            on = engine(name, DRAFTS[draft], suppress)
            assert decode(on, sampler, count, n=40) == want, count


def test_gate_and_up_separate_or_fused() -> None:
    split, fused = target("experts, split"), target("experts")
    weights: dict[str, torch.Tensor] = dict(fused.model.w)
    for s in split.config.layers:
        b = f"blk.{s.index}.ffn_"
        gate, up = weights[f"{b}gate_up_exps.weight"].chunk(2, dim=1)
        weights |= {f"{b}gate_exps.weight": gate, f"{b}up_exps.weight": up}
    split.model.w = weights
    one, two = (next(t.prefill(PROMPT)).hidden for t in (fused, split))
    assert torch.equal(one, two)


def test_a_row_does_not_depend_on_the_experts_of_others() -> None:
    ops, g = Ops(), torch.Generator().manual_seed(0)
    x = torch.randn(40, 48, generator=g)
    gate, up = torch.randn(8, 32, 48, generator=g), torch.randn(8, 32, 48, generator=g)
    down, scale = torch.randn(8, 48, 32, generator=g), torch.rand(48, generator=g) + 0.5
    router, gains = torch.randn(8, 48, generator=g), torch.rand(8, generator=g) + 0.5

    def run(rows: torch.Tensor) -> torch.Tensor:
        ids, weights = ops.route(rows, scale, router, gains, 3, 1e-6)
        return ops.experts(rows, ids, weights, gate, up, down, ops.gelu_tanh)

    want = run(x)
    for start, count in ((0, 1), (3, 2), (7, 16), (11, 29)):
        assert torch.equal(run(x[start : start + count]), want[start : start + count])
    order = torch.randperm(40, generator=g)
    assert torch.equal(run(x[order]), want[order])


def test_routing() -> None:
    ops = Ops()
    x, router = torch.eye(4), torch.tensor([[0.0, 1, 0, 0], [0, 1, 0, 0], [2, 1, 0, 0.0]])
    ids, weights = ops.route(x, torch.ones(4), router, torch.tensor([1.0, 2, 3]), 2, 0.0)
    assert ids.tolist() == [[2, 0], [0, 1], [0, 1], [0, 1]]  # the lowest id on a tie
    assert torch.allclose(weights[1], torch.tensor([0.5, 1.0]))
    share = 1 / (1 + torch.exp(torch.tensor(-2.0)))
    assert torch.allclose(weights[0], torch.stack([3 * share, 1 - share]))


def test_only_layers_with_their_own_keys_have_a_cache() -> None:
    loaded = target("per-layer, shared")
    assert len(loaded.caches) == 3
    budget, shapes = loaded.backend.budget, gemma4.caches(loaded.config)
    pages = loaded.space.n_pages + 1
    slot = budget.slot(shapes, loaded.n_ctx, loaded.backend.ring_slack(loaded.chunk))
    held = sum(c._rows.nbytes for c in loaded.caches)
    assert pages * budget.page(shapes) + slot == held
    rows = [c.capacity if c.window else pages * PAGE for c in loaded.caches]
    assert held == sum(
        2 * 4 * n * c.n_kv * c.head_dim for n, c in zip(rows, loaded.caches, strict=True)
    )
    assert [s.kv_from for s in loaded.config.layers] == [None, None, None, 1, 1, 2]
    assert (loaded.config.kv_source(True), loaded.config.kv_source(False)) == (1, 2)


def test_suppressed_tokens_are_never_chosen() -> None:
    logits = torch.tensor([0.0, 5.0, 4.0, 3.0])
    assert Sampler(suppress=(1, 2)).choose(logits, 0) == 3
    hot = Sampler(temperature=5.0, seed=1, suppress=(1, 2))
    assert {hot.choose(logits, i) for i in range(200)} == {0, 3}
    assert logits[1] == 5.0
