"""Targets with experts, per-layer embeddings or shared caches, the 12B's key names, and their
assistants, compared with transformers as in `test_target.py` and `test_assistant.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.oracle import build, hf
from tests.oracle.test_assistant import CleanCaches, differences, oracle
from tests.oracle.test_target import SHAPE, VOCAB, WINDOW, check_logits, greedy, make
from tests.support import tiny
from tests.support.selection import sample

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

PLE: dict[str, Any] = {"ple": 8, "shared": 3, "k_eq_v": False}
CASES: dict[str, dict[str, Any]] = {
    "experts": {"experts": 8},
    "experts-one": {"experts": 8, "top_k": 1},
    "experts-most": {"experts": 8, "top_k": 7, "per_layer": True},
    "per-layer": PLE,
    "per-layer-own-kv": PLE | {"shared": 0},
    "shared-kv-spare": PLE | {"spare": True},
    "shared-kv-five": {"layers": 9, "shared": 5, "ple": 8, "k_eq_v": False, "kv": 1},
    "unified": {"unified": True},
    "experts-per-layer": PLE | {"experts": 8},
    "experts-per-layer-own-kv": PLE | {"experts": 8, "shared": 0},
}
TEXTS = ("experts", "per-layer", "unified", "experts-per-layer")
N_NEW = 160


@pytest.mark.parametrize("name", sample(CASES, 5))
def test_logits(tmp_path: Path, name: str) -> None:
    check_logits(make(tmp_path, CASES[name]))


@pytest.mark.parametrize("name", sample(TEXTS, 1))
def test_greedy_text(tmp_path: Path, name: str) -> None:
    ids = build.prompt(3 * WINDOW + 5, VOCAB, 1)
    text, generated = greedy(make(tmp_path, CASES[name]), ids, N_NEW)
    assert text == generated


def planted(target: Any, bug: str) -> None:
    """Plant a typical bug in a loaded target."""
    ops, w = target.ops, target.model.w
    if bug == "router reads the normed rows":
        old = ops.route
        ops.route = lambda x, *rest: old(ops.rms_norm(x, w["blk.0.ffn_norm.weight"], 1e-6), *rest)
    elif bug == "experts weighed alike":
        old = ops.route

        def route(*args: Any) -> Any:
            ids, weights = old(*args)
            return ids, torch.ones_like(weights)

        ops.route = route
    elif bug == "gate and up swapped":
        for key in w:
            if key.endswith("gate_up_exps.weight"):
                w[key] = torch.cat(w[key].chunk(2, dim=1)[::-1], dim=1)
    elif bug == "per-expert scale":
        for key in w:
            if key.endswith("exps.scale"):
                w[key] = torch.ones_like(w[key])
    elif bug == "another donor":
        from dataclasses import replace

        layers = tuple(
            replace(s, kv_from=s.kv_from and 0 if s.window else s.kv_from)
            for s in target.config.layers
        )
        target.model.config = replace(target.config, layers=layers)
    elif bug == "unscaled per-layer table":
        w["per_layer_token_embd.weight"] = w["per_layer_token_embd.weight"] / 8**0.5
    elif bug == "per-layer inputs of the next layer":
        old = ops.per_layer_inputs
        ops.per_layer_inputs = lambda *args: old(*args).roll(1, dims=1)


MISTAKES = {
    "router reads the normed rows": "experts",
    "experts weighed alike": "experts",
    "gate and up swapped": "experts",
    "per-expert scale": "experts",
    "another donor": "shared-kv-five",
    "unscaled per-layer table": "per-layer",
    "per-layer inputs of the next layer": "per-layer",
}


@pytest.mark.parametrize("bug", MISTAKES)
def test_the_oracle_detects_planted_bugs(tmp_path: Path, bug: str) -> None:
    folder, ids = make(tmp_path, CASES[MISTAKES[bug]]), build.prompt(3 * WINDOW + 5, VOCAB)
    with torch.no_grad():
        want = hf.target(folder)(torch.tensor([ids])).logits[0]
    target = build.target(folder)
    planted(target, bug)
    got = torch.cat([target.logits(r.hidden) for r in target.prefill(ids)])
    assert float((got - want).abs().max()) > 1e-3


ASSISTANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "experts": ({"experts": 8}, {}),
    "per-layer, centroids": (PLE, {"centroids": 16}),
    "per-layer, no number of shared layers": (PLE, {"shared": None}),
    "unified, no shared layers by number": ({"unified": True}, {"unified": True, "shared": 0}),
}


@pytest.mark.parametrize("name", sample(ASSISTANTS, 2))
def test_assistants(tmp_path: Path, name: str) -> None:
    """Proposals of every round, inside the window and three windows after the start."""
    shape, head = ASSISTANTS[name]
    target = tiny.target(tmp_path / "target", nested=False, **(SHAPE | shape))
    pair = (target, tiny.assistant(tmp_path / "draft", target, dtype="F32", **head))
    for length in (WINDOW // 2, 3 * WINDOW + 5):
        ids = build.prompt(length, VOCAB, length)
        text, rounds = oracle(pair, ids, 4, CleanCaches)
        found = differences(rounds, pair, ids + text)
        assert len(found) >= 3 and all(same for same, _ in found), found
        assert max(worst for _, worst in found) < 1e-4, found
