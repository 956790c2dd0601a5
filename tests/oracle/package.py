"""Runs the DFlash model of the speculators package on one block: its layers, head and mask.

It is imported where it is used: only the worker that runs these tests waits for it.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from g4spec.runtime.target import Target
from tests.oracle import build


def layer_config(raw: dict[str, Any]) -> Any:
    """Return the configuration of the layers. Eager attention takes an additive mask."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Config

    config = Qwen3Config(**{k: v for k, v in raw.items() if k != "model_type"})
    config._attn_implementation = "eager"
    return config


def _model(
    inner: dict[str, Any],
    stored: dict[str, torch.Tensor],
    model_class: Any = None,
    config_class: Any = None,
    **settings: Any,
) -> Any:
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig

    settings = {"architectures": ["DFlashSpeculator"]} | settings
    config = (config_class or DFlashSpeculatorConfig)(
        transformer_layer_config=layer_config(inner), **settings
    )
    model = (model_class or DFlashDraftModel)(config)
    missing, unexpected = model.load_state_dict(stored, strict=False)
    assert not unexpected, unexpected
    assert all(m.startswith("verifier_") for m in missing), missing
    model.verifier_lm_head.weight.data.zero_()  # only used in the loss
    return model.float().eval()


def speculators(folder: Path) -> Any:
    """Return the package's model of a checkpoint in its own layout."""
    raw = build.config(folder)
    keys = (
        "draft_vocab_size",
        "block_size",
        "aux_hidden_state_layer_ids",
        "mask_token_id",
        "sliding_window_non_causal",
        "sample_from_anchor",
    )
    return _model(
        raw["transformer_layer_config"],
        build.tensors(folder, ("model.", "")),
        **{k: raw[k] for k in keys},
    )


def zlab(
    folder: Path, target: Target, model_class: Any = None, config_class: Any = None, **settings: Any
) -> Any:
    """Return the package's model with the weights of a z-lab checkpoint and the target's embedding
    table: times sqrt(H) as embedding, unscaled as output projection."""
    raw = build.config(folder)
    table = target.model.w["token_embd.weight"]
    stored = build.tensors(folder, ("model.", ""))
    stored["embed_tokens.weight"] = table * math.sqrt(table.shape[1])
    stored["lm_head.weight"] = table
    inner = raw["dflash_config"]
    return _model(
        {k: v for k, v in raw.items() if k not in ("dflash_config", "architectures")},
        stored,
        model_class,
        config_class,
        draft_vocab_size=raw["vocab_size"],
        block_size=raw["block_size"],
        aux_hidden_state_layer_ids=[i + 1 for i in inner["target_layer_ids"]],
        mask_token_id=inner["mask_token_id"],
        sliding_window_non_causal=inner.get("causal") is False,
        **settings,
    )


def block(
    model: Any,
    features: torch.Tensor,
    ids: list[int],
    anchor: int,
    per_row_window: bool = False,
    softcap: float = 0.0,
    full_window: int | None = None,
) -> torch.Tensor:
    """Return logits [B, D] of the block that starts at position `anchor`, over the draft's
    vocabulary.

    Args:
        features: target features [n, taps * H]; only those of positions before the anchor are used.
        ids: the text; only the token at `anchor` is used.
        per_row_window: count a sliding layer's window from each row, as engines run z-lab drafts,
            instead of from the anchor, as the package trains.
        softcap: cap of the logits; 0 for none.
        full_window: number of positions before the anchor that full layers attend to; None: all.
    """
    total = anchor + 2 * model.block_size + 1  # the package allows no anchor in the last block
    padded = torch.zeros(1, total, features.shape[1])
    padded[0, :anchor] = features[:anchor]
    token_ids = torch.zeros(1, total, dtype=torch.long)
    token_ids[0, anchor] = ids[anchor]
    chosen = torch.zeros(1, total)
    chosen[0, anchor] = 1
    documents = torch.zeros(1, total, dtype=torch.long)
    model._create_mask_fn = _float_mask
    make = model._create_attention_mask
    model._create_attention_mask = lambda **kw: _narrow(
        make(**kw), model.block_size, per_row_window, full_window, **kw
    )
    try:
        with torch.no_grad():
            _, logits, *_ = model._backbone_forward(
                padded,
                token_ids,
                chosen,
                padded[..., : model.hidden_size],
                documents,
                max_anchors=1,
            )
    finally:
        model._create_attention_mask = make
    z = logits[0]
    return softcap * torch.tanh(z / softcap) if softcap else z


def _float_mask(
    mask_mod: Any, *, Q_LEN: int, KV_LEN: int, device: Any, **batch: None
) -> torch.Tensor:
    """Evaluate a mask of the package at all places at once, which is faster than by `torch.vmap`:
    0, or -inf where a query does not see a key."""
    q, kv = (torch.arange(n, device=device) for n in (Q_LEN, KV_LEN))
    seen = mask_mod(q.new_zeros(()), q.new_zeros(()), q[:, None], kv[None, :])
    return torch.zeros(1, 1, Q_LEN, KV_LEN, device=device).masked_fill(~seen, -math.inf)


def _narrow(
    mask: torch.Tensor, size: int, per_row: bool, full_window: int | None, **kw: Any
) -> torch.Tensor:
    """Restrict `mask` [1, 1, block, total + block] to the requested windows."""
    window = kw.get("sliding_window")
    anchor, total = int(kw["anchor_positions"][0]), kw["total_seq_len"]
    column = torch.cat([torch.arange(total), anchor + torch.arange(size)])
    row = anchor + torch.arange(size)
    if window is None and full_window is not None:
        return mask.masked_fill(column[None, :] < anchor - full_window, -math.inf)
    if window is not None and per_row:
        return mask.masked_fill(column[None, :] <= row[:, None] - window, -math.inf)
    return mask
