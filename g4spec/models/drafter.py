"""What drafts with weights of their own are made from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from g4spec.models.spec import MAX_DRAFT, Chooser, Pick, TargetView

if TYPE_CHECKING:
    import torch

    from g4spec.gguf import GGUF
    from g4spec.ops.kv import LayerKV
    from g4spec.ops.reference import Ops


class WeightedDrafter:
    """A draft with weights (`g4spec.models.spec.Draft`).

    Args:
        config: what the kind's `parse_gguf` returns.
        weights: what `ops.load` returns, by GGUF name.
        file: the draft's GGUF file, for what it holds in its metadata.
        kv: one `LayerKV` per entry of the kind's `caches`.
        window: bound on the context rows that full-attention layers see, or None.
    """

    taps: tuple[int, ...] = ()
    max_tokens = MAX_DRAFT
    recordable = True
    mask = 0

    def __init__(
        self,
        config: Any,
        weights: Mapping[str, Any],
        ops: Ops,
        target: TargetView,
        file: GGUF,
        kv: list[LayerKV],
        window: int | None = None,
    ) -> None:
        self.config, self.w, self.ops, self.target, self.kv = config, weights, ops, target, kv
        self.window = window
        self.taps = getattr(config, "target_layers", ())

    def picking(self, chooser: Chooser, position: int) -> Pick:
        """`chooser` for what is drafted after the token at `position`."""

        def pick(logits: torch.Tensor, at: int) -> torch.Tensor:
            return self.ops.ids(list(chooser.choose_rows(logits, position + 1 + at)))

        return pick

    def gated(self, b: str, h: Any, *, parts: bool) -> torch.Tensor:
        """The feed-forward of a Llama- or Qwen-style layer `b` ("blk.0.") of rows `h` -> [T, H].
        `parts`: as of `linear`."""
        w = self.w
        return self.ops.gated(h, w[b + "ffn_gate.weight"], w[b + "ffn_up.weight"],
                              w[b + "ffn_down.weight"], self.ops.silu, parts=parts)  # fmt: skip
