"""Prefill of prompts: in chunks of whole blocks if the kernels support the model's shape; a short
last block through the kernels of steps, which take less time for few rows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from g4spec.core import MAX_STEP_ROWS, PROMPT_BLOCK, Batch, Draft, StepRows
from g4spec.errors import InputError
from g4spec.models.drafter import WeightedDrafter
from g4spec.models.gemma4 import Model
from g4spec.runtime.batches import merge_steps
from g4spec.runtime.cuda.build import launch
from g4spec.runtime.cuda.cache.cuda_kv_size import SLACK
from g4spec.runtime.cuda.cache.heads import HEAD_DIMS
from g4spec.runtime.cuda.prefill import plan
from g4spec.runtime.cuda.prefill.draft_ops import DraftOps
from g4spec.runtime.cuda.prefill.long_ops import LongOps
from g4spec.runtime.cuda.prefill.prefill_attention import Chunk, padded
from g4spec.runtime.cuda.prefill.prefill_experts import MAX_EXPERTS, MAX_USED
from g4spec.runtime.cuda.prefill.rotary import STILL, rotating_freqs
from g4spec.runtime.cuda.step import graphs, packed_rows
from g4spec.runtime.cuda.step.recorded import PADDING, Recorded
from g4spec.runtime.cuda.weights.matrix import Matrix

if TYPE_CHECKING:
    from g4spec.backend import Backend
    from g4spec.models.gemma4_config import Config
    from g4spec.runtime.cuda.ops import CudaOps
    from g4spec.runtime.target import Target

LONG_HEADS = (256, 512)
"""Head sizes of targets that chunks support."""


class Reader:
    """Runs prefill of a target. The buffers of long chunks are allocated at first use.

    Args:
        backend: its `ops` compute steps.
        target: its `model`, `caches` and `taps` are used, with at most `chunk` rows per call.
        pool: memory that graphs share; default: their own.
    """

    def __init__(self, backend: Backend, target: Target, pool: graphs.Pool | None = None) -> None:
        self._ops: CudaOps = backend.ops
        self.target = target
        self._long: Model | None = None
        self._draft: tuple[Draft, Draft, int] | None = None
        model, caches, device = target.model, target.caches, self._ops.device
        # The fused kernel adds in another order, and only for 16 rows of a sequence.
        ops = copy.copy(self._ops)
        ops.fused_windows = False
        self._short_model = Model(model.config, model.w, ops)
        self.rows_at_once = plan.rows_at_once(model.config, target.n_ctx)
        arch = "" if ops.portable else launch.arch(device.index)
        self.max_short_block = plan.max_short_block(arch)
        pool = pool or graphs.Pool(self._ops.device)
        self._steps = Recorded(self._step_rows, self.rows_at_once, device, pool)
        self._fits = fits(model.config)
        for spec, freqs in zip(model.config.layers, model.freqs, strict=True):
            rotating_freqs(freqs)
            if spec.kv_from is None and caches[spec.index].rotary_pairs:
                _check_rotary_pairs(spec.index, freqs, caches[spec.index].rotary_pairs)

    def read(
        self,
        slot: int,
        ids: Sequence[int],
        start: int,
        pause: Callable[[], None] | None = None,
    ) -> StepRows:
        """Compute prompt tokens at positions start, start + 1, ..., appending to the slot's caches.

        Args:
            ids: at most `chunk` tokens.
            start: a multiple of PROMPT_BLOCK.
            pause: called once after half of the layers of whole blocks.
        """
        assert 0 < len(ids) <= self.target.chunk and start % PROMPT_BLOCK == 0, (len(ids), start)
        if isinstance(self.target.model.table, Matrix):
            # Before buffers take the room for it, and before graphs contain its address.
            _ = self.target.model.table.weight
        if not self._fits:
            self._ops.without_kernel.add("prompts in long chunks")
            return self._in_steps(slot, ids, start)
        short = self._short_rows(len(ids))
        whole = len(ids) - short
        parts = [self._in_blocks(slot, ids[:whole], start, pause)] if whole else []
        if short:
            parts.append(self._in_steps(slot, ids[whole:], start + whole))
        return parts[0] if len(parts) == 1 else merge_steps(parts)

    def prefill_rows(self, count: int) -> int:
        """Return how many rows of whole blocks take about as long as `count` rows from the start
        of a block on: a longer last block is padded, and SLACK rows of a shorter one count as
        many."""
        short = self._short_rows(count)
        return padded(count - short, PROMPT_BLOCK) + padded(short, SLACK)

    def _short_rows(self, count: int) -> int:
        """Return how many of the last `count` rows of a prompt, from the start of a block on, are
        computed as in a step: those of the last block if it is short."""
        rest = count % PROMPT_BLOCK
        return rest if rest <= self.max_short_block else 0

    def commit(self, draft: Draft, rows: StepRows) -> None:
        """Update a draft with the result of `read`: block by block, or as in steps if kernels do
        not support its heads."""
        if self._draft is None or self._draft[0] is not draft:
            self._draft = draft, *_for_prompts(draft, self._ops)
        _, long, size = self._draft
        count = len(rows.batch)
        for at in range(0, count, size):
            n = min(size, count - at)
            long.commit(rows.rows(at, at + n, (n,)), self._ops.ids([n - 1]))

    def _chunk_model(self) -> Model:
        """Return the target's model with the ops for chunks, created at first use."""
        target = self.target
        long = LongOps(self._ops, target.config, target.chunk, target.n_ctx)
        return Model(target.config, target.model.w, long)

    def _in_blocks(
        self, slot: int, ids: Sequence[int], start: int, pause: Callable[[], None] | None
    ) -> StepRows:
        """Compute whole blocks, the last one padded."""
        self._long = self._long or self._chunk_model()
        count, rows = len(ids), padded(len(ids), PROMPT_BLOCK)
        padding = [PADDING] * (rows - count)
        batch = self._batch(slot, [*ids, *padding], start)
        chunk = Chunk(batch.ids, batch.positions, batch.slots, batch.sizes, slot, start, count)
        read = self._forward(self._long, chunk, pause)
        return read if rows == count else read.rows(0, count, (count,))

    def _in_steps(self, slot: int, ids: Sequence[int], start: int) -> StepRows:
        """Compute at most `rows_at_once` rows at a time with the kernels of steps, padded to whole
        groups of MAX_STEP_ROWS rows."""
        parts, most = [], self.rows_at_once
        for at in range(0, len(ids), most):
            part = list(ids[at : at + most])
            padding = [PADDING] * (-len(part) % MAX_STEP_ROWS)
            batch, outputs = self._steps([(slot, start + at, part + padding)])
            rows = StepRows(batch, *outputs).rows(0, len(part), (len(part),))
            parts.append(rows if len(ids) <= most else rows.clone())
        return merge_steps(parts)

    def _step_rows(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        rows = self._forward(self._short_model, batch)
        return rows.hidden, rows.taps

    def _forward(
        self, model: Model, batch: Batch, pause: Callable[[], None] | None = None
    ) -> StepRows:
        hidden, tapped = model.forward(batch, self.target.caches, self.target.taps, pause)
        taps = [tapped[i] for i in self.target.taps]
        joined = torch.cat(taps, dim=1) if taps else hidden.new_empty(len(hidden), 0)
        return StepRows(batch, hidden, joined)

    def _batch(self, slot: int, ids: Sequence[int], start: int) -> Batch:
        tokens = self._ops.ids(list(ids))
        positions = self._ops.positions(start, len(ids))
        return Batch(tokens, positions, torch.full_like(positions, slot), (len(ids),))


def fits(config: Config) -> bool:
    """Return whether long chunks support this target: their kernels read rows by vectors of 4
    values and inner values by vectors of 8, and route to a bounded number of experts."""
    widths = [w for s in config.layers for w in (s.n_ff, s.n_ff_expert, s.n_ple)]
    return (
        packed_rows.fits(config.n_embd)
        and all(width % 8 == 0 for width in widths)
        and all(s.head_dim in LONG_HEADS for s in config.layers)
        and all(s.n_expert <= MAX_EXPERTS and s.n_expert_used <= MAX_USED for s in config.layers)
    )


def _for_prompts(draft: Draft, ops: CudaOps) -> tuple[Draft, int]:
    """Return a copy of the draft that shares its state and caches but has ops for prompts, and the
    number of rows it takes at a time."""
    if not isinstance(draft, WeightedDrafter):
        return draft, PROMPT_BLOCK
    if not all(kv.head_dim in HEAD_DIMS for kv in draft.caches):
        return draft, MAX_STEP_ROWS
    long = copy.copy(draft)
    long.ops = DraftOps(ops)
    return long, PROMPT_BLOCK


def _check_rotary_pairs(layer: int, freqs: torch.Tensor, most: int) -> None:
    """Raise an error if more pairs rotate than the layer's cache stores."""
    beyond = int((freqs[most:] > STILL).sum())
    if beyond:
        raise InputError(
            f"rope_freqs.weight, layer {layer}",
            expected=f"rotation of at most the first {most} pairs of a head",
            found=f"{beyond} more pairs that rotate",
            fix="convert the file again (g4spec convert)",
        )
