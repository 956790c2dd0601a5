"""EAGLE-3 and P-EAGLE drafts compared with the speculators package, from converted files.

The package's forward pass is the training pass: every position runs ahead of the text, and each
step reads the text's next token. If it reads drafted tokens instead, the anchor's row is a
proposal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from g4spec.convert import convert
from g4spec.gguf import GGUF
from g4spec.runtime.engine import Engine
from tests.oracle import build, drafts
from tests.support import tiny, tiny_drafts
from tests.support.one_sequence import claim_slot
from tests.support.selection import sample

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

WINDOW, VOCAB, DRAFTED = 16, 512, 4
TARGET: dict[str, Any] = {
    "layers": 6,
    "period": 3,
    "window": WINDOW,
    "vocab": VOCAB,
    "dtype": "F32",
    "nested": False,
}
CASES: dict[str, dict[str, Any]] = {
    "redhat": {},
    "residual-before-norm": {"before_residual": None, "draft_vocab": None},
    "norm-before-fc": {"before_fc": True, "before_residual": False},
    "norm-for-each-feature": {"fc_norm": True},
    "feedback-after-norm": {"norm_output": True},
    "four-features": {"taps": (1, 2, 4, 5)},
    "qwen": {"qwen": True},
    "two-layers": {"layers": 2},
    "window": {"window": WINDOW},
    "window-qwen-two-layers": {"window": WINDOW, "qwen": True, "layers": 2},
    "target's table": {"embed": False},
}
PARALLEL: dict[str, dict[str, Any]] = {
    "p-eagle": {"depths": DRAFTED},
    "p-eagle-window": {"depths": DRAFTED, "window": WINDOW, "before_fc": True},
    "p-eagle-qwen": {"depths": DRAFTED, "qwen": True, "fc_norm": True, "layers": 2},
}


def read_model(folder: Path, table: torch.Tensor) -> Any:
    """Return the package's model; `table` [V, H] replaces an embedding that is not stored."""
    from speculators.models import eagle3, peagle
    from transformers import LlamaConfig, Qwen3Config

    raw = build.config(folder)
    parallel = raw["speculators_model_type"] == "peagle"
    config_class: Any = peagle.PEagleSpeculatorConfig if parallel else eagle3.Eagle3SpeculatorConfig
    inner = {k: v for k, v in raw["transformer_layer_config"].items() if k != "model_type"}
    layer: Any = (
        Qwen3Config if raw["transformer_layer_config"]["model_type"] == "qwen3" else LlamaConfig
    )(**inner)
    layer._attn_implementation = "eager"
    known = set(config_class.model_fields) - {"transformer_layer_config", "speculators_config"}
    settings = {k: v for k, v in raw.items() if k in known}
    model: Any = (peagle.PEagleDraftModel if parallel else eagle3.Eagle3DraftModel)(
        config_class(transformer_layer_config=layer, **settings)
    )
    stored = {"embed_tokens.weight": table} | build.tensors(folder, ("model.", ""))
    missing, unexpected = model.load_state_dict(stored, strict=False)
    assert not unexpected, unexpected
    assert all(m.startswith("verifier_") for m in missing), missing
    model.verifier_lm_head.weight.data.zero_()
    return model.float().eval()


def heads_of(model: Any, run: Callable[[], Any]) -> list[torch.Tensor]:
    """Return the outputs of the model's head during `run`, each [rows, D]."""
    kept: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda m, i, out: kept.append(out[0]))
    try:
        with torch.no_grad():
            run()
    finally:
        hook.remove()
    return kept


def wide(model: Any, z: torch.Tensor) -> torch.Tensor:
    if model.d2t is None:
        return z
    out = torch.full((len(z), VOCAB), -torch.inf)
    out[:, torch.arange(len(model.d2t)) + model.d2t] = z
    return out


def chain(model: Any) -> drafts.Oracle:
    """Run EAGLE-3: token `i` of the shifted text is paired with the feature before it."""

    def oracle(features: torch.Tensor, ids: list[int], at: int, drafted: list[int]) -> torch.Tensor:
        text = torch.tensor([[*ids[1 : at + 1], *drafted]])
        padded = torch.zeros(1, text.shape[1], features.shape[1])
        padded[0, :at] = features[:at]
        seen = heads_of(
            model, lambda: model(padded, text, torch.zeros_like(text), ttt_steps=len(drafted))
        )
        return wide(model, torch.cat([rows[at - 1 : at] for rows in seen]))

    return oracle


def parallel(model: Any) -> drafts.Oracle:
    """Run P-EAGLE: all tokens so far, and one rollout at the anchor."""
    from speculators.models.peagle import core as peagle_core

    def oracle(features: torch.Tensor, ids: list[int], at: int, drafted: list[int]) -> torch.Tensor:
        count = len(drafted)
        total = at + count
        anchors = torch.tensor([*range(at), *[at - 1] * (count - 1)])
        depth = torch.tensor([*[0] * at, *range(1, count)])
        padded = torch.zeros(1, total, features.shape[1])
        padded[0, :at] = features[:at]
        text = torch.tensor([[*ids[1 : at + 1], *[0] * count]])
        kept = peagle_core.generate_cod_sample_indices, peagle_core.compute_metrics
        peagle_core.generate_cod_sample_indices = lambda **kw: (anchors, depth)
        peagle_core.compute_metrics = lambda **kw: (None, {})
        try:
            seen = heads_of(
                model,
                lambda: model(
                    padded,
                    text[:, :total],
                    torch.zeros(1, total, dtype=torch.long),
                    verifier_last_hidden_states=padded[..., : model.hidden_size],
                    num_depths=count,
                ),
            )
        finally:
            peagle_core.generate_cod_sample_indices, peagle_core.compute_metrics = kept
        return wide(model, seen[0][at - 1 :])

    return oracle


