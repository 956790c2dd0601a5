"""Attention of a chunk of rows to itself and to what the cache holds of earlier rows.

Keys and values that the chunk may see are gathered once a layer: those of the cache from the first
visible position on (a multiple of 64), then the chunk's own. A sliding layer's ring may therefore
be smaller than a chunk: it takes the chunk's last rows when everything is gathered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from g4spec.models.spec import LayerSpec
from g4spec.runtime.cuda import launch
from g4spec.runtime.cuda.kv import TILE, CudaKV

EVERYTHING = 1 << 30
"""The window of a layer without one."""

KEYS = 2048
"""Keys whose scores are computed at a time."""

ROWS = 32768
"""Rows (of all heads) whose scores are computed at a time: with KEYS, 400 MB of scores."""

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

    def __init__(self, spec: LayerSpec, chunk: int, n_ctx: int, device: torch.device) -> None:
        self.n_head, self.n_kv, self.dim = spec.n_head, spec.n_kv, spec.head_dim
        self.group = spec.n_head // spec.n_kv
        self.window = spec.window or EVERYTHING
        before = n_ctx if spec.window is None else min(n_ctx, spec.window - 1 + TILE)
        self.rows = padded(min(n_ctx, before + chunk))
        half: dict[str, Any] = {"dtype": torch.float16, "device": device}
        # Zeros: rows beyond the last key are multiplied with weights of zero.
        self.keys = torch.zeros(self.n_kv, self.rows, self.dim, **half)
        self.values = torch.zeros_like(self.keys)
        self.queries = torch.zeros(self.n_kv, chunk * self.group, self.dim, **half)
        block = min(chunk, max(1, ROWS // self.n_head))
        floats: dict[str, Any] = {"dtype": torch.float32, "device": device}
        scores = (self.n_head * block, KEYS)
        self.block = block
        self._scores = torch.empty(scores, **floats)
        self._weights = torch.empty(scores, **half)
        self._out = torch.empty(self.n_head * block, self.dim, **floats)
        self._state = torch.empty(2, self.n_head * block, **floats)

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
        first, kind = self.first(start), _CACHES[cache.kind]
        planes = (cache.keys, cache.values, cache.key_scales, cache.value_scales)
        if start > first and n > self.n_head:
            launch.kernel("prefill_heads.cu", earlier(self.dim, kind))(
                (start - first, -(-self.n_kv // 8)), 256, *planes, _INT(cache.capacity),
                _INT(first), self.keys, self.values, _INT(self.rows), _INT(self.n_kv), pdl=False,
            )  # fmt: skip
        launch.kernel("prefill_heads.cu", heads(self.dim, kind))(
            (count, 1 if n <= 32 else 2), 256, qkv, _INT(qkv.shape[1]), _INT(self.n_head),
            _INT(self.n_kv), _INT(own_values), weights.q_norm, weights.k_norm, None, turns,
            _INT(turns.shape[1]), self.queries, _INT(self.queries.shape[1]), self.keys,
            self.values, _INT(self.rows), _INT(start - first), *planes, _INT(cache.capacity),
            _INT(start), np.float32(eps), pdl=False,
        )  # fmt: skip

    def attend(self, out: torch.Tensor, start: int) -> None:
        """Attention of the prepared rows -> `out` [T, n_head * D] float16."""
        count, offset = len(out), start - self.first(start)
        for begin in range(0, count, self.block):
            end = min(count, begin + self.block)
            self._block(out[begin:end], begin, offset + begin)

    def _block(self, out: torch.Tensor, begin: int, offset: int) -> None:
        """Rows from `begin` on, the first of which stands in row `offset` of the keys."""
        rows, heads = len(out) * self.group, self.n_kv
        queries = self.queries[:, begin * self.group : begin * self.group + rows]
        o = self._out[: heads * rows].view(heads, rows, self.dim)
        most, total = self._state
        low = max(0, offset - self.window + 1) // TILE * TILE
        high = padded(offset + len(out))
        for at in range(low, high, KEYS):
            n = min(KEYS, high - at)
            s = self._scores.view(-1)[: heads * rows * n].view(heads, rows, n)
            p = self._weights.view(-1)[: heads * rows * n].view(heads, rows, n)
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


def padded(rows: int) -> int:
    """Rows of whole tiles."""
    return -(-rows // TILE) * TILE


def heads(dim: int, cache: str) -> str:
    return f"heads<{dim}, Plain<{dim}>, Plain<{dim}>, {cache}>"


def earlier(dim: int, cache: str) -> str:
    return f"earlier<{dim}, Plain<{dim}>, {cache}>"


def softmax(dim: int) -> str:
    return f"softmax<{dim}, {KEYS // 512}>"
