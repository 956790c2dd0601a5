"""Engines over small random models in memory, with a tokenizer of one token per character."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from g4spec.core import Draft
from g4spec.models import gemma4, ngram
from g4spec.runtime.backend import TorchBackend
from g4spec.runtime.engine import Engine
from g4spec.runtime.memory import MemoryPlan, Size
from g4spec.runtime.target import Target
from tests.support import memory_drafts as md
from tests.support import memory_models as mm

Make = Callable[[Target], Draft]
"""Builds a draft for a target and sets the target's taps."""

DRAFTS: dict[str, Make] = {
    "dflash": mm.dflash_draft,
    "dflash-window": lambda t: mm.dflash_draft(t, window=10),
    "dflash-reduced": lambda t: mm.dflash_draft(
        t, own_embed=True, own_head=True, n_draft=64, embed_scale=1.0, window_from_anchor=True
    ),
    "assistant": mm.assistant_draft,
    "assistant-centroids": lambda t: mm.assistant_draft(t, n_centroids=16),
    "ngram": lambda t: ngram.Drafter(),
    "dspark": md.dspark_draft,
    "dspark-rnn-reduced": lambda t: md.dspark_draft(
        t, head="rnn", own_embed=True, own_head=True, n_draft=64, from_anchor=False
    ),
    "dspark-cut": lambda t: md.dspark_draft(t, head="gated", p_min=0.5),
    "dspark-gemma": lambda t: md.dspark_draft(t, gemma=True),
    "dflash2": md.dflash2_draft,
    "dflash2-from-anchor": lambda t: md.dflash2_draft(t, from_anchor=True, kernel=3, top_k=4),
    "eagle3": md.eagle3_draft,
    "eagle3-window": lambda t: md.eagle3_draft(t, window=10, norm_output=True, fc_norm=True),
    "eagle3-two-layers": lambda t: md.eagle3_draft(t, n_layer=2, qk_norm=True, n_draft=None),
    "p-eagle": lambda t: md.eagle3_draft(t, depths=5, sliding=12, norm_before_fc=True),
}
"""Every kind of draft, in every variant that is computed differently."""


class Characters:
    """A tokenizer without a file. A token id is 10 plus the code point, modulo the vocabulary
    size."""

    template = "yes"
    stop_ids = frozenset({1})
    suppress_ids: tuple[int, ...] = ()

    def encode(self, text: str, *, bos: bool = True) -> list[int]:
        return [2] * bos + [10 + ord(c) % (mm.V - 10) for c in text]

    def chat(self, messages: Sequence[Any], *, thinking: bool = False) -> list[int]:
        return [2, 5, *self.encode(messages[0]["content"], bos=False), 6]

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        return "".join(chr(32 + i % 90) for i in ids)

    def stream(self) -> Any:
        class Stream:
            def push(_, ids: Iterable[int]) -> str:
                return self.decode(ids)

            def finish(_) -> str:
                return ""

        return Stream()


def target(
    config: gemma4.Config | None = None,
    *,
    seed: int = 0,
    n_ctx: int = 512,
    chunk: int = 512,
    parallel: int = 1,
    pool: int | None = None,
) -> Target:
    """Return a random target for `parallel` sequences with a pool of `pool` tokens (at least one
    context)."""
    backend, config = TorchBackend(), config or mm.target_config()
    size = Size.of(n_ctx, parallel, pool)
    space = backend.space(size.slots, n_ctx, size.pages)
    weights = mm.weights(gemma4.tensors(config), seed, 0.3)
    return Target(config, weights, backend, space, chunk)


def engine(make: Make | None = None, *, prefix_bytes: int = 0, **shape: Any) -> Engine:
    """Return an engine with a random target and the draft that `make` builds; `shape`: see
    `target`."""
    on = target(**shape)
    draft = make(on) if make else None
    tokenizer: Any = Characters()
    plan = MemoryPlan(on.n_ctx, 1 << 20, 1 << 19, 0, 0, 1 << 18)
    return Engine(on, draft, tokenizer, plan, prefix_bytes)
