"""Attention of the rows of a step over a cache, in two kernels: chunks of keys, then their sum.

Each chunk (`attention_chunks`) is summed by itself, in order. So a row's result depends neither on
the other rows and sequences of the batch, nor on its slot and pages, nor on the length of its
sequence. It does not depend on which rows share a block, how tiles are copied to shared memory, or
how many blocks run either.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch

from g4spec.core import Batch
from g4spec.runtime.cuda.build import launch, nvrtc
from g4spec.runtime.cuda.build.constants import (
    ACT_COLUMNS,
    ATTENTION_WORK_BYTES,
    CACHE_ROTARY_PAIRS,
    COMBINE_WARPS,
    MAX_ITEM_HEADS,
    MAX_ITEM_TILES,
    MAX_ITEMS,
    MAX_ROW_CHUNKS,
    MAX_STEP_ROWS,
    PAGE,
    PLAIN_ROWS,
    PLAIN_THREADS,
)
from g4spec.runtime.cuda.build.units import Unit
from g4spec.runtime.cuda.cache.cache_types import KINDS, TYPES, Kind
from g4spec.runtime.cuda.cache.cuda_kv import CudaKV
from g4spec.runtime.cuda.cache.cuda_kv_size import shares
from g4spec.runtime.cuda.cache.heads import HEAD_DIMS
from g4spec.runtime.cuda.step.attention_chunks import Chunks, tile_keys
from g4spec.runtime.cuda.step.packed_rows import PackedRows, empty

_RING = {64: 65536, 128: 65536, 256: 196608, 512: 196608}
"""Maximum bytes of tiles in flight in a block, by head_dim."""


COMBINED_BLOCKS = (4, 2, 1)
"""Blocks of 64 values that a warp of the second phase may combine."""


@dataclass(frozen=True)
class AttentionConfig:
    """One instance of `attend_chunks`: arguments of the template of the same name in
    attention_tiles.cuh, which explains them. The rings are K_STAGES and V_STAGES there."""

    head_dim: int
    kind: Kind
    row_tiles: int
    key_parts: int = 1
    value_parts: int = 1
    key_ring: int = 2
    value_ring: int = 2
    rotary_pairs: int = 0

    @property
    def warps(self) -> tuple[int, int]:
        """Warps that compute scores, and warps that accumulate values."""
        return {64: (4, 2), 128: (4, 4), 256: (8, 8), 512: (8, 8)}[self.head_dim]

    @property
    def keys(self) -> int:
        """Keys of a tile."""
        return tile_keys(self.head_dim)

    @property
    def name(self) -> str:
        parts = (
            self.key_parts,
            self.value_parts,
            self.key_ring,
            self.value_ring,
            self.rotary_pairs,
        )
        numbers = (self.head_dim, TYPES[self.kind].number, self.row_tiles, *self.warps, *parts)
        return f"attend_chunks<{', '.join(map(str, numbers))}>"

    @property
    def stage_bytes(self) -> tuple[int, int]:
        """Bytes of a part of a tile, of keys and of values."""
        dims, keys = self.head_dim // self.key_parts, self.keys // self.value_parts
        type = TYPES[self.kind]
        padding = 32 if type.block else 0  # against bank conflicts
        return (
            self.keys * (type.row_bytes(dims) + padding),
            keys * (type.row_bytes(self.head_dim) + padding),
        )

    @property
    def fixed(self) -> int:
        """Bytes of dynamic shared memory without tiles."""
        rows, (score_warps, sum_warps) = 8 * self.row_tiles, self.warps
        return rows * (2 * self.head_dim + 4 * self.keys + 4 * (3 * score_warps + sum_warps + 4))

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory."""
        keys, values = self.stage_bytes
        return self.key_ring * keys + self.value_ring * values + self.fixed


