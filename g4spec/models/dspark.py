"""DSpark drafts, GGUF architecture `dflash` with a Markov head: speculators and DeepSpec.

A DFlash block with two heads. The Markov head adds a low-rank bias to the logits of each row, which
depends on the previous token, so tokens are chosen one after the other. The confidence head
predicts whether a token will be accepted. Files with a head that upstream does not support (gated,
rnn, confidence from the hidden row alone) get the architecture `dflash-g4spec`, which upstream
refuses.

With `--draft-p-min`, or the key `g4spec.dspark.confidence_cut`, a proposal ends before the first
row of lower confidence. The converter does not write the key: the best minimum depends on what a
rejected row costs on the machine, and without it proposals equal those of the trainer's own code
and of upstream's default.

Sources: speculators 0.9.0 `models/dspark`, llama.cpp `conversion/gemma.py` (Gemma4DSparkModel),
`conversion/qwen.py` (DSparkModel) and `src/models/dflash.cpp` (build_dspark_markov_head).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from g4spec.core import Pick
from g4spec.errors import InputError, Unsupported
from g4spec.gguf import KV, boolean, f32
from g4spec.models import dflash, dflash_drafter, gemma4
from g4spec.models import dflash_backbone as backbone
from g4spec.models.dflash_backbone import (
    ARCH,
    ARCHS,
    DROPS,
    PREFIXES,
    caches,
    check_pair,
    token_ids,
)
from g4spec.models.fields import Fields
from g4spec.models.spec import Checkpoint, LayerSpec, TensorSpec
from g4spec.models.upstream import Limit, architecture

if TYPE_CHECKING:
    import torch

__all__ = [
    "ARCH",
    "ARCHS",
    "DROPS",
    "PREFIXES",
    "Config",
    "Drafter",
    "caches",
    "check_pair",
    "token_ids",
]

NAME = "dspark"
TITLE = "DSpark draft"
UNIQUE_TENSORS = ("markov_w1.weight", "conf_proj.weight")
ALIASES = {"confidence_proj.": "confidence_head.proj."}
ARCHITECTURES = ("Gemma4DSparkModel",)
HEAD_KEYS = (
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
)
P_MIN = "g4spec.dspark.confidence_cut"
SOFTCAP = "final_logit_softcapping"
CONFIDENCE = ("conf_proj.weight", "confidence_head.proj.weight", "confidence_proj.weight")
"""Names of the confidence head in GGUF files and in checkpoints (after a prefix)."""

Head = Literal["none", "vanilla", "gated", "rnn"]
GATES: dict[str, tuple[str, str]] = {
    "gated": ("markov_gate", "markov_head.gate_proj"),
    "rnn": ("markov_joint", "markov_head.joint_proj"),
}
"""Head -> name of its projection in the GGUF file, and in a checkpoint."""


@dataclass(frozen=True, slots=True)
class Config(backbone.Config):
    """Hyperparameters of the backbone and the two heads.

    Attributes:
        head: kind of Markov head. `rank`: width of its table; 0 without one.
        confidence: inputs of the confidence head: "hidden" (hidden row), "both" (hidden row and row
            of the Markov table), or "none" without one.
        p_min: minimum confidence of a drafted token; 0 keeps all.
    """

    head: Head = "vanilla"
    rank: int = 0
    confidence: Literal["none", "hidden", "both"] = "none"
    p_min: float = 0.0


LIMITS = (
    *backbone.LIMITS,
    Limit(
        "differs",
        "logits softcapped before the Markov bias",
        "adds the bias to logits without softcap",
        lambda c: c.softcap > 0 and c.head != "none",
    ),
    Limit(
        "refused",
        "Gemma 4 layers with a separate V projection",
        "does not apply the norm to their values",
        lambda c: c.gemma and any(not s.v_from_k for s in c.layers),
    ),
    Limit(
        "refused",
        "a gated or recurrent Markov head",
        "supports only the plain table",
        lambda c: c.head in GATES,
    ),
    Limit(
        "refused",
        "a confidence head without Markov input",
        "requires the row of the Markov table as input",
        lambda c: c.confidence == "hidden",
    ),
    Limit(
        "refused",
        "drafts that start in the anchor's row, without a Markov head",
        "treats it as a DFlash draft and starts in the next row",
        lambda c: c.from_anchor and c.head == "none",
    ),
)


def claims(checkpoint: Checkpoint) -> bool:
    """Return True if the checkpoint is a DSpark draft in a supported layout."""
    raw = checkpoint.config
    if "speculators_model_type" in raw:
        return bool(raw["speculators_model_type"] == "dspark")
    return any(a in ARCHITECTURES for a in raw.get("architectures") or ())


def parse_hf(checkpoint: Checkpoint, target: Any) -> Config:
    """Parse `config.json` and tensor names; `target` is the gemma4.Config of its target."""
    if "speculators_model_type" in checkpoint.config:
        base = dflash.parse_speculators(checkpoint, target, from_anchor=True)
    else:
        base = _parse_deepspec(checkpoint, target)
    f = Fields(checkpoint.config, "config.json")
    f.require("markov_head_type", ("vanilla", *GATES), "vanilla")
    rank = f.get(int, "markov_rank", 256)
    names = {n.replace(*a) for n in dflash.stripped(checkpoint) for a in ALIASES.items()}
    both = f.get(bool, "confidence_head_with_markov", True)
    if both and rank <= 0 and f.get(bool, "enable_confidence_head", True):
        raise InputError(
            "config.json: confidence_head_with_markov needs markov_rank > 0", found=rank
        )
    confident = f.get(bool, "enable_confidence_head", "confidence_head.proj.weight" in names)
    config = backbone.extended(
        Config,
        base,
        head=f.get(str, "markov_head_type", "vanilla") if rank > 0 else "none",
        rank=max(rank, 0),
        confidence="none" if not confident else "both" if both else "hidden",
    )
    check_pair(config, target)
    return replace(config, arch=architecture(ARCH, LIMITS, config))


def _parse_deepspec(checkpoint: Checkpoint, target: Any) -> backbone.Config:
    """Parse DeepSpec's flat configuration, which uses the keys of Gemma 4."""
    f = Fields(checkpoint.config, "config.json")
    inner = dflash.settings(f, target, *HEAD_KEYS)
    for key in HEAD_KEYS:  # NVIDIA's exports write them twice
        if inner.has(key):
            inner.require(key, (f.raw.get(key),), None)
    where = inner if inner.has("target_layer_ids") else f
    names = dflash.stripped(checkpoint)
    layers = _deepspec_layers(f)
    f.require("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    f.require("draft_vocab_size", (None, f.positive("vocab_size")), None)
    if any(s.window is not None for s in layers):
        raise Unsupported(
            "config.json: a DeepSpec draft with sliding layers: their attention inside "
            "a block is not documented"
        )
    if len({s.v_from_k for s in layers}) > 1:
        raise Unsupported("config.json: a DeepSpec draft with K=V in some layers only")
    window = dflash.window(f, inner) if inner.get(bool, "use_swa", False) else None
    causal = bool(dflash.causality(f, inner))
    return backbone.Config(
        n_vocab=f.positive("vocab_size"),
        n_embd=f.positive("hidden_size"),
        n_ctx=f.positive("max_position_embeddings", target.n_ctx),
        eps=f.get(float, "rms_norm_eps", 1e-6),
        softcap=inner.get(float, SOFTCAP, f.get(float, SOFTCAP, 0.0)),
        layers=tuple(replace(s, window=window, causal=causal) for s in layers),
        target_layers=tuple(i + 1 for i in where.list(int, "target_layer_ids")),
        block_size=(inner if inner.has("block_size") else f).positive("block_size", 7),
        mask_token=(inner if inner.has("mask_token_id") else f).get(int, "mask_token_id"),
        embed_scale=dflash.embedding_scale(f, inner, target),
        own_embed="embed_tokens.weight" in names,
        own_head="lm_head.weight" in names,
        n_draft=None,
        window_from_anchor=False,
        from_anchor=f.get(bool, backbone.FROM_ANCHOR, True),
        gemma=True,
    )


def _deepspec_layers(f: Fields) -> tuple[LayerSpec, ...]:
    """Return the layers of a DeepSpec configuration, which all have their own KV cache.

    `num_kv_shared_layers` is copied from the target (20 in E2B), and the draft has fewer layers.
    DeepSpec's model reads it only to find the layers that `use_double_wide_mlp` widens.
    """
    layers = gemma4.layers_hf(Fields({**f.raw, "num_kv_shared_layers": 0}, f.where))
    n_shared = f.get(int, "num_kv_shared_layers", 0)
    if 0 < n_shared < len(layers) and f.get(bool, "use_double_wide_mlp", False):
        raise Unsupported(
            f"config.json: a DeepSpec draft whose last layers are wider "
            f"(use_double_wide_mlp, num_kv_shared_layers {n_shared})"
        )
    return layers


def parse_gguf(kv: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]) -> Config:
    """Parse GGUF metadata and tensor shapes (PyTorch order)."""
    base = backbone.parse_gguf(kv, tensors)
    table = tensors.get("markov_w1.weight") or (0, 0)
    heads = [head for head, (name, _) in GATES.items() if f"{name}.weight" in tensors]
    wide = (tensors.get("conf_proj.weight") or (0,))[-1]
    f = Fields(kv, "GGUF metadata", f"{base.arch}.")
    return backbone.extended(
        Config,
        base,
        from_anchor=f.get(bool, backbone.FROM_ANCHOR, True),
        head=heads[0] if heads else "vanilla" if table[0] else "none",
        rank=table[-1],
        confidence="none" if not wide else "hidden" if wide == base.n_embd else "both",
        p_min=Fields(kv, "GGUF metadata").get(float, P_MIN, 0.0),
    )


