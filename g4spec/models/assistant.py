"""Google's MTP assistants for Gemma 4, GGUF architecture `gemma4-assistant`.

Four Gemma 4 layers that compute no keys and values: they read the KV cache of the target, and all
drafted tokens of a step use the position of the anchor. Small assistants have a centroid head: it
scores clusters of tokens first, then the tokens of the best clusters. Upstream's loader refuses the
tensors of this head, so they are stored as `g4spec.*` metadata; upstream uses the dense head.

Sources: transformers `models/gemma4_assistant` and `SinglePositionMultiTokenCandidateGenerator`,
llama.cpp `src/models/gemma4-assistant.cpp`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from g4spec.core import MAX_STEP_ROWS, Batch, CacheShape, Pick, Reach, StepRows
from g4spec.errors import InputError, Unsupported
from g4spec.gguf import GGUF, KV, u32
from g4spec.models import gemma4
from g4spec.models.drafter import WeightedDrafter, accepted_rows, first_rows
from g4spec.models.fields import Fields
from g4spec.models.spec import Checkpoint, LayerSpec, TensorSpec
from g4spec.models.upstream import Limit

if TYPE_CHECKING:
    import torch

ARCH = "gemma4-assistant"
TITLE = "Gemma 4 MTP assistant"
PREFIXES = ("model.",)
ARCHITECTURES = ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM")
DROPS = gemma4.DROPS

LIMITS = (
    Limit(
        "differs",
        "a centroid head",
        "computes logits of the whole vocabulary instead",
        lambda c: c.n_centroids > 0,
    ),
)

CENTROIDS = "g4spec.assistant.centroids"
ORDERING = "g4spec.assistant.token_ordering"
TOP_K = "g4spec.assistant.centroid_top_k"
METADATA_TENSORS = {
    "masked_embedding.centroids.weight": CENTROIDS,
    "masked_embedding.token_ordering": ORDERING,
}
"""Checkpoint tensor -> metadata array: centroids F32 [n * h]; ordering I32 [V], which lists the
token ids of cluster 0, then of cluster 1, ..."""


@dataclass(frozen=True, slots=True)
class Config:
    """Hyperparameters of an assistant.

    Attributes:
        body: its layers, as a Gemma 4 configuration; they have no K and V projections.
        backbone: the target's hidden size.
        n_centroids, centroid_top_k: number of clusters, and number of clusters whose logits are
            computed per row; 0 for a dense head.
    """

    body: gemma4.Config
    backbone: int
    n_centroids: int
    centroid_top_k: int
    arch: str = ARCH

    @property
    def n_vocab(self) -> int:
        return self.body.n_vocab

    @property
    def n_embd(self) -> int:
        return self.body.n_embd

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        return self.body.layers


def claims(checkpoint: Checkpoint) -> bool:
    """Return True if the checkpoint is an MTP assistant."""
    return any(a in ARCHITECTURES for a in checkpoint.config.get("architectures") or ())


def parse_hf(checkpoint: Checkpoint, target: Any) -> Config:
    """Parse `config.json`; `target` is the gemma4.Config of its target."""
    raw = checkpoint.config
    text = dict(raw.get("text_config") or raw)
    # Published files have 0 or no value here, but every layer reads the target's cache.
    text["num_kv_shared_layers"] = 0
    body = gemma4.parse_hf(replace(checkpoint, config=text))
    body = replace(
        body, arch=ARCH, softcap=0.0, layers=tuple(replace(s, v_from_k=False) for s in body.layers)
    )
    f = Fields(raw, "config.json")
    ordered = f.get(bool, "use_ordered_embeddings", False)
    config = Config(
        body=body,
        backbone=f.positive("backbone_hidden_size"),
        n_centroids=f.positive("num_centroids", 2048) if ordered else 0,
        centroid_top_k=f.positive("centroid_intermediate_top_k", 32) if ordered else 0,
    )
    check_pair(config, target)
    return config


def check_pair(config: Config, target: Any) -> None:
    """Raise InputError unless the shapes match this target's KV cache and hidden size, or
    Unsupported if layers have parts that assistants do not have, as transformers does."""
    if any(s.n_ple or s.n_expert for s in config.layers):
        raise Unsupported("an assistant with per-layer embeddings or experts")
    if config.backbone != target.n_embd:
        raise InputError(
            "the assistant's backbone hidden size must equal its target's hidden size",
            expected=target.n_embd,
            found=config.backbone,
            fix="pass the target this assistant was made for",
        )
    if config.n_vocab != target.n_vocab:
        raise InputError(
            "the assistant's vocabulary must equal its target's",
            expected=target.n_vocab,
            found=config.n_vocab,
        )
    for spec in config.layers:
        source = target.layers[target.kv_source(spec.window is not None)]
        found, expected = (spec.n_kv, spec.head_dim), (source.n_kv, source.head_dim)
        if found != expected:
            raise InputError(
                f"assistant layer {spec.index} must match KV heads and head size of "
                f"target layer {source.index}, whose KV cache it reads",
                expected=expected,
                found=found,
            )


def parse_gguf(kv: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]) -> Config:
    """Parse GGUF metadata and tensor shapes (PyTorch order)."""
    body = gemma4.parse_gguf(kv, tensors, ARCH)
    f = Fields(kv, "GGUF metadata")
    centroids, ordering = f.list(float, CENTROIDS, []), f.list(int, ORDERING, [])
    n_centroids = len(centroids) // body.n_embd
    if len(centroids) % body.n_embd:
        raise InputError(
            f"GGUF metadata: {CENTROIDS}: rows of {body.n_embd} values",
            expected=n_centroids * body.n_embd,
            found=len(centroids),
        )
    if not all(map(math.isfinite, centroids)):
        raise InputError(
            f"GGUF metadata: {CENTROIDS} has NaN or infinite values",
            fix="convert the assistant again",
        )
    if n_centroids and len(ordering) != body.n_vocab:
        raise InputError(
            "the centroid head's token ordering must have one entry per token",
            expected=body.n_vocab,
            found=len(ordering),
        )
    if n_centroids and body.n_vocab % n_centroids:
        raise InputError(
            "the centroid head's clusters must be of equal size",
            expected=f"a vocabulary of a multiple of {n_centroids} tokens",
            found=body.n_vocab,
        )
    return Config(
        body=body,
        backbone=f.positive(f"{ARCH}.embedding_length_out"),
        n_centroids=n_centroids,
        centroid_top_k=f.positive(TOP_K, most=n_centroids) if n_centroids else 0,
    )


def metadata(config: Config) -> KV:
    """Return the keys of upstream. The converter adds the arrays of the centroid head."""
    n_layer = len(config.layers)
    kv = gemma4.metadata(config.body)
    kv[f"{ARCH}.attention.shared_kv_layers"] = u32(n_layer)
    kv[f"{ARCH}.embedding_length_out"] = u32(config.backbone)
    kv[f"{ARCH}.nextn_predict_layers"] = u32(n_layer)
    if config.n_centroids:
        kv[TOP_K] = u32(config.centroid_top_k)
    return kv


def metadata_tensors(config: Config) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return checkpoint tensor -> (metadata key, shape) of the centroid head; empty if dense."""
    if not config.n_centroids:
        return {}
    shapes = ((config.n_centroids, config.n_embd), (config.n_vocab,))
    keys = METADATA_TENSORS.items()
    return {name: (key, shape) for (name, key), shape in zip(keys, shapes, strict=True)}