@functools.cache
def choose(
    head_dim: int, kind: Kind, rows: int, arch: str, rotary_pairs: int = 0
) -> tuple[AttentionConfig, int]:
    """Return the instance for `rows` (token, head) pairs of a KV head, and the number of blocks
    that share them.

    As few blocks as possible, then tiles in as few parts as leave room for two of each.
    `rotary_pairs`: see `CudaKV`.
    """
    options = (1, 2, 4)  # more would not fit in registers
    for most in reversed(options):
        blocks = -(-rows // (8 * most))
        tiles = next(n for n in options if 8 * n * blocks >= rows)
        shape = _with_parts(head_dim, kind, tiles, arch)
        if shape is not None:
            return replace(shape, rotary_pairs=rotary_pairs), blocks
    raise AssertionError((head_dim, kind, rows, arch))


def _with_parts(head_dim: int, kind: Kind, tiles: int, arch: str) -> AttentionConfig | None:
    """Return a config with its tiles cut into as few parts as leave room for two of each, or
    None."""
    keys = tile_keys(head_dim)
    for parts in (1, 2, 4, 8):
        if head_dim // parts < 64 or keys // parts < 16:
            continue
        shape = AttentionConfig(head_dim, kind, tiles, parts, parts)
        room = min(nvrtc.SHARED_LIMIT[arch] - ATTENTION_WORK_BYTES - shape.fixed, _RING[head_dim])
        count = room // max(shape.stage_bytes)
        if count >= 4:
            return AttentionConfig(
                head_dim, kind, tiles, parts, parts, count // 2, (count + 1) // 2
            )
    return None


def takes(n_head: int, kv: CudaKV) -> bool:
    """Return whether work items (attention_chunks.cuh) can name the KV heads of a layer, the blocks
    of its rows, and the tiles of keys of a context. It depends on the layer alone, so that a row
    has the same bits in any batch. The kernel without tensor cores has no work items."""
    positions, rows = kv.space.table.shape[1] * PAGE, MAX_STEP_ROWS * n_head // kv.n_kv
    arch = launch.arch(kv.keys.device.index)
    return (
        kv.n_kv <= MAX_ITEM_HEADS
        and choose(kv.head_dim, kv.kind, rows, arch, kv.rotary_pairs)[1] <= MAX_ITEM_HEADS
        and positions // tile_keys(kv.head_dim) <= MAX_ITEM_TILES
    )


@dataclass(frozen=True)
class AttentionOutput:
    """Result of attention: [T, n_head * D] as packed activations, and in float32 if asked for."""

    rows: PackedRows
    values: torch.Tensor | None


def attend(
    q: torch.Tensor,
    kv: CudaKV,
    batch: Batch,
    first: torch.Tensor,
    last: torch.Tensor,
    scale: float,
    *,
    plain: bool | None = None,
    values: bool = False,
) -> AttentionOutput:
    """Compute softmax(scale * q k) v over positions first[t] .. last[t] of each row's slot.

    The kernel prefetches keys of positions before a sequence's first row while its predecessor
    still runs. So these keys, `first`, `last`, and the batch's positions and slots must come from
    kernels that ended before that predecessor started. The page table is written before the step.

    Args:
        q: [T, n_head, D] float16, already multiplied by `kv.weight`, if any; head h reads KV head h
            // (n_head / n_kv).
        batch: at most 16 rows of each sequence, the same number for all.
        first, last: [T] int64, inclusive, first <= last; a sequence spans at most `kv.positions`
            positions from its smallest `first` to its largest `last`.
        plain: use the kernel without tensor cores; by default on GPUs before sm_80.
        values: return the result in float32 as well.
    """
    _, n_head, head_dim = q.shape
    sequences, tokens = len(batch.sizes), batch.rows_per_sequence
    arch = launch.arch(q.device.index)
    plain = arch not in nvrtc.TENSOR_ARCHS if plain is None else plain
    assert q.dtype == torch.float16 and head_dim == kv.head_dim in HEAD_DIMS, q.shape
    assert 1 <= tokens <= MAX_STEP_ROWS and len(q) == len(batch), batch.sizes
    assert n_head % kv.n_kv == 0 and (plain or takes(n_head, kv)), (n_head, kv.n_kv)
    group, chunks = n_head // kv.n_kv, Chunks.of(kv, kv.positions)
    room = chunks.most(kv.positions, kv.positions)
    assert room <= MAX_ROW_CHUNKS, (room, kv.positions)
    size = sequences, room, kv.n_kv, tokens * group
    sums = torch.empty(*size, head_dim, dtype=torch.float32, device=q.device)
    tops = torch.empty(*size, 2, dtype=torch.float32, device=q.device)
    common = _cache_arguments(kv) | {
        "q": q,
        "first": first,
        "last": last,
        "slots": batch.slots,
        "sums": sums,
        "tops": tops,
        "tokens": tokens,
        "group": group,
        "room": room,
        "shift": chunks.shift,
        "growing": chunks.growing,
        "scale": scale,
    }
    if plain:
        name = plain_instance(head_dim, kv.kind, kv.rotary_pairs)
        kernel = launch.kernel("attention_plain.cu", name, q.device.index)
        most = 8 * launch.processors(q.device.index)
        grid = min(room * kv.n_kv * -(-tokens * group // PLAIN_ROWS), most)
        kernel((grid, sequences), PLAIN_THREADS, **common)
    else:
        shape, blocks = choose(head_dim, kv.kind, tokens * group, arch, kv.rotary_pairs)
        kernel = launch.kernel("attention.cu", shape.name, q.device.index)
        kernel(
            _grid(kernel, shape, kv, chunks, blocks, batch),
            32 * sum(shape.warps),
            **common,
            positions=batch.positions,
            sequences=sequences,
            shared=shape.shared,
        )
    return _combine(sums, tops, first, last, tokens, chunks, values)


def _cache_arguments(kv: CudaKV) -> dict[str, Any]:
    """Return the arguments that describe a layer's KV cache."""
    return {
        "keys": kv.keys,
        "values": kv.values,
        "key_scales": kv.key_scales,
        "value_scales": kv.value_scales,
        "table": kv.table,
        "n_kv": kv.n_kv,
        "width": kv.space.table.shape[1],
        "capacity": kv.capacity,
    }


def _grid(
    kernel: launch.Kernel,
    shape: AttentionConfig,
    kv: CudaKV,
    chunks: Chunks,
    blocks: int,
    batch: Batch,
) -> int:
    """Return the number of blocks of `attend_chunks`: as many as run at once, but no more than
    there is work, and enough for lists of all of it. The kernel distributes the work among them.
    """
    span = kv.positions
    if kv.window is not None:
        span = min(kv.window + batch.rows_per_sequence - 1, kv.positions)
    work = chunks.most(span, kv.positions) * kv.n_kv * blocks  # (chunk, head, rows)
    threads = 32 * sum(shape.warps)
    limit = nvrtc.SHARED_LIMIT[launch.arch(kernel.device)] + 1024
    registers = -(-kernel.resources.registers // 8) * 8 * threads
    each = min(
        limit // (shape.shared + ATTENTION_WORK_BYTES + 1024), 65536 // registers, 1536 // threads
    )
    pairs = kv.n_kv * blocks
    fitting = MAX_ITEMS // chunks.most(kv.positions, kv.positions)  # pairs in a list, however long
    lists = -(-pairs // min(fitting, pairs))  # of a sequence
    sequences, at_once = len(batch.sizes), launch.processors(kernel.device) * max(1, each)
    return min(work * sequences, max(lists * sequences, at_once))


def _combine(
    sums: torch.Tensor,
    tops: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
    tokens: int,
    chunks: Chunks,
    values: bool,
) -> AttentionOutput:
    """Launch the second phase: sums [S, chunks, n_kv, rows, D], tops [S, chunks, n_kv, rows, 2]."""
    _, room, n_kv, rows, head_dim = sums.shape
    count, group = len(first), rows // tokens
    width = n_kv * group * head_dim
    out = torch.empty(count, width, dtype=sums.dtype, device=sums.device) if values else None
    packed = empty(count, width, sums.device)
    warps = COMBINE_WARPS if chunks.growing and count <= 4 else 1
    all_blocks = width // ACT_COLUMNS * count
    blocks = _combined_blocks(head_dim, all_blocks, sums.device) if warps == 1 else 1
    kernel = launch.kernel(
        "attention_combine.cu", f"combine_chunks<{head_dim}, {warps}, {blocks}>", sums.device.index
    )
    kernel(
        -(-all_blocks // blocks * warps // COMBINE_WARPS),
        32 * COMBINE_WARPS,
        sums=sums,
        tops=tops,
        first=first,
        last=last,
        out=out,
        rows=packed.data,
        count=count,
        tokens=tokens,
        n_kv=n_kv,
        group=group,
        room=room,
        shift=chunks.shift,
        growing=chunks.growing,
    )
    return AttentionOutput(packed, out)


def _combined_blocks(head_dim: int, all_blocks: int, device: torch.device) -> int:
    """Return how many blocks of a head each warp combines: the most with which there are still
    three thread blocks for each multiprocessor."""
    enough = 3 * launch.processors(device.index) * COMBINE_WARPS
    return next(
        n
        for n in COMBINED_BLOCKS
        if n == 1 or (head_dim % (ACT_COLUMNS * n) == 0 and all_blocks >= n * enough)
    )


def plain_instance(head_dim: int, kind: Kind, rotary_pairs: int) -> str:
    return f"attend_plain<{head_dim}, {TYPES[kind].number}, {rotary_pairs}>"


def list_units() -> list[Unit]:
    """Return every instance that `choose` can return, by architecture, and those of the second
    phase."""
    combine = tuple(
        f"combine_chunks<{d}, {warps}, {blocks}>"
        for d in HEAD_DIMS
        for warps, blocks in ((COMBINE_WARPS, 1), *((1, n) for n in COMBINED_BLOCKS))
        if d % (ACT_COLUMNS * blocks) == 0
    )
    ways = [(d, t) for d in HEAD_DIMS for t in (0, CACHE_ROTARY_PAIRS) if not t or shares(d, t)]
    plain = tuple(plain_instance(d, kind, t) for d, t in ways for kind in KINDS)
    units = [Unit("attention_combine.cu", combine, max_registers=80)]
    units.append(Unit("attention_plain.cu", plain, max_registers=128))
    for arch in nvrtc.TENSOR_ARCHS:
        for (head_dim, rotary_pairs), kind in itertools.product(ways, KINDS):
            rows = range(1, MAX_STEP_ROWS * 16 + 1)
            shapes = sorted(
                {choose(head_dim, kind, r, arch, rotary_pairs)[0] for r in rows}, key=str
            )
            most = max(shape.shared for shape in shapes)
            units.append(Unit("attention.cu", tuple(s.name for s in shapes), (arch,), 255, most))
    return units