class Opened(drafts.Pair):
    """Converted files, opened anew for each reading of the text."""

    def __init__(
        self, folder: Path, chunk: int = 64, bound: int | None = None, **options: Any
    ) -> None:
        on = tiny.target(folder / "target", **TARGET)
        self.folder = tiny_drafts.eagle3(folder / "draft", on, dtype="F32", **options)
        self.files = folder / "target.gguf", folder / "draft.gguf"
        convert(on, self.files[0], type="f32")
        convert(self.folder, self.files[1], target=on, type="f32")
        self.chunk, self.bound = chunk, bound

    def open(self) -> tuple[Any, Any]:
        engine = Engine.load(
            *self.files, n_ctx=build.CTX, chunk=self.chunk, draft_window=self.bound
        )
        assert engine.draft is not None
        engine.draft.max_tokens = min(engine.draft.max_tokens, DRAFTED)
        return claim_slot(engine)

    def oracle(self) -> drafts.Oracle:
        table = self.open()[0].model.w["token_embd.weight"]
        model = read_model(self.folder, table)
        return parallel(model) if "mask_token_id" in build.config(self.folder) else chain(model)


@pytest.mark.parametrize("name", sample([*CASES, *PARALLEL], 2))
def test_every_anchor(tmp_path: Path, name: str) -> None:
    """The text is three and a half windows long: rings have wrapped, and its beginning is outside
    of all windows."""
    pair = Opened(tmp_path, 8, **(CASES | PARALLEL)[name])
    ids = build.prompt(7 * WINDOW // 2, VOCAB)
    assert drafts.every_anchor(pair, pair.oracle(), ids) < 1e-4


@pytest.mark.parametrize("name", ["redhat", "window-qwen-two-layers", "p-eagle-window"])
@pytest.mark.parametrize("chunk", sample([1, 7, 64], 1))
def test_after_partial_rejection(tmp_path: Path, name: str, chunk: int) -> None:
    pair = Opened(tmp_path, chunk, **(CASES | PARALLEL)[name])
    ids = build.prompt(5 * WINDOW, VOCAB, 3)
    assert drafts.after_rejections(pair, pair.oracle(), ids) < 1e-4


def test_draft_window_limits_full_layers(tmp_path: Path) -> None:
    """With `--draft-window`, a full layer equals a sliding one of the same configuration."""
    pair = Opened(tmp_path, 8, WINDOW)
    model = read_model(pair.folder, torch.zeros(VOCAB, 64))
    model.sliding_window, model.sliding_window_indices = WINDOW, [0]
    model.uses_sliding_window_attn, model.uses_full_attn = True, False
    ids = build.prompt(7 * WINDOW // 2, VOCAB)
    assert drafts.every_anchor(pair, chain(model), ids) < 1e-4


def test_specforge_is_the_same_draft(tmp_path: Path) -> None:
    on = tiny.target(tmp_path / "target", **TARGET)
    for layout in ("speculators", "specforge"):
        options: dict[str, Any] = {"layout": layout, "before_residual": False}
        tiny_drafts.eagle3(tmp_path / layout, on, **options)
        convert(tmp_path / layout, tmp_path / f"{layout}.gguf", target=on)
    with GGUF(tmp_path / "speculators.gguf") as a, GGUF(tmp_path / "specforge.gguf") as b:
        assert set(a.tensors) == set(b.tensors) and set(a) == set(b)
        assert all(a.raw(n).tobytes() == b.raw(n).tobytes() for n in a.tensors)
        assert all(a[k] == b[k] for k in a if k.startswith("eagle3."))


# ---- the oracle detects planted bugs


def change(**fields: Any) -> Callable[[Any], None]:
    def apply(draft: Any) -> None:
        draft.config = replace(draft.config, **fields)

    return apply


def halves(draft: Any) -> None:
    draft.ops.rope_interleaved = draft.ops.rope


BUGS: dict[str, Callable[[Any], None]] = {
    "residual": change(norm_before_residual=False),
    "feedback": change(norm_output=True),
    "rotation": halves,
}


@pytest.mark.parametrize("bug", BUGS)
def test_the_oracle_detects_planted_bugs(tmp_path: Path, bug: str) -> None:
    pair, ids = Opened(tmp_path), build.prompt(2 * WINDOW, VOCAB)
    target, draft = pair.open()
    features = torch.cat([r.taps for r in target.prefill(ids)])
    BUGS[bug](draft.draft)
    build.prefill(target, draft, ids[:-1])
    seen = build.Recorder()
    drafted = draft.propose(ids[-1], len(ids) - 1, DRAFTED, seen)
    its = pair.oracle()(features, ids, len(ids) - 1, drafted)
    assert float((torch.stack(seen.rows) - its)[torch.isfinite(its)].abs().max()) > 1e-3
