"""DFlash drafts compared with the speculators package: block logits and proposals.

For z-lab checkpoints the package's model gets the target's embedding times sqrt(H), the target's
head and a window counted from each row: the package trains with a window counted from the anchor,
while every engine that runs z-lab drafts slides it with the row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from g4spec.core import Batch, StepRows
from g4spec.runtime.batches import batch_of
from tests.oracle import build, package
from tests.support import tiny
from tests.support.selection import sample

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

WINDOW, VOCAB, BLOCK = 16, 512, 6
SHAPE: dict[str, Any] = {"layers": 6, "period": 3, "window": WINDOW, "vocab": VOCAB, "dtype": "F32"}
DRAFT: dict[str, Any] = {"layers": 3, "block": BLOCK, "window": WINDOW, "dtype": "F32"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "zlab": ("zlab", {}),
    "zlab-all-non-causal": (
        "zlab",
        {"dflash_config": {"mask_token_id": 4, "target_layer_ids": [0, 2, 4], "causal": False}},
    ),
    "zlab-unsorted-taps": ("zlab", {"taps": (4, 0, 3)}),
    "zlab-window-below-block": ("zlab", {"window": 4}),
    "speculators-reduced": ("speculators", {}),
    "speculators-non-causal": ("speculators", {"non_causal": True}),
    "speculators-all-full": ("speculators", {"window": None}),
    "speculators-full-vocabulary": ("speculators", {"draft_vocab": None}),
    "speculators-window-below-block": ("speculators", {"window": 4}),
}


@dataclass
class Pair:
    """A target folder, a draft folder, and options of the oracle."""

    target: Path
    draft: Path
    zlab: bool

    def oracle(
        self, target: Any, full_window: int | None = None
    ) -> Callable[[torch.Tensor, list[int], int], torch.Tensor]:
        """Compute block logits over the target's vocabulary from features, ids and anchor."""
        if self.zlab:
            model = package.zlab(self.draft, target)
            return lambda f, ids, at: package.block(model, f, ids, at, True, 30.0, full_window)
        model = package.speculators(self.draft)

        def wide(features: torch.Tensor, ids: list[int], at: int) -> torch.Tensor:
            z = package.block(model, features, ids, at, full_window=full_window)
            if model.d2t is None:
                return z
            out = torch.full((len(z), VOCAB), -torch.inf)
            out[:, torch.arange(len(model.d2t)) + model.d2t] = z
            assert bool(model.t2d[torch.isfinite(out[0])].all())
            return out

        return wide


def make(folder: Path, name: str) -> Pair:
    kind, settings = CASES[name]
    target = tiny.target(folder / "target", nested=False, **SHAPE)
    write: Any = tiny.zlab_dflash if kind == "zlab" else tiny.speculators_dflash
    draft = write(folder / "draft", target, **(DRAFT | settings))
    return Pair(target, draft, kind == "zlab")


def read(
    pair: Pair, ids: list[int], chunk: int = 64, window: int | None = None
) -> tuple[Any, Any, torch.Tensor]:
    """Return target and draft with empty caches, and the features of every position."""
    target = build.target(pair.target, chunk)
    build.draft(pair.draft, target)
    features = torch.cat([r.taps for r in target.prefill(ids)])
    target = build.target(pair.target, chunk)
    return target, build.draft(pair.draft, target, window), features


def compare(got: build.Recorder, drafted: list[int], want: torch.Tensor) -> float:
    """Return the largest difference of logits; proposals and the set of draftable tokens must be
    equal."""
    mine = torch.stack(got.rows)
    its = want[1 : 1 + len(mine)]
    assert drafted == its.argmax(-1).tolist()
    assert torch.equal(torch.isfinite(mine), torch.isfinite(its))
    return float((mine - its)[torch.isfinite(mine)].abs().max())


@pytest.mark.parametrize("name", sample(CASES, 2))
@pytest.mark.parametrize("window", sample([None, 10], 1))
def test_every_anchor_seven_windows_long(tmp_path: Path, name: str, window: int | None) -> None:
    """Anchors from 1 on, until every ring has wrapped twice: each position of it, before and after
    wrapping.

    `window` is `--draft-window`, which turns the caches of full layers into rings too.
    """
    if window and "window-below" in name:
        pytest.skip("the same as with the larger window")
    pair, ids = make(tmp_path, name), build.prompt(7 * WINDOW, VOCAB)
    target, draft, features = read(pair, ids, 8, window)
    rings = [kv.capacity for kv in draft.caches if kv.window]
    assert all(2 * n < len(ids) for n in rings)
    oracle, worst = pair.oracle(target, window), 0.0
    for at in range(len(ids)):
        if at:
            seen = build.Recorder()
            drafted = draft.propose(ids[at], at, BLOCK - 1, seen)
            worst = max(worst, compare(seen, drafted, oracle(features, ids, at)))
        draft.commit(target.read(ids[at : at + 1], at), 1)
    assert worst < 1e-4


