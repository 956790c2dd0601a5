"""DFlash2 drafts, GGUF architecture `dflash` with a selector: speculators and z-lab checkpoints.

DFlash2 adds two things to DFlash. Short causal convolutions over the rows of a block, whose
coefficients depend on the row, are applied before and after each sublayer. A selector chooses the
tokens one after the other: it re-scores the top candidates of each row given the previous token.
Reduced vocabularies are not supported.

Sources: speculators 0.9.0 `models/dflash2` (adapted from z-lab/dflash), llama.cpp
`conversion/qwen.py` and `src/models/dflash.cpp` (build_dflash2_conv, build_dflash2_selector).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from g4spec.core import Batch, Pick
from g4spec.errors import InputError, Unsupported
from g4spec.gguf import KV, f32, u32
from g4spec.models import dflash, dflash_drafter
from g4spec.models import dflash_backbone as backbone
from g4spec.models.dflash_backbone import (
    ARCH,
    ARCHS,
    DROPS,
    PREFIXES,
    caches,
    file_notes,
    token_ids,
)
from g4spec.models.fields import Fields
from g4spec.models.spec import Checkpoint, TensorSpec
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
    "file_notes",
    "token_ids",
]

NAME = "dflash2"
TITLE = "DFlash2 draft"
UNIQUE_TENSORS = ("selector_hidden.weight",)
KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
SIDES = 2  # convolutions per sublayer: before and after it
CONVS = (("attn", "attention_conv"), ("ffn", "mlp_conv"))
"""Sublayer in the file -> its convolution in a checkpoint."""


@dataclass(frozen=True, slots=True)
class Config(backbone.Config):
    """Hyperparameters of the backbone, the convolutions and the selector.

    Attributes:
        kernel: rows that a convolution reads: the row itself and the ones before it.
        group: channels that share the row-dependent part of a coefficient.
        rank: width of the selector's tables.
        top_k: candidates per row that the selector re-scores.
        logit_scale: factor on the logits before the softcap.
    """

    kernel: int = 2
    group: int = 16
    rank: int = 256
    top_k: int = 16
    logit_scale: float = 1.0


LIMITS = (
    *backbone.LIMITS,
    dflash.DRAFTS_FROM_ANCHOR,
    Limit(
        "refused",
        "too many candidates for upstream's table of scores",
        "requires top_k (top_k + 1) <= hidden size",
        lambda c: c.n_embd < c.top_k * (c.top_k + 1),
    ),
)


def claims(checkpoint: Checkpoint) -> bool:
    """Return True if the checkpoint is a DFlash2 draft in a supported layout."""
    raw = checkpoint.config
    if "speculators_model_type" in raw:
        return bool(raw["speculators_model_type"] == "dflash2")
    return "dflash_config" in raw and "DFlash2DraftModel" in (raw.get("architectures") or ())


def parse_hf(checkpoint: Checkpoint, target: Any) -> Config:
    """Parse `config.json` and tensor names; `target` is the gemma4.Config of its target."""
    f = Fields(checkpoint.config, "config.json")
    if "speculators_model_type" in checkpoint.config:
        base = dflash.parse_speculators(checkpoint, target, non_causal=True)
        where, scale = f, 1.0
    else:
        where = f.sub("dflash_config")
        base = dflash.parse_zlab(checkpoint, target, *KEYS, dflash.MULTIPLIER)
        scale = where.get(float, dflash.MULTIPLIER, f.get(float, dflash.MULTIPLIER, 1.0))
    kernel, group, rank, top_k = (
        where.positive(key, default) for key, default in zip(KEYS, (2, 16, 256, 16), strict=True)
    )
    config = backbone.extended(
        Config, base, kernel=kernel, group=group, rank=rank, top_k=top_k, logit_scale=scale
    )
    check_pair(config, target)
    return replace(config, arch=architecture(ARCH, LIMITS, config))


def check_pair(config: Config, target: Any) -> None:
    """Raise InputError or Unsupported unless the draft matches this target (its gemma4.Config) and
    is consistent."""
    backbone.check_pair(config, target)
    if config.n_draft is not None:
        raise Unsupported(
            "a DFlash2 draft with a reduced vocabulary: the selector needs all tokens"
        )
    if config.n_embd % config.group:
        raise InputError(
            "the hidden size must be a multiple of conv_group_size",
            expected=f"a multiple of {config.group}",
            found=config.n_embd,
        )
    for what, found, most in (
        ("conv_kernel_size", config.kernel, config.block_size),
        ("selector_top_k", config.top_k, config.n_vocab),
    ):
        if found > most:
            raise InputError(what, expected=f"at most {most}", found=found)


def parse_gguf(kv: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]) -> Config:
    """Parse GGUF metadata and tensor shapes (PyTorch order)."""
    base = backbone.parse_gguf(kv, tensors)
    f = Fields(kv, "GGUF metadata", f"{base.arch}.")
    kernel, group, rank, top_k = (f.positive(key) for key in KEYS)
    return backbone.extended(
        Config,
        base,
        kernel=kernel,
        group=group,
        rank=rank,
        top_k=top_k,
        logit_scale=f.get(float, "logit_scale", 1.0),
    )


def metadata(config: Config) -> KV:
    """Return the GGUF keys of the backbone, the convolutions and the selector."""
    kv = backbone.metadata(config)
    values = (config.kernel, config.group, config.rank, config.top_k)
    for key, value in zip(KEYS, values, strict=True):
        kv[f"{config.arch}.{key}"] = u32(value)
    if config.logit_scale != 1.0:
        kv[f"{config.arch}.logit_scale"] = f32(config.logit_scale)
    return kv


def tensors(config: Config) -> list[TensorSpec]:
    """Return every tensor of the GGUF file, in order."""
    e, v, r, out = config.n_embd, config.n_vocab, config.rank, backbone.tensors(config)
    s = "candidate_selector."
    out += [
        TensorSpec("selector_predecessor.weight", (v, r), "embed", s + "predecessor_codebook"),
        TensorSpec("selector_successor.weight", (v, r), "embed", s + "successor_codebook"),
        TensorSpec("selector_hidden.weight", (r, e), "matrix", s + "hidden_projection.weight"),
    ]
    dynamic = SIDES * config.kernel * (e // config.group)
    for spec in config.layers:
        for name, conv in CONVS:
            b, source = f"blk.{spec.index}.{name}_conv", f"layers.{spec.index}.{conv}"
            out += [
                TensorSpec(
                    f"{b}_base", (SIDES, config.kernel, e), "vector", f"{source}.base_kernel"
                ),
                TensorSpec(
                    f"{b}_proj.weight", (dynamic, e), "matrix", f"{source}.kernel_projection.weight"
                ),
            ]
    return out


class Drafter(dflash_drafter.Drafter):
    """Computes a block in one pass, then selects tokens one by one (`g4spec.core.Draft`)."""

    name = NAME
    config: Config
    unpacked = True
    one_pass = False

    def choose(
        self, rows: torch.Tensor, logits: torch.Tensor, anchors: torch.Tensor, pick: Pick
    ) -> torch.Tensor:
        """Choose tokens [S, count] one by one: add to the logits of each row's top candidates a
        score that depends on its hidden state and the previous token. Arguments: see the base
        class."""
        ops, w, (n, count, n_vocab) = self.ops, self.w, logits.shape
        hidden = self.draft_rows(rows, count).flatten(0, 1)
        gates = ops.linear(hidden, w["selector_hidden.weight"]).view(n, count, -1)
        previous, out = anchors, []
        for j in range(count):
            z = logits[:, j]
            candidates = z.topk(self.config.top_k).indices  # [S, k]
            predecessor = ops.embed(w["selector_predecessor.weight"], previous, 1.0)
            successors = ops.embed(w["selector_successor.weight"], candidates.flatten(), 1.0)
            successors = successors.view(*candidates.shape, -1)
            scores = (successors * (predecessor * gates[:, j])[:, None]).sum(-1)
            chosen = ops.scatter(z.gather(1, candidates) + scores, candidates, n_vocab)
            previous = pick(chosen, j)
            out.append(previous)
        return ops.stack_columns(out)

    def logits(self, hidden: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Compute logits [T, V] of rows [T, H], scaled by `Config.logit_scale` (`scale` is ignored)
        and softcapped."""
        return super().logits(hidden, self.config.logit_scale)

    def before_sublayer(self, name: str, h: Any, batch: Batch) -> tuple[Any, Any]:
        """Convolve the input; also return the coefficients of the convolution after the
        sublayer."""
        c, (first, second) = self.config, self.w[f"{name}_conv_base"]
        delta = self.ops.linear(h, self.w[f"{name}_conv_proj.weight"])
        inner, outer = delta.view(len(h), SIDES, c.kernel, -1).unbind(1)
        return self.ops.convolve(h, first, inner, self.config.block_size), (second, outer)

    def after_sublayer(self, name: str, h: torch.Tensor, coefficients: Any) -> torch.Tensor:
        """Convolve the output."""
        second, outer = coefficients
        return self.ops.convolve(h, second, outer, self.config.block_size)