def metadata(config: Config) -> KV:
    """Return the keys of the backbone and of the heads."""
    a = f"{config.arch}."
    kv = backbone.metadata(config)
    kv[a + backbone.FROM_ANCHOR] = boolean(config.from_anchor)
    kv[f"{a}has_confidence_head"] = boolean(config.confidence != "none")
    if config.p_min:
        kv[P_MIN] = f32(config.p_min)
    return kv


def tensors(config: Config) -> list[TensorSpec]:
    """Return every tensor of the GGUF file, in order."""
    e, r, out = config.n_embd, config.rank, backbone.tensors(config)
    if r:
        rows = config.n_draft or config.n_vocab
        out += [
            TensorSpec(
                "markov_w1.weight", (config.n_vocab, r), "embed", "markov_head.markov_w1.weight"
            ),
            TensorSpec("markov_w2.weight", (rows, r), "output", "markov_head.markov_w2.weight"),
        ]
    if config.head in GATES:
        name, source = GATES[config.head]
        shape = (r, e + r) if config.head == "gated" else (3 * r, 2 * r + e)
        out += [
            TensorSpec(f"{name}.weight", shape, "matrix", f"{source}.weight"),
            TensorSpec(f"{name}.bias", shape[:1], "vector", f"{source}.bias"),
        ]
    if config.confidence != "none":
        wide = e + (r if config.confidence == "both" else 0)
        source = "confidence_head.proj"
        out += [
            TensorSpec("conf_proj.weight", (1, wide), "vector", f"{source}.weight"),
            TensorSpec("conf_proj.bias", (1,), "vector", f"{source}.bias"),
        ]
    return out


