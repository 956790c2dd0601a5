"""Small random drafts of more kinds, built in memory (see `tests.support.memory_models`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from g4spec.models import dflash2, dspark, eagle3
from g4spec.models import dflash_backbone as backbone
from g4spec.runtime.target import Target
from tests.support import memory_models as mm


def dspark_draft(on: Target, seed: int = 5, **kw: Any) -> dspark.Drafter:
    """Build a DSpark draft; `gemma` gives it Gemma 4 layers."""
    extra = {"head": "vanilla", "rank": 8, "confidence": "both", "from_anchor": True} | kw
    base = mm.dflash_config()
    if extra.get("gemma"):
        layers = tuple(
            replace(s, window=None, causal=False, v_from_k=True, rope_partial=0.25)
            for s in base.layers
        )
        base = mm.dflash_config(layers=layers, own_embed=True, own_head=True, softcap=30.0)
    config = backbone.extended(dspark.Config, base, **extra)
    drafter: dspark.Drafter = mm.draft(dspark, config, on, seed)
    return drafter


def eagle3_draft(on: Target, window: int | None = None, **kw: Any) -> eagle3.Drafter:
    """Build an EAGLE-3 draft with its own embedding and head, or with `depths` a P-EAGLE draft."""
    sliding = kw.pop("sliding", None)
    layers = tuple(
        mm.layer(i, full=False, v_from_k=False, window=sliding) for i in range(kw.pop("n_layer", 1))
    )
    config = eagle3.Config(
        **{
            "n_vocab": mm.V,
            "n_embd": mm.H,
            "n_ctx": 4096,
            "eps": 1e-6,
            "layers": layers,
            "target_layers": (1, 3, 5),
            "n_target": mm.H,
            "own_embed": True,
            "own_head": True,
            "n_draft": 64,
            "norm_before_residual": True,
            "mask_token": 4,
        }
        | kw
    )
    drafter: eagle3.Drafter = mm.draft(eagle3, config, on, 6, window)
    return drafter


def dflash2_draft(on: Target, **kw: Any) -> dflash2.Drafter:
    """Build a DFlash2 draft that uses its target's embedding and head."""
    extra = {"kernel": 2, "group": 16, "rank": 8, "top_k": 6, "softcap": 30.0} | kw
    config = backbone.extended(dflash2.Config, mm.dflash_config(), **extra)
    drafter: dflash2.Drafter = mm.draft(dflash2, config, on, 7)
    return drafter
