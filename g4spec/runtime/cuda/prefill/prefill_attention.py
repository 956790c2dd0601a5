"""Attention of a prefill chunk over itself and the KV cache of earlier rows.

The visible keys and values are gathered once per layer: those of the cache from the first visible
position on (a multiple of 64), then those of the chunk, in the form in which the cache stores them.
The ring buffer of a sliding layer may therefore be smaller than a chunk: it takes the last rows of
the chunk after everything is gathered.

A chunk consists of whole blocks of PROMPT_BLOCK rows and starts at a multiple of it. So what is
computed together, and in which order, depends only on absolute positions: blocks of queries never
span two prompt blocks, and tiles of keys are aligned. A key that a row does not attend to has a
weight of exactly zero, whatever else is in its tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from g4spec.core import PROMPT_BLOCK, Batch
from g4spec.models.spec import LayerSpec
from g4spec.runtime.cuda.build import launch, nvrtc
from g4spec.runtime.cuda.build.constants import (
    CACHE_ROTARY_PAIRS,
    FLASH_ROWS,
    FLASH_SHARED,
    FLASH_THREADS,
    FLASH_WIDE_ROWS,
    FLASH_WIDE_SHARED,
    KV_TILE,
    PREFILL_HEAD_WARPS,
    SOFTMAX_WARPS,
)
from g4spec.runtime.cuda.build.units import Unit
from g4spec.runtime.cuda.cache.cache_types import TYPES
from g4spec.runtime.cuda.cache.cuda_kv import CudaKV
from g4spec.runtime.cuda.cache.cuda_kv_size import shares
from g4spec.runtime.cuda.prefill.buffers import Shapes, allocate

EVERYTHING = 1 << 30
"""Window of a global layer."""

KEYS = 2048
"""Number of keys whose scores are computed at a time."""

ROWS = 8192
"""Number of rows (over all heads) whose scores are computed at a time; with KEYS, 64 MB of
scores."""


@dataclass(frozen=True, slots=True)
class Chunk(Batch):
    """Consecutive rows of one prompt, in whole blocks of PROMPT_BLOCK.

    Attributes:
        slot, start: on the host: slot of the sequence, and first position, a multiple of
            PROMPT_BLOCK.
        count: number of prompt rows; the rest is padding, which is computed and discarded.
    """

    slot: int
    start: int
    count: int

    def __post_init__(self) -> None:
        assert len(self) % PROMPT_BLOCK == self.start % PROMPT_BLOCK == 0, (self.start, len(self))
        assert 0 < self.count <= len(self), (self.count, len(self))


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """Norm weights of a layer's heads, float32 [head_dim].

    Attributes:
        k_norm: None if the layer reads the KV cache of another.
        own_values: whether values are projected; otherwise keys before their norm are the values.
        eps: epsilon of the norms, for projections with their scale here.
    """

    q_norm: torch.Tensor
    k_norm: torch.Tensor | None
    own_values: bool
    eps: float


class Attention:
    """Base class for one kind of layer: buffers for its queries and for the keys and values they
    read.

    Args:
        spec: a layer of this kind.
        chunk: maximum number of rows.
        n_ctx: context length of a sequence.
    """

    layouts = "RowMajor", "RowMajor"
    """Layouts of queries, and of keys and values; see cuda/include/prefill_kv_layout.cuh."""
    fold = False
    """True if the norm weights of keys are folded into the queries."""

    extra = 0
    """Values per row of `keys` beyond those of a head."""

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
        """Return the shapes of its buffers. Without `values`, the values are part of the keys."""
        chunk = padded(chunk, PROMPT_BLOCK)
        before = n_ctx if spec.window is None else spec.window - 1 + KV_TILE
        rows = padded(min(padded(n_ctx, PROMPT_BLOCK), before + chunk))
        queries = padded(chunk * (spec.n_head // spec.n_kv), FLASH_ROWS)
        half, dim = torch.float16, spec.head_dim
        buffers = {
            "queries": ((spec.n_kv, queries, dim), half),
            "keys": ((spec.n_kv, rows, dim + cls.extra), half),
        }
        return buffers if cls.extra else buffers | {"values": ((spec.n_kv, rows, dim), half)}

    def first(self, start: int) -> int:
        """Return the position of row 0 of `keys` for a chunk at `start`."""
        return self._visible(start) // KV_TILE * KV_TILE

    def _visible(self, start: int) -> int:
        """Return the first position that the row at `start` attends to."""
        return max(0, start - self.window + 1)

    def prepare(
        self, qkv: torch.Tensor, w: HeadWeights, cos_sin: torch.Tensor, cache: CudaKV, chunk: Chunk
    ) -> None:
        """Lay out the queries and all keys and values that they read; append those of the chunk to
        the cache. A layer without keys must follow the one whose keys it reads, with no other layer
        of its kind in between, because a ring buffer no longer has what the first rows of the chunk
        read.

        Args:
            qkv: projections [T, heads * D] float16: queries, then keys and values, if any.
            cos_sin: [T, pairs, 2] cosines and sines of the pairs that rotate.
        """
        count, n = len(qkv), qkv.shape[1] // self.dim
        first, kind = (
            self.first(chunk.start),
            (*self.layouts, cache.type.struct, cache.rotary_pairs),
        )
        if w.k_norm is not None:
            cache.weight, self._gathered = w.k_norm, (cache, chunk)
            self._gather(cache, chunk, kind)
        held, of = self._gathered or (None, None)
        assert held is cache and of is chunk, "the keys of another layer or chunk were gathered"
        launch.kernel("prefill_heads.cu", heads(self.dim, *kind))(
            (count, 1 if n <= 32 else 2),
            32 * PREFILL_HEAD_WARPS,
            qkv=qkv,
            columns=qkv.shape[1],
            n_head=self.n_head,
            n_kv=self.n_kv,
            own_values=w.own_values,
            q_norm=w.q_norm,
            k_norm=w.k_norm,
            fold=cache.weight if self.fold else None,
            cos_sin=cos_sin,
            rotated=cos_sin.shape[1],
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
        """Lay out the cache entries of positions before the chunk."""
        first = self.first(chunk.start)
        if chunk.start == first:
            return
        launch.kernel("prefill_heads.cu", earlier(self.dim, *kind))(
            (chunk.start - first, -(-self.n_kv // PREFILL_HEAD_WARPS)),
            32 * PREFILL_HEAD_WARPS,
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
        """Compute attention of the prepared rows -> `out` [T, n_head * D] float16."""
        raise NotImplementedError


def _planes(cache: CudaKV, slot: int) -> dict[str, Any]:
    """Return the planes of a cache and the location of the slot's rows in them, as kernel
    arguments."""
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
    """Keeps scores in registers: heads of 256 on sm_90 (prefill_flash.cu)."""

    layouts = "SwizzledTiles", "SwizzledTiles"
    kernel, block_rows, shared = "flash", FLASH_ROWS, FLASH_SHARED

    def attend(self, out: torch.Tensor, start: int) -> None:
        count = len(out)
        launch.kernel(f"prefill_{self.kernel}.cu", self.kernel)(
            (-(-count * self.group // self.block_rows), self.n_kv),
            FLASH_THREADS,
            queries=self.queries,
            **self.tiles(),
            out=out,
            tokens=count,
            group=self.group,
            query_rows=self.queries.shape[1],
            key_rows=self.rows,
            offset=start - self.first(start),
            window=self.window,
            shared=self.shared,
            pdl=False,
        )

    def tiles(self) -> dict[str, torch.Tensor]:
        """Return the keys and values as arguments of the kernel."""
        return {"keys": self.keys, "values": self.values}


class Wide(Flash):
    """Keeps scores in registers: heads of 512 of K=V layers (prefill_flash_wide.cu). A row has the
    values, and of the keys only the rotated part."""

    layouts = "SwizzledTiles", "SharedKvTiles"
    kernel, block_rows, shared = "flash_wide", FLASH_WIDE_ROWS, FLASH_WIDE_SHARED
    fold = True
    extra = 2 * CACHE_ROTARY_PAIRS

    def tiles(self) -> dict[str, torch.Tensor]:
        return {"tiles": self.keys}


class Scores(Attention):
    """Keeps the scores of a block of rows and keys in memory between two matmuls."""

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
        """Return the number of tokens computed at a time, a divisor of PROMPT_BLOCK."""
        return min(PROMPT_BLOCK, 1 << (ROWS // n_head).bit_length() - 1)

    def attend(self, out: torch.Tensor, start: int) -> None:
        count, offset, step = len(out), start - self.first(start), self.block(self.n_head)
        for begin in range(0, count, step):
            self._block(out[begin : begin + step], begin, offset + begin)

    def _block(self, out: torch.Tensor, begin: int, offset: int) -> None:
        """Compute the rows from `begin` on, the first of which is row `offset` of the keys."""
        rows, heads = len(out) * self.group, self.n_kv
        queries = self.queries[:, begin * self.group : begin * self.group + rows]
        o = self.sums[: heads * rows].view(heads, rows, self.dim)
        most, total = self.state
        low = max(0, offset - self.window + 1) // KV_TILE * KV_TILE
        high = padded(offset + len(out))
        for at in range(low, high, KEYS):
            n = min(KEYS, high - at)
            s = self.scores[: heads * rows * n].view(heads, rows, n)
            p = self.weights[: heads * rows * n].view(heads, rows, n)
            keys, values = self.keys[:, at : at + n], self.values[:, at : at + n]
            torch.bmm(queries, keys.transpose(1, 2), out_dtype=torch.float32, out=s)
            launch.kernel("prefill_softmax.cu", softmax(self.dim))(
                (rows, heads),
                32 * SOFTMAX_WARPS,
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
    """Return the fastest class for a layer whose cache stores `rotary_pairs` pairs of keys (0:
    whole keys)."""
    if arch == "sm_90a" and head_dim == 256:
        return Flash
    if arch == "sm_90a" and shares(head_dim, rotary_pairs):
        return Wide
    return Scores


def padded(rows: int, tile: int = KV_TILE) -> int:
    """Round up to whole tiles."""
    return -(-rows // tile) * tile


def heads(dim: int, queries: str, keys: str, cache: str, rotary_pairs: int) -> str:
    return f"heads<{dim}, {queries}<{dim}>, {keys}<{dim}>, {cache}, {rotary_pairs}>"


def earlier(dim: int, _: str, keys: str, cache: str, rotary_pairs: int) -> str:
    return f"earlier<{dim}, {keys}<{dim}>, {cache}, {rotary_pairs}>"


def softmax(dim: int) -> str:
    return f"softmax<{dim}, {KEYS // (4 * 32 * SOFTMAX_WARPS)}>"


def list_units() -> list[Unit]:
    """Return the instances that tests compile."""
    kinds = (256, 0), (512, 0), (512, CACHE_ROTARY_PAIRS)
    scores = tuple((dim, Scores.layouts, pairs) for dim, pairs in kinds)
    flash = ((256, Flash.layouts, 0), (512, Wide.layouts, CACHE_ROTARY_PAIRS))
    return [
        *(
            Unit(
                "prefill_heads.cu",
                tuple(
                    name(dim, *layouts, cache, rotary_pairs)
                    for name in (heads, earlier)
                    for cache in (type.struct for type in TYPES.values())
                    for dim, layouts, rotary_pairs in ways
                ),
                archs,
                max_registers=128,
            )
            for ways, archs in ((scores, nvrtc.ARCHS), (flash, ("sm_90a",)))
        ),
        Unit(
            "prefill_softmax.cu",
            tuple(name for dim in (256, 512) for name in (softmax(dim), f"normalize<{dim}>")),
            max_registers=64,
        ),
        Unit("prefill_flash.cu", ("flash",), ("sm_90a",), 168, FLASH_SHARED),
        Unit("prefill_flash_wide.cu", ("flash_wide",), ("sm_90a",), 168, FLASH_WIDE_SHARED),
    ]
