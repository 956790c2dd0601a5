"""The target's forward pass compared with transformers' `Gemma4ForCausalLM`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from g4spec.runtime.target import Target
from tests.oracle import build, hf
from tests.support import tiny
from tests.support.selection import sample

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

WINDOW, VOCAB = 16, 512
SHAPE: dict[str, Any] = {"layers": 6, "period": 3, "window": WINDOW, "vocab": VOCAB, "dtype": "F32"}
CASES: dict[str, dict[str, Any]] = {
    "k-is-v": {},
    "own-v": {"k_eq_v": False},
    "one-kv-head": {"kv": 1, "heads": 2},
    "no-softcap": {"softcap": None},
    "per-layer-config": {"per_layer": True},
}
N_NEW = 256


def make(folder: Path, case: dict[str, Any]) -> Path:
    shape: dict[str, Any] = SHAPE | case
    return build.with_large_layers(tiny.target(folder, nested=False, **shape))


def ours(folder: Path, ids: list[int], chunk: int = 64) -> tuple[Target, torch.Tensor]:
    """Return g4spec's logits of every position [T, V]."""
    target = build.target(folder, chunk)
    return target, torch.cat([target.logits(r.hidden) for r in target.prefill(ids)])


def check_logits(folder: Path) -> None:
    """Compare the logits of every position, for several numbers of rows per step."""
    ids = build.prompt(3 * WINDOW + 5, VOCAB)
    with torch.no_grad():
        want = hf.target(folder)(torch.tensor([ids])).logits[0]
    for chunk in (1, 7, 64):
        _, got = ours(folder, ids, chunk)
        assert float((got - want).abs().max()) < 1e-4, chunk


def greedy(folder: Path, ids: list[int], count: int) -> tuple[list[int], list[int]]:
    """Return `count` tokens after a prompt: g4spec's, and the oracle's."""
    target, logits = ours(folder, ids)
    text, row = [], logits[-1]
    for i in range(count):
        text.append(int(row.argmax()))
        row = target.step(text[-1:], len(ids) + i).logits[0]
    assert len(set(text)) > 5, "the text must not repeat one token"
    with torch.no_grad():
        generated = hf.target(folder).generate(
            torch.tensor([ids]), max_new_tokens=count, do_sample=False, eos_token_id=None
        )
    return text, generated[0, len(ids) :].tolist()


@pytest.mark.parametrize("name", CASES)
def test_logits(tmp_path: Path, name: str) -> None:
    check_logits(make(tmp_path, CASES[name]))


@pytest.mark.parametrize("name", sample(["k-is-v", "own-v"], 1))
def test_greedy_text(tmp_path: Path, name: str) -> None:
    """256 tokens; at the first difference, the oracle's two best logits must be a tie."""
    folder, ids = make(tmp_path, CASES[name]), build.prompt(3 * WINDOW + 5, VOCAB, 1)
    text, generated = greedy(folder, ids, N_NEW)
    with torch.no_grad():
        want = hf.target(folder)(torch.tensor([ids + text])).logits[0, len(ids) - 1 : -1]
    top = want.topk(2).values
    tie = top[:, 0] - top[:, 1] < 2e-4
    wrong = [i for i, t in enumerate(text) if int(want[i].argmax()) != t and not tie[i]]
    assert not wrong
    parted = next((i for i, (a, b) in enumerate(zip(text, generated, strict=True)) if a != b), None)
    assert parted is None or tie[parted]


def planted(name: str) -> Callable[[Target], None]:
    """Plant a typical bug in a loaded target."""
    from dataclasses import replace

    def layers(**change: object) -> Callable[[Target], None]:
        def apply(t: Target) -> None:
            t.model.config = replace(
                t.config,
                layers=tuple(
                    replace(s, **{k: v for k, v in change.items() if getattr(s, k) is not None})
                    for s in t.config.layers
                ),
            )

        return apply

    def scalar(t: Target) -> None:
        for key in t.model.w:
            if "layer_output_scale" in key:
                t.model.w[key] = t.model.w[key] * 0 + 1

    def full_rope(t: Target) -> None:
        t.model.freqs = [t.ops.rope_freqs(s.rope_base, s.head_dim) for s in t.config.layers]

    def unscaled(t: Target) -> None:
        t.model.embed = lambda ids: t.model.w["token_embd.weight"][ids]

    return {
        "window + 1": layers(window=WINDOW + 1),
        "layer scalar": scalar,
        "full rotation": full_rope,
        "unscaled embedding": unscaled,
    }[name]


@pytest.mark.parametrize(
    "bug", ["window + 1", "layer scalar", "full rotation", "unscaled embedding"]
)
def test_the_oracle_detects_planted_bugs(tmp_path: Path, bug: str) -> None:
    folder, ids = make(tmp_path, CASES["k-is-v"]), build.prompt(3 * WINDOW + 5, VOCAB)
    with torch.no_grad():
        want = hf.target(folder)(torch.tensor([ids])).logits[0]
    target = build.target(folder)
    planted(bug)(target)
    got = torch.cat([target.logits(r.hidden) for r in target.prefill(ids)])
    assert float((got - want).abs().max()) > 1e-3
