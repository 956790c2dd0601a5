"""Attention of layers with a window in one kernel, from the QKV projection to the packed input of
the output projection: see attention_window.cu.

Which layers use it depends on the layer and the GPU, never on the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from g4spec.core import Batch
from g4spec.runtime.cuda.build import launch, nvrtc
from g4spec.runtime.cuda.build.constants import (
    GROUP_ROWS,
    NORM_V,
    WINDOW_GROUP,
    WINDOW_HEAD_DIM,
    WINDOW_MAX_CHUNKS_128,
    WINDOW_MAX_CHUNKS_256,
    WINDOW_TOKENS,
    WINDOW_WARPS,
)
from g4spec.runtime.cuda.build.units import Unit
from g4spec.runtime.cuda.cache.cache_types import TYPES
from g4spec.runtime.cuda.cache.cuda_kv import CudaKV
from g4spec.runtime.cuda.cache.heads import Heads
from g4spec.runtime.cuda.step.attention import AttentionConfig
from g4spec.runtime.cuda.step.attention_chunks import Chunks
from g4spec.runtime.cuda.step.packed_rows import PackedRows, empty

TOKEN_GROUPS = (1, 2)
"""Groups of `WINDOW_TOKENS` tokens that a block may have; two where a step has more tokens."""
MAX_KV_HEADS = 16
"""Maximum number of KV heads, the largest of Gemma: there are counters for so many of
`ranges.MAX_PARALLEL` sequences."""
MAX_CHUNKS = {128: WINDOW_MAX_CHUNKS_128, 256: WINDOW_MAX_CHUNKS_256}
"""Maximum chunks that a step may see, by positions of a chunk."""
FEW_WARPS = (WINDOW_WARPS // 2, WINDOW_WARPS // 4)
"""Warps of a block where there are more blocks than multiprocessors."""

_STATIC = 1024 + 128  # bytes of shared memory that the GPU reserves, and that the kernel declares
_RESERVED = 1024  # bytes of a multiprocessor's shared memory beyond the limit of a block


@dataclass(frozen=True, slots=True)
class ProjectedQkv:
    """Queries, keys and values of the QKV projection, which `attend` norms, rotates and stores.

    Attributes:
        heads: norms and RoPE.
        y: as in `Heads.__call__`.
    """

    heads: Heads
    y: torch.Tensor

    def rows(self, first: int, last: int) -> ProjectedQkv:
        """Return rows first .. last - 1."""
        return ProjectedQkv(self.heads, self.y[..., first:last, :].contiguous())


def takes(heads: Heads, kv: CudaKV | None) -> bool:
    """Return whether the kernel supports this layer and fits on this GPU."""
    if kv is None or kv.window is None or kv.kind != "q8_0":
        return False
    arch = launch.arch(kv.keys.device.index)
    shape = (
        heads.head_dim == WINDOW_HEAD_DIM
        and heads.n_q == WINDOW_GROUP * heads.n_kv
        and heads.n_kv > 0
    )
    if not shape or heads.n_kv > MAX_KV_HEADS or heads.pairs or heads.v_from_k:
        return False
    chunk = _chunk(kv)
    return _chunks(kv) <= MAX_CHUNKS.get(chunk, 0) and arch in _archs(chunk)


def attend(
    q: ProjectedQkv,
    kv: CudaKV,
    batch: Batch,
    first: torch.Tensor,
    last: torch.Tensor,
    scale: float,
    arrived: torch.Tensor,
    at_once: int,
) -> PackedRows:
    """Append the rows' own keys and values to `kv`; then compute softmax(scale * q k) v over
    positions first[t] .. last[t] of each row's slot.

    Args:
        batch: at most 16 rows of each sequence, the same number for all; positions and slots as in
            `attention.attend`.
        first, last: int64 [T], non-decreasing in a sequence, inclusive; last[t] is not before the
            row's own position and not after the last one of its sequence; written like positions.
        arrived: int32 counters, at least 4 n_kv for each sequence, zero; they are zero again
            afterwards.
        at_once: number of multiprocessors; it does not change the result.
    """
    h, count, tokens, sequences = q.heads, len(batch), batch.rows_per_sequence, len(batch.sizes)
    slices = q.y.shape[0] if q.y.dim() == 3 else 1
    assert q.y.shape[-2:] == (count, (h.n_q + 2 * h.n_kv) * WINDOW_HEAD_DIM), (q.y.shape, count)
    launch.assert_lengths(WINDOW_HEAD_DIM, h.q_norm, h.k_norm)
    assert 1 <= tokens <= GROUP_ROWS and not kv.paged, batch.sizes
    chunk, chunks, blocks = _chunk(kv), _chunks(kv), -(-tokens // WINDOW_TOKENS)
    assert len(arrived) >= sequences * blocks * h.n_kv
    y = empty(count, h.n_q * WINDOW_HEAD_DIM, q.y.device)
    token_groups = min(blocks, max(TOKEN_GROUPS))
    room = (
        chunks * -(-blocks // token_groups) * token_groups * h.n_kv * WINDOW_GROUP * WINDOW_TOKENS
    )
    device, kind = q.y.device, torch.float32
    sums = torch.empty(sequences, room, WINDOW_HEAD_DIM, dtype=kind, device=device)
    tops = torch.empty(sequences, room, 2, dtype=kind, device=device)
    total = h.n_kv * blocks * sequences
    turns = max(1, min(chunks, at_once // total))
    few = tokens <= WINDOW_TOKENS and launch.arch(q.y.device.index) in _archs(chunk, few=True)
    warps = _warps(total / at_once) if few else WINDOW_WARPS
    name = instance(chunk, slices, token_groups, warps)
    launch.kernel("attention_window.cu", name, q.y.device.index)(
        (h.n_kv, blocks * sequences, turns),
        32 * warps,
        y=q.y,
        q_norm=h.q_norm,
        k_norm=h.k_norm,
        freqs=h.freqs,
        positions=batch.positions,
        slots=batch.slots,
        first=first,
        last=last,
        keys=kv.keys,
        values=kv.values,
        key_scales=kv.key_scales,
        value_scales=kv.value_scales,
        sums=sums,
        tops=tops,
        arrived=arrived,
        rows=y.data,
        tokens=tokens,
        room=room,
        flags=NORM_V * h.v_norm,
        capacity=kv.capacity,
        eps=h.eps,
        scale=scale,
        shared=shared_bytes(chunk, token_groups, warps),
    )
    return y


def instance(chunk: int, slices: int, token_groups: int, warps: int = WINDOW_WARPS) -> str:
    """Return the name of a kernel of attention_window.cu."""
    return f"attend_window<{chunk}, {slices}, {token_groups}, {warps}>"


def _warps(blocks: float) -> int:
    """Return the warps of a block. With more `blocks` for each multiprocessor they are fewer, so
    that it runs up to four at once."""
    if blocks <= 1:
        return WINDOW_WARPS
    return FEW_WARPS[0] if blocks <= 2 else FEW_WARPS[1]


def _chunk(kv: CudaKV) -> int:
    """Return the positions of a chunk."""
    return 1 << Chunks.of(kv, kv.positions).shift


def _chunks(kv: CudaKV) -> int:
    """Return the maximum number of chunks that the rows of a step see: those of the window before
    the first row, and of as many positions as there are rows."""
    assert kv.window is not None
    return Chunks.of(kv, kv.positions).most(min(kv.window + GROUP_ROWS, kv.positions), kv.positions)


def shared_bytes(chunk: int, token_groups: int, warps: int = WINDOW_WARPS) -> int:
    """Return the bytes of dynamic shared memory: keys and values of a chunk, or with few warps of
    16 positions for each; queries; for each position and row an attention weight and for each 16
    positions two numbers; for each row two more, and what it sees; cosines and sines of a step's
    tokens; weights of two norms; with few warps the step's own keys and values."""
    few, row = warps < WINDOW_WARPS, TYPES["q8_0"].row_bytes(WINDOW_HEAD_DIM)
    shape = AttentionConfig(WINDOW_HEAD_DIM, "q8_0", token_groups)
    padded = shape.stage_bytes[0] // shape.keys
    tile, rows = 16 * warps if few else chunk, WINDOW_GROUP * WINDOW_TOKENS * token_groups
    tokens = WINDOW_TOKENS if few else GROUP_ROWS
    per_row = 2 * WINDOW_HEAD_DIM + 2 * chunk + 2 * 4 * chunk // 16 + 4 + 8
    per_token = WINDOW_HEAD_DIM // 2 * 8 + 2 * row * few
    return 2 * tile * padded + rows * per_row + tokens * per_token + 2 * WINDOW_HEAD_DIM * 4


