"""DFlash2 drafts compared with the speculators package: candidates, their scores and the chosen
path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.oracle import build, drafts, package
from tests.oracle.test_dspark import read_model, rows_and_logits
from tests.support import tiny, tiny_drafts
from tests.support.selection import sample

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

WINDOW, VOCAB, BLOCK = 16, 512, 5
TARGET: dict[str, Any] = {
    "layers": 6,
    "period": 3,
    "window": WINDOW,
    "vocab": VOCAB,
    "dtype": "F32",
    "nested": False,
}
DRAFT: dict[str, Any] = {"layers": 3, "block": BLOCK, "window": WINDOW, "dtype": "F32"}
CASES: dict[str, dict[str, Any]] = {
    "speculators": {},
    "causal-windows": {"non_causal": False},
    "from-the-anchor": {"sample_from_anchor": True},
    "three-taps": {"kernel": 3, "group": 8, "top_k": 16, "window": None},
    "as-many-taps-as-rows": {"kernel": BLOCK},
}


def walk(
    model: Any, h: torch.Tensor, z: torch.Tensor, anchor: int, first: int, drafted: list[int]
) -> torch.Tensor:
    """Return scores over the vocabulary of the drafting rows."""
    out = torch.full((len(drafted), z.shape[1]), -torch.inf)
    for j, previous in enumerate([anchor, *drafted[:-1]]):
        k = first + j
        ids, scores = model.candidate_selector.select(z[k], h[k], torch.tensor(previous))
        out[j, ids] = scores
    return out


def oracle_of(folder: Path, target: Any = None) -> drafts.Oracle:
    """Return the package's model; with `target`, for a z-lab checkpoint and that target."""
    from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig

    raw = build.config(folder)
    softcap, scale = 0.0, 1.0
    if target is None:
        model = read_model(folder, DFlash2DraftModel, DFlash2SpeculatorConfig)
    else:
        inner = raw["dflash_config"]
        softcap, scale = raw["final_logit_softcapping"], inner["output_multiplier"]
        keys = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        model = package.zlab(
            folder,
            target,
            DFlash2DraftModel,
            DFlash2SpeculatorConfig,
            **{k: inner[k] for k in keys},
        )
    first = 0 if model.config.sample_from_anchor else 1

    @torch.no_grad()
    def oracle(features: torch.Tensor, ids: list[int], at: int, drafted: list[int]) -> torch.Tensor:
        h, z = rows_and_logits(model, features, ids, at, per_row_window=target is not None)
        z = softcap * torch.tanh(scale * z / softcap) if softcap else z
        return walk(model, h, z, ids[at], first, drafted)

    return oracle


def make(folder: Path, name: str) -> tuple[Path, Path]:
    target = tiny.target(folder / "target", **TARGET)
    options = DRAFT | CASES[name]
    return target, tiny_drafts.speculators_dflash2(folder / "draft", target, **options)


@pytest.mark.parametrize("name", sample(CASES, 2))
def test_every_anchor(tmp_path: Path, name: str) -> None:
    target, draft = make(tmp_path, name)
    ids = build.prompt(5 * WINDOW, VOCAB)
    # Scores reach 26 in float32; the error was 1.0001e-4 on one processor.
    assert drafts.every_anchor(drafts.Folders(target, draft), oracle_of(draft), ids) < 3e-4


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_after_partial_rejection(tmp_path: Path, chunk: int) -> None:
    target, draft = make(tmp_path, "causal-windows")
    pair = drafts.Folders(target, draft, chunk)
    ids = build.prompt(6 * WINDOW, VOCAB, 3)
    assert drafts.after_rejections(pair, oracle_of(draft), ids) < 1e-4


def test_zlab_every_anchor(tmp_path: Path) -> None:
    target = tiny.target(tmp_path / "target", **TARGET)
    draft = tiny_drafts.zlab_dflash2(tmp_path / "draft", target, **DRAFT)
    pair = drafts.Folders(target, draft)
    oracle = oracle_of(draft, pair.open()[0])
    assert drafts.every_anchor(pair, oracle, build.prompt(5 * WINDOW, VOCAB)) < 1e-4


@pytest.mark.parametrize(
    "tensor", ["blk.1.attn_conv_base", "blk.0.ffn_conv_proj.weight", "selector_predecessor.weight"]
)
def test_the_oracle_detects_planted_bugs(tmp_path: Path, tensor: str) -> None:
    target, folder = make(tmp_path, "speculators")
    pair, ids = drafts.Folders(target, folder), build.prompt(2 * WINDOW, VOCAB)
    (on, draft), features = pair.open(), drafts.read_features(pair, ids)
    build.prefill(on, draft, ids[:-1])
    draft.w[tensor] = draft.w[tensor].flip(0)
    seen = build.Recorder()
    drafted = draft.propose(ids[-1], len(ids) - 1, BLOCK - 1, seen)
    its = oracle_of(folder)(features, ids, len(ids) - 1, drafted)
    mine = torch.stack(seen.rows)
    both = torch.isfinite(its) & torch.isfinite(mine)
    assert (
        not torch.equal(torch.isfinite(its), torch.isfinite(mine))
        or float((mine - its)[both].abs().max()) > 1e-3
    )
