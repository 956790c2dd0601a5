"""Attention of a chunk of rows to itself and to what the cache holds of earlier rows.

Keys and values that the chunk may see are gathered once a layer: those of the cache from the first
visible position on (a multiple of 64), then the chunk's own. A sliding layer's ring may therefore
be smaller than a chunk: it takes the chunk's last rows when everything is gathered.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from g4spec.models.spec import LayerSpec
from g4spec.runtime.cuda.build import launch
from g4spec.runtime.cuda.build.units import Unit
from g4spec.runtime.cuda.cache.cuda_kv import TURNING, CudaKV, shares
from g4spec.runtime.cuda.prefill.buffers import Shapes, allocate

EVERYTHING = 1 << 30
"""The window of a layer without one."""

TILE = 64
"""Rows of keys and values that belong together; see cuda/include/keys.cuh. Values are zero to
the end of the last one."""

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

_INT = np.int32
_CACHES = {"f16": "HalfCache", "q8_0": "ByteCache"}


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """Norms of a layer's heads, float32 [head_dim]; `k_norm` is None without keys of its own."""

    q_norm: torch.Tensor
    k_norm: torch.Tensor | None


class Attention:
    """One kind of layer: buffers for its queries, and for the keys and values they see.

    Args:
        spec: a layer of this kind.
        chunk: most rows.
        n_ctx: positions a sequence may have.
    """

    layouts = "Plain", "Plain"
    """Of queries, and of keys and values; see cuda/include/keys.cuh."""
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

    @classmethod
    def buffers(cls, spec: LayerSpec, chunk: int, n_ctx: int) -> Shapes:
        """What it keeps. Without `values`, they are part of the keys."""
        before = n_ctx if spec.window is None else spec.window - 1 + TILE
        rows = padded(min(n_ctx, before + chunk))
        queries = padded(chunk * (spec.n_head // spec.n_kv), FLASH)
        half, dim = torch.float16, spec.head_dim
        found = {"queries": ((spec.n_kv, queries, dim), half),
                 "keys": ((spec.n_kv, rows, dim + cls.extra), half)}  # fmt: skip
        return found if cls.extra else found | {"values": ((spec.n_kv, rows, dim), half)}

    def first(self, start: int) -> int:
        """Position of row 0 of `keys` for a chunk at `start`."""
        return max(0, start - self.window + 1) // TILE * TILE

    def prepare(
        self,
        qkv: torch.Tensor,
        weights: HeadWeights,
        turns: torch.Tensor,
        start: int,
        cache: CudaKV,
        own_values: bool,
        eps: float,
    ) -> None:
        """Queries, and all keys and values they see; the chunk's own are appended to the cache.

        Args:
            qkv: projections [T, heads * D] float16: queries, then (unless they are another
                layer's, which then must be the last ones gathered here) keys and `own_values`.
            turns: [T, pairs, 2] cosines and sines of the pairs that turn.
            eps: of the norms, for projections as they are scaled here.
        """
        count, n = len(qkv), qkv.shape[1] // self.dim
        first, kind = self.first(start), (*self.layouts, _CACHES[cache.kind], cache.turning)
        fold = weights.k_norm if self.fold else None
        cache.weight = weights.k_norm
        planes = (cache.keys, cache.values, cache.key_scales, cache.value_scales)
        if start > first and n > self.n_head:
            launch.kernel("prefill_heads.cu", earlier(self.dim, *kind))(
                (start - first, -(-self.n_kv // 8)), 256, *planes, _INT(cache.capacity),
                _INT(first), self.keys, self.values, _INT(self.rows), _INT(self.n_kv),
                weights.k_norm, pdl=False,
            )  # fmt: skip
        launch.kernel("prefill_heads.cu", heads(self.dim, *kind))(
            (count, 1 if n <= 32 else 2), 256, qkv, _INT(qkv.shape[1]), _INT(self.n_head),
            _INT(self.n_kv), _INT(own_values), weights.q_norm, weights.k_norm, fold, turns,
            _INT(turns.shape[1]), self.queries, _INT(self.queries.shape[1]), self.keys,
            self.values, _INT(self.rows), _INT(start - first), *planes, _INT(cache.capacity),
            _INT(start), np.float32(eps), pdl=False,
        )  # fmt: skip

    def attend(self, out: torch.Tensor, start: int) -> None:
        """Attention of the prepared rows -> `out` [T, n_head * D] float16."""
        raise NotImplementedError


class Flash(Attention):
    """Scores stay in registers: heads of 256 on sm_90 (prefill_flash.cu)."""

    layouts = "Tiles", "Tiles"

    def attend(self, out: torch.Tensor, start: int) -> None:
        count = len(out)
        launch.kernel("prefill_flash.cu", "flash")(
            (-(-count * self.group // FLASH), self.n_kv), 384, self.queries, self.keys,
            self.values, out, _INT(count), _INT(self.group), _INT(self.queries.shape[1]),
            _INT(self.rows), _INT(start - self.first(start)), _INT(self.window),
            shared=FLASH_SHARED, pdl=False,
        )  # fmt: skip


class Wide(Attention):
    """The same for heads of 512 whose keys are their values, turned and weighted
    (prefill_flash_wide.cu). A row holds the values, and of the keys the part that turns."""

    layouts = "Tiles", "Shared"
    fold = True
    extra = 2 * TURNING

    def attend(self, out: torch.Tensor, start: int) -> None:
        count = len(out)
        launch.kernel("prefill_flash_wide.cu", "flash_wide")(
            (-(-count * self.group // WIDE), self.n_kv), 384, self.queries, self.keys, out,
            _INT(count), _INT(self.group), _INT(self.queries.shape[1]), _INT(self.rows),
            _INT(start - self.first(start)), _INT(self.window), shared=WIDE_SHARED, pdl=False,
        )  # fmt: skip


class Scores(Attention):
    """Scores of a block of rows with a block of keys lie in memory between two products."""

    scores: torch.Tensor
    weights: torch.Tensor
    sums: torch.Tensor
    state: torch.Tensor

    @classmethod
    def buffers(cls, spec: LayerSpec, chunk: int, n_ctx: int) -> Shapes:
        rows, whole = spec.n_head * cls.block(spec, chunk), torch.float32
        return {**super().buffers(spec, chunk, n_ctx), "scores": ((rows * KEYS,), whole),
                "weights": ((rows * KEYS,), torch.float16), "sums": ((rows, spec.head_dim), whole),
                "state": ((2, rows), whole)}  # fmt: skip

    @staticmethod
    def block(spec: LayerSpec, chunk: int) -> int:
        """Tokens computed at a time."""
        return min(chunk, max(1, ROWS // spec.n_head))

    def attend(self, out: torch.Tensor, start: int) -> None:
        count, offset = len(out), start - self.first(start)
        step = self.state.shape[1] // self.n_head
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
                (rows, heads), 128, s, p, most, total, o, _INT(n), _INT(at), _INT(offset),
                _INT(self.window), _INT(self.group), _INT(at == low), pdl=False,
            )  # fmt: skip
            if at == low:
                torch.bmm(p, values, out_dtype=torch.float32, out=o)
            else:
                torch.baddbmm(o, p, values, out_dtype=torch.float32, out=o)
        launch.kernel("prefill_softmax.cu", f"normalize<{self.dim}>")(
            (rows, heads), self.dim // 4, o, total, out, _INT(self.group), pdl=False
        )


def kind(spec: LayerSpec, pairs: int, arch: str) -> type[Attention]:
    """The fastest way for this layer; `pairs`: of a head that turn."""
    if arch == "sm_90a" and spec.head_dim == 256:
        return Flash
    if arch == "sm_90a" and spec.v_from_k and shares(spec.head_dim, pairs):
        return Wide
    return Scores


def padded(rows: int, tile: int = TILE) -> int:
    """Rows of whole tiles."""
    return -(-rows // tile) * tile


def heads(dim: int, queries: str, keys: str, cache: str, turning: int) -> str:
    return f"heads<{dim}, {queries}<{dim}>, {keys}<{dim}>, {cache}, {turning}>"


def earlier(dim: int, _: str, keys: str, cache: str, turning: int) -> str:
    return f"earlier<{dim}, {keys}<{dim}>, {cache}, {turning}>"


def softmax(dim: int) -> str:
    return f"softmax<{dim}, {KEYS // 512}>"


UNITS = [
    Unit("prefill_heads.cu", tuple(
        name(dim, *layouts, cache, turning) for name in (heads, earlier)
        for cache in _CACHES.values()
        for dim, layouts, turning in (
            (256, Scores.layouts, 0), (512, Scores.layouts, 0), (512, Scores.layouts, TURNING),
            (256, Flash.layouts, 0), (512, Wide.layouts, TURNING))), max_registers=128),
    Unit("prefill_softmax.cu", tuple(name for dim in (256, 512)
                                     for name in (softmax(dim), f"normalize<{dim}>")),
         max_registers=64),
    Unit("prefill_flash.cu", ("flash",), ("sm_90a",), 168, FLASH_SHARED),
    Unit("prefill_flash_wide.cu", ("flash_wide",), ("sm_90a",), 168, WIDE_SHARED),
]  # fmt: skip
