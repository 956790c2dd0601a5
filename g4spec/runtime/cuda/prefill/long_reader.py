"""How prompts are read: in chunks of thousands of rows where kernels take the model's shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from g4spec.errors import InputError
from g4spec.runtime.cuda.prefill.prefill_model import LongModel
from g4spec.runtime.cuda.step.packed_rows import MOST

if TYPE_CHECKING:
    from g4spec.runtime.cuda.ops import CudaOps

HEAD_DIMS = (256, 512)


class LongReader:
    """See `Ops.reader`. The buffers of long chunks are made when the first one comes."""

    def __init__(
        self, ops: CudaOps, model: Any, caches: Sequence[Any], n_ctx: int, chunk: int
    ) -> None:
        self._ops, self._model, self._caches = ops, model, caches
        self._n_ctx, self._chunk = n_ctx, min(chunk, n_ctx)
        self._long: LongModel | None = None
        self._fits = all(s.head_dim in HEAD_DIMS for s in model.config.layers)
        for spec, freqs in zip(model.config.layers, model._freqs, strict=True):
            if spec.kv_from is None and caches[spec.index].turning:
                _check_turning(spec.index, freqs, caches[spec.index].turning)

    def __call__(
        self, ids: Sequence[int], start: int, taps: tuple[int, ...]
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Tokens at positions start ...: final-norm rows [T, H], and the taps by layer."""
        if not self._fits:
            return self._in_steps(ids, start, taps)
        if self._long is None:
            self._long = LongModel(self._model, self._caches, self._chunk, self._n_ctx,
                                   self._ops.pairs, self._ops.portable)  # fmt: skip
            if self._ops.portable and self._model.config.layers[0].n_expert:
                self._ops.without_kernel.add("experts of long chunks, one by one")
        return self._long.forward(self._ops.ids(list(ids)), start, taps)

    def _in_steps(
        self, ids: Sequence[int], start: int, taps: tuple[int, ...]
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """16 rows at a time, as a step is computed."""
        self._ops.without_kernel.add("prompts in long chunks")
        hidden, tapped = [], {i: list[torch.Tensor]() for i in taps}
        for at in range(0, len(ids), MOST):
            part = list(ids[at : at + MOST])
            h, t = self._model.forward(
                self._ops.ids(part), self._ops.positions(start + at, len(part)), self._caches, taps
            )
            hidden.append(h)
            for i in taps:
                tapped[i].append(t[i])
        return torch.cat(hidden), {i: torch.cat(parts) for i, parts in tapped.items()}


def _check_turning(layer: int, freqs: torch.Tensor, most: int) -> None:
    """Raise where more of a head turns than the layer's cache was made for."""
    beyond = int((freqs[most:] > 1e-20).sum())
    if beyond:
        raise InputError(
            f"rope_freqs.weight, layer {layer}",
            expected=f"at most the first {most} pairs of a head turn",
            found=f"{beyond} pairs behind them",
            fix="convert the file again (g4spec convert)",
        )