@pytest.mark.parametrize("name", ["zlab", "speculators-reduced"])
@pytest.mark.parametrize("chunk", sample([1, 7, 64], 1))
def test_after_partial_rejection(tmp_path: Path, name: str, chunk: int) -> None:
    """Steps of which 1, 2, ... rows are accepted, as in generation, after a prompt in chunks."""
    pair, ids = make(tmp_path, name), build.prompt(6 * WINDOW, VOCAB, 3)
    target, draft, features = read(pair, ids, chunk)
    oracle, at, worst = pair.oracle(target), 3 * WINDOW + 2, 0.0
    build.prefill(target, draft, ids[:at])
    for turn in range(8):
        keep = turn % BLOCK + 1
        seen = build.Recorder()
        drafted = draft.propose(ids[at], at, BLOCK - 1, seen)
        worst = max(worst, compare(seen, drafted, oracle(features, ids, at)))
        right = ids[at : at + keep]
        wrong = [(t + 1) % VOCAB for t in ids[at + keep : at + BLOCK]]
        draft.commit(target.step([*right, *wrong], at).read, keep)
        at += keep
    assert worst < 1e-4


def test_short_proposals_are_the_start_of_long_ones(tmp_path: Path) -> None:
    """A block always has its trained size, even if fewer tokens are requested."""
    pair, ids = make(tmp_path, "zlab"), build.prompt(2 * WINDOW, VOCAB)
    target, draft, _ = read(pair, ids)
    build.prefill(target, draft, ids[:-1])
    whole = draft.propose(ids[-1], len(ids) - 1, BLOCK - 1, build.Recorder())
    for count in range(1, BLOCK - 1):
        assert draft.propose(ids[-1], len(ids) - 1, count, build.Recorder()) == whole[:count]


def tap_below(draft: Any) -> None:
    draft.taps = tuple(i - 1 for i in draft.taps)


def no_hidden_norm(draft: Any) -> None:
    draft.w["enc.output_norm.weight"] = torch.ones_like(draft.w["enc.output_norm.weight"])


def causality(causal: bool) -> Callable[[Any], None]:
    def apply(draft: Any) -> None:
        layers = tuple(replace(s, causal=causal) for s in draft.config.layers)
        draft.config = replace(draft.config, layers=layers)

    return apply


def scale(draft: Any) -> None:
    draft.config = replace(draft.config, embed_scale=8.0 if draft.config.own_embed else 1.0)


def later(draft: Any) -> None:
    propose = draft.propose
    draft.propose = lambda batch, n, pick: propose(
        batch.with_positions(batch.positions + 1), n, pick
    )


def normed_context(draft: Any) -> None:
    ops = draft.ops

    def wrapped(h: torch.Tensor, layers: Any, batch: Batch, kvs: Any) -> None:
        for i, (layer, kv) in enumerate(zip(layers, kvs, strict=True)):
            normed = ops.rms_norm(h, draft.w[f"blk.{i}.attn_norm.weight"], 1e-6)
            ops.qkv(normed, layer, batch, kv, queries=False)

    ops.keys_values = wrapped


def window(draft: Any) -> None:
    draft.config = replace(draft.config, window_from_anchor=not draft.config.window_from_anchor)


def delta_d2t(draft: Any) -> None:
    draft.w["d2t"] = draft.w["d2t"] - torch.arange(len(draft.w["d2t"]))


BUGS = {
    "tap below": tap_below,
    "no hidden norm": no_hidden_norm,
    "all causal": causality(True),
    "none causal": causality(False),
    "embedding scale": scale,
    "position + 1": later,
    "context normed": normed_context,
    "window": window,
}


@pytest.mark.parametrize("name", ["zlab", "speculators-reduced"])
@pytest.mark.parametrize("bug", BUGS)
def test_the_oracle_detects_planted_bugs(tmp_path: Path, name: str, bug: str) -> None:
    pair, ids = make(tmp_path, name), build.prompt(2 * WINDOW, VOCAB)
    target, draft, features = read(pair, ids)
    BUGS[bug](draft.draft)
    target.taps, at = draft.taps, len(ids) - 4
    build.prefill(target, draft, ids[:at])
    if bug == "position + 1":  # this bug leaves an unwritten row
        row = batch_of(target.ops, [(0, at, [0])])
        draft.commit(StepRows(row, torch.zeros(1, 64), features[at - 1 : at]))
    seen = build.Recorder()
    draft.propose(ids[at], at, BLOCK - 1, seen)
    mine, its = torch.stack(seen.rows), pair.oracle(target)(features, ids, at)[1:BLOCK]
    kept = torch.isfinite(mine) & torch.isfinite(its)
    assert float((mine - its)[kept].abs().max()) > 1e-3


def test_the_oracle_detects_relative_ids(tmp_path: Path) -> None:
    pair, ids = make(tmp_path, "speculators-reduced"), build.prompt(WINDOW, VOCAB)
    target, draft, features = read(pair, ids)
    delta_d2t(draft.draft)
    build.prefill(target, draft, ids[:-1])
    seen = build.Recorder()
    draft.propose(ids[-1], len(ids) - 1, BLOCK - 1, seen)
    its = pair.oracle(target)(features, ids, len(ids) - 1)[1:BLOCK]
    assert not torch.equal(torch.isfinite(torch.stack(seen.rows)), torch.isfinite(its))
