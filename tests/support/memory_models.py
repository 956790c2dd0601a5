"""Small random models built in memory, for tests that need no file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from g4spec.core import CacheShape
from g4spec.models import assistant, dflash, gemma4
from g4spec.models.spec import LayerSpec, TensorSpec
from g4spec.runtime.target import Target
from tests.support.one_sequence import make_target

V, H, WINDOW = 160, 48, 24


def layer(i: int, full: bool, **kw: Any) -> LayerSpec:
    kw = {
        "window": None if full else WINDOW,
        "n_head": 4,
        "n_kv": 1 if full else 2,
        "head_dim": 32 if full else 16,
        "n_ff": 96,
        "rope_base": 1e6 if full else 1e4,
        "rope_partial": 0.25 if full else 1.0,
        "v_from_k": full,
    } | kw
    return LayerSpec(index=i, **kw)


def target_config(n_layer: int = 6) -> gemma4.Config:
    layers = tuple(layer(i, full=i % 3 == 2) for i in range(n_layer))
    return gemma4.Config(V, H, 4096, 1e-6, 30.0, layers)


def weights(specs: list[TensorSpec], seed: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    out = {}
    for spec in specs:
        if spec.make == "rope_freqs":
            n = spec.shape[0]
            out[spec.name] = torch.tensor([1.0] * (n // 4) + [1e30] * (n - n // 4))
        elif spec.role == "vector":
            out[spec.name] = 1.0 + 0.1 * torch.randn(spec.shape, generator=g)
        elif spec.role != "index":
            std = scale if spec.role == "embed" else 1.5 / math.sqrt(spec.shape[1])
            out[spec.name] = std * torch.randn(spec.shape, generator=g)
    return out


def target(seed: int = 0, n_ctx: int = 512, chunk: int = 64) -> Target:
    config = target_config()
    return make_target(config, weights(gemma4.tensors(config), seed, 0.3), n_ctx, chunk)


def caches(shapes: Sequence[CacheShape], on: Target) -> list[Any]:
    """Return empty caches of a draft for the target's slots and pages."""
    ring_slack = on.backend.ring_slack(on.chunk)
    return [on.backend.cache(shape, on.space, ring_slack) for shape in shapes]


def dflash_config(**kw: Any) -> dflash.Config:
    layers = tuple(
        layer(i, full=i == 1, n_kv=2, head_dim=16, rope_base=1e4, v_from_k=False, causal=i == 0)
        for i in range(2)
    )
    kw = {
        "n_vocab": V,
        "n_embd": H,
        "n_ctx": 4096,
        "eps": 1e-6,
        "softcap": 0.0,
        "layers": layers,
        "target_layers": (1, 3, 6),
        "block_size": 8,
        "mask_token": 4,
        "embed_scale": math.sqrt(H),
        "own_embed": False,
        "own_head": False,
        "n_draft": None,
        "window_from_anchor": False,
    } | kw
    return dflash.Config(**kw)


def draft(kind: Any, config: Any, on: Target, seed: int, window: int | None = None) -> Any:
    """Build a draft of `config` for target `on` and set the target's taps."""
    w = weights(kind.tensors(config), seed, 0.3)
    if config.n_draft:
        w["d2t"] = torch.randperm(V, generator=torch.Generator().manual_seed(seed))
        w["d2t"] = w["d2t"][: config.n_draft].sort().values
    kv = caches(kind.caches(config, window), on)
    on.taps = config.target_layers
    return kind.Drafter(config, w, on.ops, on, None, kv, on.n_states, window)


def dflash_draft(on: Target, window: int | None = None, **kw: Any) -> dflash.Drafter:
    drafter: dflash.Drafter = draft(dflash, dflash_config(**kw), on, 1, window)
    return drafter


class _Arrays:
    """Fake of the GGUF file that holds an assistant's centroid head."""

    def __init__(self, **arrays: Any) -> None:
        self.arrays = arrays

    def number_array(self, key: str) -> Any:
        return self.arrays[key.rsplit(".", 1)[1]]


def assistant_draft(on: Target, seed: int = 2, n_centroids: int = 0) -> assistant.Drafter:
    h = 32
    layers = tuple(layer(i, full=i == 3, n_ff=64, v_from_k=False) for i in range(4))
    body = gemma4.Config(V, h, 4096, 1e-6, 0.0, layers, arch=assistant.ARCH)
    config = assistant.Config(body, H, n_centroids, 3 if n_centroids else 0)
    g = torch.Generator().manual_seed(seed)
    file = _Arrays(
        centroids=torch.randn(n_centroids * h, generator=g).numpy(),
        token_ordering=torch.randperm(V, generator=g).to(torch.int32).numpy(),
    )
    on.taps = ()
    return assistant.Drafter(
        config,
        weights(assistant.tensors(config), seed, 0.3),
        on.ops,
        on,
        file,  # type: ignore[arg-type]
        [],
        on.n_states,
    )