class Drafter(dflash_drafter.Drafter):
    """Computes a block in one pass, then chooses tokens one by one (`g4spec.core.Draft`)."""

    name = NAME
    config: Config
    one_pass = False

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.recordable = not self._has_p_min

    def choose(
        self, rows: torch.Tensor, logits: torch.Tensor, anchors: torch.Tensor, pick: Pick
    ) -> torch.Tensor:
        """Choose tokens [S, count] from blocks [S, B, H], with a bias that depends on the previous
        token; -1 from the first token on whose confidence is below `p_min`."""
        c, ops, count = self.config, self.ops, logits.shape[1]
        hidden = self.draft_rows(rows, count)
        state, previous, out = self._state(rows, anchors), anchors, []
        ended = anchors < 0
        for j in range(count):
            h, row, e = hidden[:, j].contiguous(), logits[:, j].contiguous(), rows[:, 0, :0]
            if c.rank:
                e = ops.embed(self.w["markov_w1.weight"], previous, 1.0)
                inner, state = self._inner(e, h, state)
                row = row + ops.linear(inner, self.w["markov_w2.weight"])
            previous = pick(self.to_full_vocab(row), j)
            if self._has_p_min:
                ended = ended | (self.confidence(h, e) < c.p_min)
                out.append(previous.masked_fill(ended, -1))
            else:
                out.append(previous)
        return ops.stack_columns(out)

    @property
    def _has_p_min(self) -> bool:
        """True if low confidence ends a proposal."""
        return bool(self.config.p_min) and self.config.confidence != "none"

    def confidence(self, h: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
        """Predict the probability [S] that the tokens of rows h [S, H] are accepted. `e` [S, r]:
        rows of the Markov table."""
        x = self.ops.concat_columns([h, e]) if self.config.confidence == "both" else h
        return self.ops.sigmoid(self._projected(x, "conf_proj"))[:, 0]

    def _state(self, rows: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """Return the recurrent state [S, r] before the first predicting row. The recurrence starts
        in the anchor's row even if that row predicts nothing."""
        state = rows.new_zeros(len(rows), self.config.rank)
        if self.config.head == "rnn" and not self.config.from_anchor:
            e = self.ops.embed(self.w["markov_w1.weight"], anchors, 1.0)
            _, state = self._inner(e, rows[:, 0].contiguous(), state)
        return state

    def _inner(
        self, e: torch.Tensor, h: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the input of `markov_w2` [S, r] and the next recurrent state [S, r]."""
        ops = self.ops
        if self.config.head == "gated":
            return ops.sigmoid(
                self._projected(ops.concat_columns([h, e]), "markov_gate")
            ) * e, state
        if self.config.head == "rnn":
            joint = self._projected(ops.concat_columns([state, e, h]), "markov_joint")
            gate, candidate, output = joint.chunk(3, dim=-1)
            gate = ops.sigmoid(gate)
            state = gate * state + (1.0 - gate) * ops.tanh(candidate)
            return ops.tanh(output), state
        return e, state

    def _projected(self, x: torch.Tensor, name: str) -> torch.Tensor:
        y: torch.Tensor = self.ops.linear(x, self.w[f"{name}.weight"]) + self.w[f"{name}.bias"]
        return y
