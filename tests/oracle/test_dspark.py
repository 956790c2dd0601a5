"""DSpark drafts compared with the speculators package; DeepSpec's, with Gemma 4 layers, compared
with layers of transformers; and plain DFlash drafts that draft from the anchor's row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from g4spec.models import dspark
from tests.oracle import build, drafts, package
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
    "vanilla": {},
    "vanilla-bonus": {"from_anchor": False},
    "vanilla-full-vocabulary": {"draft_vocab": None, "window": None},
    "vanilla-key-missing": {"from_anchor": None, "non_causal": True},
    "gated": {"head": "gated"},
    "gated-bonus": {"head": "gated", "from_anchor": False},
    "rnn": {"head": "rnn"},
    "rnn-bonus": {"head": "rnn", "from_anchor": False},
    "hidden-confidence": {"confidence": "hidden"},
    "no-confidence": {"confidence": "none"},
    "no-markov": {"rank": 0, "confidence": "hidden", "from_anchor": False},
    "no-heads": {"rank": 0, "confidence": "none"},
}


def read_model(folder: Path, model_class: Any, config_class: Any) -> Any:
    """Return the package's model of a checkpoint in the speculators layout."""
    raw = build.config(folder)
    known = set(config_class.model_fields) - {"transformer_layer_config", "speculators_config"}
    settings = {k: v for k, v in raw.items() if k in known and v is not None}
    model = model_class(
        config_class(
            transformer_layer_config=package.layer_config(raw["transformer_layer_config"]),
            **settings,
        )
    )
    missing, unexpected = model.load_state_dict(build.tensors(folder, ("model.", "")), strict=False)
    assert not unexpected, unexpected
    assert all(m.startswith("verifier_") for m in missing), missing
    model.verifier_lm_head.weight.data.zero_()
    return model.float().eval()


def read_dspark(folder: Path) -> Any:
    from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig

    return read_model(folder, DSparkDraftModel, DSparkSpeculatorConfig)


