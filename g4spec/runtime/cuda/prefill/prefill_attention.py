"""Attention of a chunk of rows to itself and to what the cache holds of earlier rows.

Keys and values that the chunk may see are gathered once a layer: those of the cache from the first
visible position on (a multiple of 64), then the chunk's own, as the cache stores them. A sliding
layer's ring may therefore be smaller than a chunk: it takes the chunk's last rows when everything
is gathered.

A chunk is whole blocks of PROMPT_BLOCK rows and begins at a multiple of it. What is computed
together and in which order then depends on absolute positions alone: blocks of queries never span
two prompt blocks, and tiles of keys are aligned. A key that a row does not see has a weight of
exactly zero, whatever else is in its tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from g4spec.core import PROMPT_BLOCK, Batch
from g4spec.models.spec import LayerSpec
from g4spec.runtime.cuda.build import launch
from g4spec.runtime.cuda.build.units import Unit
from g4spec.runtime.cuda.cache.cuda_kv import CudaKV
from g4spec.runtime.cuda.cache.cuda_kv_size import ROTARY_PAIRS, shares
from g4spec.runtime.cuda.prefill.buffers import Shapes, allocate

EVERYTHING = 1 << 30
"""The window of a layer without one."""

TILE = 64
"""Rows of keys and values that belong together; see cuda/include/prefill_kv_layout.cuh."""

KEYS = 2048
"""Keys whose scores are computed at a time."""

ROWS = 8192
"""Rows (of all heads) whose scores are computed at a time: with KEYS, 64 MB of scores."""

FLASH = 128
"""Rows of a block of prefill_flash.cu."""

FLASH_SHARED = 6 * 64 * 256 * 2 + 256
"""Bytes of shared memory of such a block: queries, two tiles of keys and of values, barriers."""

WIDE = 64
"""Rows of a block of prefill_flash_wide.cu."""

WIDE_SHARED = 64 * 512 * 2 + 2 * 64 * 640 * 2 + 2048
"""Bytes of its shared memory: queries, two tiles, a few numbers of each row, barriers."""

_CACHES = {"f16": "F16Cache", "q8_0": "Q8Cache"}


@dataclass(frozen=True, slots=True)
class Chunk(Batch):
    """Consecutive rows of one sequence's prompt, whole blocks of PROMPT_BLOCK.

    Attributes:
        slot, start: on the host: its slot, and the first position, a multiple of PROMPT_BLOCK.
        count: rows of the prompt; those behind them are padding, which is computed and not kept.
    """

    slot: int
    start: int
    count: int

    def __post_init__(self) -> None:
        assert len(self) % PROMPT_BLOCK == self.start % PROMPT_BLOCK == 0, (self.start, len(self))
        assert 0 < self.count <= len(self), (self.count, len(self))


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """Norms of a layer's heads, float32 [head_dim].

    Attributes:
        k_norm: None where the layer reads the keys and values of another.
        own_values: whether values are projected; else keys before their norm are the values too.
        eps: of the norms, for projections as they are scaled here.
    """

    q_norm: torch.Tensor
    k_norm: torch.Tensor | None
    own_values: bool
    eps: float


class Attention:
    """One kind of layer: buffers for its queries, and for the keys and values they see.

    Args:
        spec: a layer of this kind.
        chunk: most rows.
        n_ctx: positions a sequence may have.
    """

    layouts = "RowMajor", "RowMajor"
    """Of queries, and of keys and values; see cuda/include/prefill_kv_layout.cuh."""
    fold = False
    """Whether queries take over the weights of the keys' norm."""

    extra = 0
    """Values of a row of `keys` beyond those of a head."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, spec: LayerSpec, chunk: int, n_ctx: int, device: torch.device) -> None:
        self.n_head, self.n_kv, self.dim = spec.n_head, spec.n_kv, spec.head_dim
        self.group = spec.n_head // spec.n_kv
        self.window = spec.window or EVERYTHING
        buffers = allocate(self.buffers(spec, chunk, n_ctx), device)
        for name, buffer in ({"values": buffers["keys"]} | buffers).items():
            setattr(self, name, buffer)
        self.rows = self.keys.shape[1]
        self._gathered: tuple[CudaKV, Chunk] | None = None

    @classmethod
    def buffers(cls, spec: LayerSpec, chunk: int, n_ctx: int) -> Shapes:
        """What it keeps. Without `values`, they are part of the keys."""
        chunk = padded(chunk, PROMPT_BLOCK)
        before = n_ctx if spec.window is None else spec.window - 1 + TILE
        rows = padded(min(padded(n_ctx, PROMPT_BLOCK), before + chunk))
        queries = padded(chunk * (spec.n_head // spec.n_kv), FLASH)
        half, dim = torch.float16, spec.head_dim
        found = {
            "queries": ((spec.n_kv, queries, dim), half),
            "keys": ((spec.n_kv, rows, dim + cls.extra), half),
        }
        return found if cls.extra else found | {"values": ((spec.n_kv, rows, dim), half)}

    def first(self, start: int) -> int:
        """Position of row 0 of `keys` for a chunk at `start`."""
        return self._visible(start) // TILE * TILE

    def _visible(self, start: int) -> int:
        """First position that the row at `start` sees."""
        return max(0, start - self.window + 1)

    def prepare(
        self, qkv: torch.Tensor, w: HeadWeights, turns: torch.Tensor, cache: CudaKV, chunk: Chunk
    ) -> None:
        """Lay out the queries, and all keys and values they see; append the chunk's own to the
        cache. A layer without keys must follow the one whose keys it reads, with no other of its
        kind that has keys in between: a ring no longer holds what the chunk's first rows see.

        Args:
            qkv: projections [T, heads * D] float16: queries, then keys and values, if any.
            turns: [T, pairs, 2] cosines and sines of the pairs that turn.
        """
        count, n = len(qkv), qkv.shape[1] // self.dim
        first, kind = (
            self.first(chunk.start),
            (*self.layouts, _CACHES[cache.kind], cache.rotary_pairs),
        )
        if w.k_norm is not None:
            cache.weight, self._gathered = w.k_norm, (cache, chunk)
            self._gather(cache, chunk, kind)
        held, of = self._gathered or (None, None)
        assert held is cache and of is chunk, "the keys of another layer or chunk were gathered"
        launch.kernel("prefill_heads.cu", heads(self.dim, *kind))(
            (count, 1 if n <= 32 else 2),
            256,
            qkv=qkv,
            columns=qkv.shape[1],
            n_head=self.n_head,
            n_kv=self.n_kv,
            own_values=w.own_values,
            q_norm=w.q_norm,
            k_norm=w.k_norm,
            fold=cache.weight if self.fold else None,
            turns=turns,
            rotated=turns.shape[1],
            queries=self.queries,
            query_rows=self.queries.shape[1],
            keys=self.keys,
            values=self.values,
            rows=self.rows,
            first=chunk.start - first,
            **_planes(cache, chunk.slot),
            start=chunk.start,
            count=chunk.count,
            eps=w.eps,
            pdl=False,
        )

    def _gather(self, cache: CudaKV, chunk: Chunk, kind: tuple[Any, ...]) -> None:
        """Lay out what the cache holds of positions before the chunk."""
        first = self.first(chunk.start)
        if chunk.start == first:
            return
        launch.kernel("prefill_heads.cu", earlier(self.dim, *kind))(
            (chunk.start - first, -(-self.n_kv // 8)),
            256,
            **_planes(cache, chunk.slot),
            first=first,
            visible=self._visible(chunk.start),
            keys=self.keys,
            values=self.values,
            rows=self.rows,
            n_kv=self.n_kv,
            k_norm=cache.weight,
            pdl=False,
        )

    def attend(self, out: torch.Tensor, start: int) -> None:
        """Attention of the prepared rows -> `out` [T, n_head * D] float16."""
        raise NotImplementedError


def _planes(cache: CudaKV, slot: int) -> dict[str, Any]:
    """Planes of a cache and where the slot's rows lie in them, as kernels take it."""
    pages = cache.space.table[slot] if cache.paged else None
    return {
        "cache_keys": cache.keys,
        "cache_values": cache.values,
        "key_scales": cache.key_scales,
        "value_scales": cache.value_scales,
        "pages": pages,
        "slot": slot,
        "capacity": cache.capacity,
    }


