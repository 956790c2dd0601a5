"""Base class of drafts with weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from g4spec.core import MAX_DRAFT, MAX_STEP_ROWS, Batch, TargetView

if TYPE_CHECKING:
    import torch

    from g4spec.gguf import GGUF
    from g4spec.ops.reference import Ops


class WeightedDrafter:
    """A draft with weights (`g4spec.core.Draft`).

    Args:
        config: result of the kind's `parse_gguf`.
        weights: loaded tensors, by GGUF name.
        file: the draft's GGUF file, for its metadata.
        caches: one KV cache per entry of the kind's `caches`.
        n_slots: number of slots, for state per slot.
        window: limit of the context that full-attention layers see, in rows, or None.
    """

    taps: tuple[int, ...] = ()
    max_tokens = MAX_DRAFT
    rows = MAX_STEP_ROWS
    recordable = True
    mask = 0
    state: tuple[torch.Tensor, ...] = ()

    def __init__(
        self,
        config: Any,
        weights: Mapping[str, Any],
        ops: Ops,
        target: TargetView,
        file: GGUF,
        caches: Sequence[Any],
        n_slots: int = 1,
        window: int | None = None,
    ) -> None:
        self.config, self.w, self.ops, self.target = config, weights, ops, target
        self.caches, self.n_slots, self.window = caches, n_slots, window
        self.taps = getattr(config, "target_layers", ())

    def begin(self, slot: int, ids: Sequence[int] = ()) -> None:
        """Do nothing: cache rows are addressed by position and overwritten."""

    def gated(self, b: str, h: Any, *, partial_sums: bool) -> torch.Tensor:
        """Compute the feed-forward of a Llama- or Qwen-style layer `b` ("blk.0.") for rows `h` ->
        [T, H]. `partial_sums`: see `linear`."""
        w = self.w
        return self.ops.gated(
            h,
            w[b + "ffn_gate.weight"],
            w[b + "ffn_up.weight"],
            w[b + "ffn_down.weight"],
            self.ops.silu,
            partial_sums=partial_sums,
        )


def first_rows(batch: Batch, x: torch.Tensor) -> torch.Tensor:
    """Return the first row of each sequence of rows x [T, ...] -> [S, ...]."""
    return x[:: batch.rows_per_sequence] if batch.rows_per_sequence else x[list(batch.starts)]


def accepted_rows(batch: Batch, x: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
    """Return the row of each sequence after `accepted` [S] drafted tokens, from rows x [T, ...]."""
    if len(batch.sizes) == 1:
        return x[accepted]
    if n := batch.rows_per_sequence:
        return (
            x.view(len(batch.sizes), n, *x.shape[1:])
            .take_along_dim(accepted.view(-1, *[1] * x.dim()), 1)
            .squeeze(1)
        )
    return x[accepted + accepted.new_tensor(batch.starts)]