def rows_and_logits(
    model: Any,
    features: torch.Tensor,
    ids: list[int],
    at: int,
    full_window: int | None = None,
    per_row_window: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the block's rows after the final norm [B, H], and the head's logits [B, D]."""
    kept: list[torch.Tensor] = []
    hook = model.norm.register_forward_hook(lambda m, i, out: kept.append(out[0]))
    try:
        z = package.block(model, features, ids, at, per_row_window, full_window=full_window)
    finally:
        hook.remove()
    return kept[-1], z


def wide(model: Any, z: torch.Tensor) -> torch.Tensor:
    """Return logits over the target's vocabulary."""
    if model.d2t is None:
        return z
    out = torch.full((len(z), VOCAB), -torch.inf)
    out[:, torch.arange(len(model.d2t)) + model.d2t] = z
    return out


def chain(
    model: Any, h: torch.Tensor, z: torch.Tensor, anchor: int, first: int, count: int
) -> tuple[torch.Tensor, list[float]]:
    """Return biased logits and confidences of a greedy path, by the package's block functions.

    `first` is the first row that drafts: 0 if that is the anchor's. The token before row k is at
    index k - first of [anchor, drafted ...]; a row that does not draft has the anchor, too.
    """
    previous, rows, sure = [anchor] * len(h), list[torch.Tensor](), list[float]()
    for k in range(first, first + count):
        ids = torch.tensor([previous])
        row, e = z[k], h[k : k + 1, :0]
        if model.markov_head is not None:
            bias = model.markov_head.block_bias(prev_token_ids=ids, hidden_states=h[None])
            row, e = row + bias[0, k], model.markov_head.prev_embeddings(ids)[0, k : k + 1]
        if model.confidence_head is not None:
            both = model.config.confidence_head_with_markov
            x = torch.cat([h[k : k + 1], e], dim=-1) if both else h[k : k + 1]
            sure.append(float(torch.sigmoid(model.confidence_head(x))))
        rows.append(wide(model, row[None])[0])
        if k + 1 < len(previous):
            previous[k + 1] = int(rows[-1].argmax())
    return torch.stack(rows), sure


def package_oracle(folder: Path, full_window: int | None = None) -> drafts.Oracle:
    model = read_dspark(folder)
    first = 0 if model.config.sample_from_anchor else 1

    @torch.no_grad()
    def oracle(features: torch.Tensor, ids: list[int], at: int, drafted: list[int]) -> torch.Tensor:
        h, z = rows_and_logits(model, features, ids, at, full_window)
        return chain(model, h, z, ids[at], first, len(drafted))[0]

    return oracle


def make(folder: Path, name: str, **more: Any) -> tuple[Path, Path]:
    target = tiny.target(folder / "target", **TARGET)
    options = DRAFT | CASES[name] | more
    return target, tiny_drafts.speculators_dspark(folder / "draft", target, **options)


@pytest.mark.parametrize("name", sample(CASES, 2))
@pytest.mark.parametrize("window", sample([None, 10], 1))
def test_every_anchor(tmp_path: Path, name: str, window: int | None) -> None:
    """The text is five windows long: every ring wraps twice."""
    target, draft = make(tmp_path, name)
    ids = build.prompt(5 * WINDOW, VOCAB)
    pair = drafts.Folders(target, draft, window=window)
    assert drafts.every_anchor(pair, package_oracle(draft, window), ids) < 1e-4


@pytest.mark.parametrize("name", ["vanilla", "rnn-bonus"])
@pytest.mark.parametrize("chunk", sample([1, 7, 64], 1))
def test_after_partial_rejection(tmp_path: Path, name: str, chunk: int) -> None:
    target, draft = make(tmp_path, name)
    ids = build.prompt(6 * WINDOW, VOCAB, 3)
    pair = drafts.Folders(target, draft, chunk)
    assert drafts.after_rejections(pair, package_oracle(draft), ids) < 1e-4


@pytest.mark.parametrize("name", ["vanilla", "rnn-bonus", "hidden-confidence", "no-markov"])
def test_a_proposal_ends_before_the_first_row_of_little_confidence(
    tmp_path: Path, name: str
) -> None:
    target, folder = make(tmp_path, name)
    model, ids = read_dspark(folder), build.prompt(2 * WINDOW, VOCAB)
    first = 0 if model.config.sample_from_anchor else 1
    pair = drafts.Folders(target, folder)
    (on, draft), features = pair.open(), drafts.read_features(pair, ids)
    at = len(ids) - 1
    build.prefill(on, draft, ids[:at])
    with torch.no_grad():
        h, z = rows_and_logits(model, features, ids, at)
        rows, sure = chain(model, h, z, ids[at], first, draft.max_tokens)
    whole = draft.propose(ids[at], at, draft.max_tokens, build.Recorder())
    assert whole == rows.argmax(-1).tolist()
    for cut in sorted(sure):
        for just in (cut - 1e-4, cut + 1e-4):
            draft.config = dspark.backbone.extended(dspark.Config, draft.config, p_min=just)
            kept = next((i for i, c in enumerate(sure) if c < just), len(sure))
            got = draft.propose(ids[at], at, draft.max_tokens, build.Recorder())
            assert got == whole[:kept]


@pytest.mark.parametrize("window", [None, WINDOW])
def test_dflash_from_the_anchor(tmp_path: Path, window: int | None) -> None:
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig

    target = tiny.target(tmp_path / "target", **TARGET)
    options = DRAFT | {"window": window}
    draft = tiny.speculators_dflash(tmp_path / "draft", target, sample_from_anchor=True, **options)
    model = read_model(draft, DFlashDraftModel, DFlashSpeculatorConfig)
    ids = build.prompt(3 * WINDOW, VOCAB)

    def oracle(features: torch.Tensor, ids: list[int], at: int, drafted: list[int]) -> torch.Tensor:
        return wide(model, rows_and_logits(model, features, ids, at)[1])[: len(drafted)]

    assert drafts.every_anchor(drafts.Folders(target, draft), oracle, ids) < 1e-4
    assert build.draft(draft, build.target(target)).max_tokens == BLOCK


# ---- DeepSpec


class DeepSpec:
    """A `Gemma4DSparkModel` composed of transformers' Gemma 4 layers: context keys and values come
    from the fused features, all rows of the block see each other."""

    def __init__(self, folder: Path) -> None:
        from transformers.models.gemma4 import modeling_gemma4
        from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig

        self.code: Any = modeling_gemma4
        raw = build.config(folder)
        self.w = build.tensors(folder, ("model.", ""))
        self.raw, self.eps = raw, raw["rms_norm_eps"]
        config = Gemma4TextConfig(**{k: v for k, v in raw.items() if k != "model_type"})
        config._attn_implementation = "eager"
        self.rotary = self.code.Gemma4TextRotaryEmbedding(config)
        self.layers = [
            self.code.Gemma4TextDecoderLayer(config, i).eval()
            for i in range(len(raw["layer_types"]))
        ]
        for i, layer in enumerate(self.layers):
            own = f"layers.{i}."
            mine = {k.removeprefix(own): v for k, v in self.w.items() if k.startswith(own)}
            missing, unexpected = layer.load_state_dict(mine, strict=False)
            assert not unexpected and not missing, (missing, unexpected)
        self.markov_head = None
        if raw["markov_rank"]:
            head = dspark_head(raw)
            names = {
                k.removeprefix("markov_head."): v
                for k, v in self.w.items()
                if k.startswith("markov_head.")
            }
            head.load_state_dict(names)
            self.markov_head = head.eval()
        self.confidence_head = self.d2t = None

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        norm = self.code.Gemma4RMSNorm(x.shape[-1], self.eps)
        norm.weight.data = self.w[name]
        return norm(x)

    @torch.no_grad()
    def block(self, features: torch.Tensor, ids: list[int], at: int) -> tuple[Any, Any]:
        size, e = self.raw["block_size"], self.raw["hidden_size"]
        context = self.norm(features[:at] @ self.w["fc.weight"].T, "hidden_norm.weight")
        row = torch.tensor([ids[at]] + [self.raw["mask_token_id"]] * (size - 1))
        x = self.w["embed_tokens.weight"][row] * e**0.5
        places = torch.arange(at + size)[None]
        cos, sin = self.rotary(x[None], places, layer_type="full_attention")
        for layer in self.layers:
            x = self._layer(layer, x, context, cos, sin)
        h = self.norm(x, "norm.weight")
        z = h @ self.w["lm_head.weight"].T
        cap = self.raw["final_logit_softcapping"]
        return h, cap * torch.tanh(z / cap) if cap else z

    def _layer(self, layer: Any, x: Any, context: Any, cos: Any, sin: Any) -> Any:
        a = layer.self_attn
        h = layer.input_layernorm(x)
        both = torch.cat([context, h])
        k = a.k_proj(both).view(len(both), -1, a.head_dim)
        q = a.q_norm(a.q_proj(h).view(len(h), -1, a.head_dim))
        v = k if a.v_proj is None else a.v_proj(both).view(len(both), -1, a.head_dim)
        v = a.v_norm(v).transpose(0, 1)
        rotate = self.code.apply_rotary_pos_emb
        k = rotate(a.k_norm(k)[None], cos, sin, unsqueeze_dim=2)[0].transpose(0, 1)
        q = rotate(q[None], cos[:, -len(h) :], sin[:, -len(h) :], unsqueeze_dim=2)
        q = q[0].transpose(0, 1)
        group = len(q) // len(k)
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        out = torch.softmax(q @ k.transpose(1, 2), -1) @ v  # scale 1
        x = x + layer.post_attention_layernorm(a.o_proj(out.transpose(0, 1).flatten(1)))
        h = layer.mlp(layer.pre_feedforward_layernorm(x))
        return (x + layer.post_feedforward_layernorm(h)) * layer.layer_scalar


def dspark_head(raw: dict[str, Any]) -> Any:
    from speculators.models.dspark.model_definitions import MarkovHead

    vocab = raw["vocab_size"]
    return MarkovHead(
        verifier_vocab_size=vocab,
        draft_vocab_size=vocab,
        markov_rank=raw["markov_rank"],
        hidden_size=raw["hidden_size"],
        head_type=raw["markov_head_type"],
    )


DEEPSPEC: dict[str, dict[str, Any]] = {
    "published": {},
    "uncapped": {"softcap": None, "global_kv": 2},
    "gated": {"head": "gated", "sample_from_anchor": False},
    "nvidia": {"own_values": True, "softcap": None},
}


def deepspec(folder: Path, name: str) -> tuple[drafts.Pair, drafts.Oracle]:
    target = tiny.target(folder / "target", **TARGET)
    draft = tiny_drafts.deepspec_dspark(
        folder / "draft", target, block=BLOCK, dtype="F32", **DEEPSPEC[name]
    )
    model = DeepSpec(draft)
    first = 0 if DEEPSPEC[name].get("sample_from_anchor", True) else 1

    @torch.no_grad()
    def oracle(features: torch.Tensor, ids: list[int], at: int, drafted: list[int]) -> torch.Tensor:
        h, z = model.block(features, ids, at)
        return chain(model, h, z, ids[at], first, len(drafted))[0]

    return drafts.Folders(target, draft, 7), oracle


@pytest.mark.parametrize("name", sample(DEEPSPEC, 2))
def test_deepspec_every_anchor(tmp_path: Path, name: str) -> None:
    pair, oracle = deepspec(tmp_path, name)
    assert drafts.every_anchor(pair, oracle, build.prompt(5 * WINDOW, VOCAB)) < 1e-4


def test_deepspec_after_partial_rejection(tmp_path: Path) -> None:
    pair, oracle = deepspec(tmp_path, "published")
    assert drafts.after_rejections(pair, oracle, build.prompt(6 * WINDOW, VOCAB, 3)) < 1e-4


# ---- the oracle detects planted bugs


def drafting_one_later(draft: Any) -> None:
    draft.config = dspark.backbone.extended(dspark.Config, draft.config, from_anchor=False)


def plain_head(draft: Any) -> None:
    draft.config = dspark.backbone.extended(dspark.Config, draft.config, head="vanilla")


def no_bias(draft: Any) -> None:
    draft.w["markov_w2.weight"] = torch.zeros_like(draft.w["markov_w2.weight"])


def early_cap(draft: Any) -> None:
    draft.config = dspark.backbone.extended(dspark.Config, draft.config, softcap=10.0)


BUGS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "row": ("vanilla", drafting_one_later),
    "gate": ("gated", plain_head),
    "recurrence": ("rnn", plain_head),
    "bias": ("vanilla", no_bias),
    "cap": ("vanilla", early_cap),
}


@pytest.mark.parametrize("bug", BUGS)
def test_the_oracle_detects_planted_bugs(tmp_path: Path, bug: str) -> None:
    name, breaks = BUGS[bug]
    target, folder = make(tmp_path, name)
    ids = build.prompt(2 * WINDOW, VOCAB)
    pair = drafts.Folders(target, folder)
    (on, draft), features = pair.open(), drafts.read_features(pair, ids)
    build.prefill(on, draft, ids[:-1])
    oracle, seen = package_oracle(folder), build.Recorder()
    breaks(draft.draft)
    drafted = draft.propose(ids[-1], len(ids) - 1, BLOCK - 1, seen)
    its = oracle(features, ids, len(ids) - 1, drafted)
    off = (torch.stack(seen.rows) - its)[torch.isfinite(its)]
    assert float(off.abs().max()) > 1e-3