class Flash(Attention):
    """Scores stay in registers: heads of 256 on sm_90 (prefill_flash.cu)."""

    layouts = "SwizzledTiles", "SwizzledTiles"

    def attend(self, out: torch.Tensor, start: int) -> None:
        count = len(out)
        launch.kernel("prefill_flash.cu", "flash")(
            (-(-count * self.group // FLASH), self.n_kv),
            384,
            queries=self.queries,
            keys=self.keys,
            values=self.values,
            out=out,
            tokens=count,
            group=self.group,
            query_rows=self.queries.shape[1],
            key_rows=self.rows,
            offset=start - self.first(start),
            window=self.window,
            shared=FLASH_SHARED,
            pdl=False,
        )


class Wide(Attention):
    """The same for heads of 512 whose keys are their values, turned and weighted
    (prefill_flash_wide.cu). A row holds the values, and of the keys the part that turns."""

    layouts = "SwizzledTiles", "SharedKvTiles"
    fold = True
    extra = 2 * ROTARY_PAIRS

    def attend(self, out: torch.Tensor, start: int) -> None:
        count = len(out)
        launch.kernel("prefill_flash_wide.cu", "flash_wide")(
            (-(-count * self.group // WIDE), self.n_kv),
            384,
            queries=self.queries,
            tiles=self.keys,
            out=out,
            tokens=count,
            group=self.group,
            query_rows=self.queries.shape[1],
            key_rows=self.rows,
            offset=start - self.first(start),
            window=self.window,
            shared=WIDE_SHARED,
            pdl=False,
        )


class Scores(Attention):
    """Scores of a block of rows with a block of keys lie in memory between two products."""

    scores: torch.Tensor
    weights: torch.Tensor
    sums: torch.Tensor
    state: torch.Tensor

    @classmethod
    def buffers(cls, spec: LayerSpec, chunk: int, n_ctx: int) -> Shapes:
        rows, whole = spec.n_head * cls.block(spec.n_head), torch.float32
        return {
            **super().buffers(spec, chunk, n_ctx),
            "scores": ((rows * KEYS,), whole),
            "weights": ((rows * KEYS,), torch.float16),
            "sums": ((rows, spec.head_dim), whole),
            "state": ((2, rows), whole),
        }

    @staticmethod
    def block(n_head: int) -> int:
        """Tokens computed at a time, a divisor of PROMPT_BLOCK."""
        return min(PROMPT_BLOCK, 1 << (ROWS // n_head).bit_length() - 1)

    def attend(self, out: torch.Tensor, start: int) -> None:
        count, offset, step = len(out), start - self.first(start), self.block(self.n_head)
        for begin in range(0, count, step):
            self._block(out[begin : begin + step], begin, offset + begin)

    def _block(self, out: torch.Tensor, begin: int, offset: int) -> None:
        """Rows from `begin` on, the first of which stands in row `offset` of the keys."""
        rows, heads = len(out) * self.group, self.n_kv
        queries = self.queries[:, begin * self.group : begin * self.group + rows]
        o = self.sums[: heads * rows].view(heads, rows, self.dim)
        most, total = self.state
        low = max(0, offset - self.window + 1) // TILE * TILE
        high = padded(offset + len(out))
        for at in range(low, high, KEYS):
            n = min(KEYS, high - at)
            s = self.scores[: heads * rows * n].view(heads, rows, n)
            p = self.weights[: heads * rows * n].view(heads, rows, n)
            keys, values = self.keys[:, at : at + n], self.values[:, at : at + n]
            torch.bmm(queries, keys.transpose(1, 2), out_dtype=torch.float32, out=s)
            launch.kernel("prefill_softmax.cu", softmax(self.dim))(
                (rows, heads),
                128,
                scores=s,
                weights=p,
                most=most,
                sum=total,
                out=o,
                keys=n,
                first=at,
                offset=offset,
                window=self.window,
                group=self.group,
                begin=at == low,
                pdl=False,
            )
            if at == low:
                torch.bmm(p, values, out_dtype=torch.float32, out=o)
            else:
                torch.baddbmm(o, p, values, out_dtype=torch.float32, out=o)
        launch.kernel("prefill_softmax.cu", f"normalize<{self.dim}>")(
            (rows, heads),
            self.dim // 4,
            out=o,
            sum=total,
            to=out,
            group=self.group,
            pdl=False,
        )


def kind(head_dim: int, rotary_pairs: int, arch: str) -> type[Attention]:
    """Return the fastest class for a layer whose cache stores `rotary_pairs` pairs of keys (0: keys
    are stored whole)."""
    if arch == "sm_90a" and head_dim == 256:
        return Flash
    if arch == "sm_90a" and shares(head_dim, rotary_pairs):
        return Wide
    return Scores


def padded(rows: int, tile: int = TILE) -> int:
    """Rows of whole tiles."""
    return -(-rows // tile) * tile


def heads(dim: int, queries: str, keys: str, cache: str, rotary_pairs: int) -> str:
    return f"heads<{dim}, {queries}<{dim}>, {keys}<{dim}>, {cache}, {rotary_pairs}>"


def earlier(dim: int, _: str, keys: str, cache: str, rotary_pairs: int) -> str:
    return f"earlier<{dim}, {keys}<{dim}>, {cache}, {rotary_pairs}>"


def softmax(dim: int) -> str:
    return f"softmax<{dim}, {KEYS // 512}>"


UNITS = [
    Unit(
        "prefill_heads.cu",
        tuple(
            name(dim, *layouts, cache, rotary_pairs)
            for name in (heads, earlier)
            for cache in _CACHES.values()
            for dim, layouts, rotary_pairs in (
                (256, Scores.layouts, 0),
                (512, Scores.layouts, 0),
                (512, Scores.layouts, ROTARY_PAIRS),
                (256, Flash.layouts, 0),
                (512, Wide.layouts, ROTARY_PAIRS),
            )
        ),
        max_registers=128,
    ),
    Unit(
        "prefill_softmax.cu",
        tuple(name for dim in (256, 512) for name in (softmax(dim), f"normalize<{dim}>")),
        max_registers=64,
    ),
    Unit("prefill_flash.cu", ("flash",), ("sm_90a",), 168, FLASH_SHARED),
    Unit("prefill_flash_wide.cu", ("flash_wide",), ("sm_90a",), 168, WIDE_SHARED),
]