def _archs(chunk: int, few: bool = False) -> tuple[str, ...]:
    """Return the architectures on which a block with chunks of so many positions fits; or several
    blocks of few warps, `WINDOW_WARPS` in all."""
    most = shared_bytes(chunk, max(TOKEN_GROUPS)) + _STATIC
    if few:
        each = [WINDOW_WARPS // n * (shared_bytes(chunk, 1, n) + _STATIC) for n in FEW_WARPS]
        most = max(most, max(each) - _RESERVED)
    return tuple(a for a in nvrtc.TENSOR_ARCHS if most <= nvrtc.SHARED_LIMIT[a])


def list_units() -> list[Unit]:
    """Return the instances that tests compile: layers of the 31B and of the 26B-A4B, for each
    number of split-K slices of the projection."""
    out = []
    for chunk, slices in ((256, (1, 2)), (128, (1, 2, 4))):
        archs = _archs(chunk)
        names = tuple(instance(chunk, n, f) for n in slices for f in TOKEN_GROUPS)
        out.append(
            Unit("attention_window.cu", names, archs, 128, shared_bytes(chunk, max(TOKEN_GROUPS)))
        )
        for warps in FEW_WARPS:
            few = tuple(instance(chunk, n, 1, warps) for n in slices)
            size = shared_bytes(chunk, 1, warps)
            out.append(Unit("attention_window.cu", few, _archs(chunk, few=True), 128, size))
    return out