def tensors(config: Config) -> list[TensorSpec]:
    """Return every tensor of the GGUF file, in order."""
    h, b = config.n_embd, config.backbone
    out = [
        TensorSpec("token_embd.weight", (config.n_vocab, h), "embed", "embed_tokens.weight"),
        gemma4.rope_tensor(config.body),
        TensorSpec("nextn.pre_projection.weight", (h, 2 * b), "matrix", "pre_projection.weight"),
        TensorSpec("nextn.post_projection.weight", (b, h), "matrix", "post_projection.weight"),
    ]
    for spec in config.layers:
        out += gemma4.layer_tensors(spec, h, own_kv=False)
    out.append(TensorSpec("output_norm.weight", (h,), "vector", "norm.weight"))
    return out


def token_ids(config: Config, file: GGUF) -> dict[str, Any]:
    """Return metadata key -> token ids stored in metadata."""
    return {ORDERING: file.number_array(ORDERING)} if config.n_centroids else {}


def caches(config: Config, window: int | None) -> list[CacheShape]:
    """Return []: an assistant reads its target's cache."""
    return []


class Drafter(WeightedDrafter):
    """Drafts one token per pass, starting from the target's last hidden row
    (`g4spec.core.Draft`)."""

    name = ARCH
    config: Config
    one_pass = False
    commit_rows = MAX_STEP_ROWS

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        c, ops, file = self.config, self.ops, args[4]
        self.centroids: tuple[torch.Tensor, torch.Tensor] | None = None
        if n := c.n_centroids:  # centroids [n, h], token ids of each cluster [n, V / n]
            centroids = ops.array(file.number_array(CENTROIDS)).view(n, c.n_embd)
            self.centroids = centroids, ops.array(file.number_array(ORDERING)).view(n, -1)
        divisors = self.w["rope_freqs.weight"]
        self._freqs = [
            ops.rope_freqs(s.rope_base, s.head_dim, divisors if s.window is None else None)
            for s in c.layers
        ]
        self._last_hidden = self._freqs[0].new_zeros(self.n_slots, c.backbone)
        self.state = (self._last_hidden,)

    def commit(self, rows: StepRows, accepted: torch.Tensor) -> None:
        """Store the target's final-norm output of the last verified position."""
        slots = first_rows(rows.batch, rows.batch.slots)
        self._last_hidden[slots] = accepted_rows(rows.batch, rows.hidden, accepted)

    def propose(self, batch: Batch, count: int, pick: Pick) -> torch.Tensor:
        """See `g4spec.core.Draft`. Every pass uses the position of the anchor."""
        batch = batch.columns(0, 1)
        hidden, out = self._last_hidden[batch.slots], []
        for j in range(count):
            logits, hidden = self._forward(batch, hidden)
            token = pick(logits, j)
            out.append(token)
            batch = batch.with_ids(token)
        return self.ops.stack_columns(out)

    def _forward(self, batch: Batch, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute one pass over tokens [S] at the positions of the anchors.

        Args:
            hidden: rows [S, B] to concatenate to the token embeddings.

        Returns:
            Logits [S, V] and the hidden rows [S, B] of the next pass.
        """
        ops, w, eps, layers = self.ops, self.w, self.config.body.eps, self.config.layers
        e = self.target.embed(batch.ids)
        x = ops.linear(ops.concat_columns([e, hidden]), w["nextn.pre_projection.weight"])
        norms = [w[f"blk.{s.index}.attn_norm.weight"] for s in layers]
        h = ops.norm_rows(x, norms[0], eps)
        last = batch.positions - 1  # the anchor is not in the target's cache yet
        spans = ops.spans(batch, {Reach.causal(s.window) for s in layers})
        spans = {reach: replace(span, last=last) for reach, span in spans.items()}
        next_norms = [*norms[1:], w["output_norm.weight"]]
        for spec, freqs, next_norm in zip(layers, self._freqs, next_norms, strict=True):
            b = f"blk.{spec.index}."
            cache = self.target.kv(self.target.config.kv_source(spec.window is not None))
            q = ops.qkv(h, gemma4.attention(w, spec, eps, freqs, own_kv=False), batch, cache)
            h = ops.linear(
                ops.attend(q, cache, spans[Reach.causal(spec.window)], 1.0),
                w[b + "attn_output.weight"],
                partial_sums=True,
            )
            x, h = gemma4.finish_layer(ops, w, b, x, h, eps, next_norm, unpacked=spec is layers[-1])
        return self.logits(h), ops.linear(h, w["nextn.post_projection.weight"])

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Compute logits [S, V] of rows [S, h]. A centroid head computes those of its best
        clusters; all others are -inf."""
        table = self.w["token_embd.weight"]
        if self.centroids is None:
            return self.ops.logits(x, table)
        centroids, slots = self.centroids
        best = self.ops.linear(x, centroids).topk(self.config.centroid_top_k).indices
        out = []
        for row, clusters in zip(x.unbind(), best, strict=True):
            ids = slots[clusters].flatten()
            z = self.ops.linear(row[None], self.ops.embed(table, ids, 1.0))
            out.append(self.ops.scatter(z, ids, self.config.n_vocab))
        return self.ops.concat_rows(out)
