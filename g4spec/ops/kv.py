"""Keys and values of the sequence so far, addressed by absolute position.

Layers with a sliding window keep a ring; others keep every position. Appending does not commit:
rows of rejected tokens are simply overwritten by the next step, and no read ever reaches past the
positions it asks for. A ring therefore has room for its window plus the longest step, so that a
rejected row never overwrites one that is still visible. Buffers start as NaN: whatever reads a
slot that was never written shows it.
"""

from __future__ import annotations

import math

import torch


class LayerKV:
    """One layer's keys and values.

    Args:
        n_kv, head_dim: shape of a row, [n_kv, head_dim] for keys and for values.
        n_ctx: positions the sequence may have.
        window: sliding window, or None to keep all positions.
        slack: most rows appended in one call (a step or a prefill chunk).
    """

    def __init__(
        self,
        n_kv: int,
        head_dim: int,
        n_ctx: int,
        window: int | None,
        slack: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.n_kv, self.head_dim, self.window = n_kv, head_dim, window
        self.capacity = capacity(n_ctx, window, slack)
        self._rows = torch.full((2, self.capacity, n_kv, head_dim), math.nan, device=device)

    def append(self, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write rows [T, n_kv, head_dim] for consecutive `positions` [T]."""
        assert len(keys) <= self.capacity, (len(keys), self.capacity)
        slots = positions % self.capacity
        self._rows[0, slots] = keys
        self._rows[1, slots] = values

    def read(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of positions first .. last, both included: [n, n_kv, head_dim] each."""
        assert 0 <= first <= last < first + self.capacity, (first, last, self.capacity)
        slots = (torch.arange(last - first + 1, device=self._rows.device) + first) % self.capacity
        return self._rows[0, slots], self._rows[1, slots]

    def blocks(self, first: int, last: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions first .. last in blocks aligned to multiples of `size`, zeros around them.

        Returns:
            Keys and values, each [blocks, n_kv, size, head_dim].
        """
        begin = first // size * size
        count = (last - begin) // size + 1
        keys, values = self.read(first, last)
        padded = keys.new_zeros(2, count * size, self.n_kv, self.head_dim)
        padded[0, first - begin : last - begin + 1] = keys
        padded[1, first - begin : last - begin + 1] = values
        padded = padded.view(2, count, size, self.n_kv, self.head_dim).transpose(2, 3).contiguous()
        return padded[0], padded[1]


def capacity(n_ctx: int, window: int | None, slack: int) -> int:
    """Rows a layer's cache holds; what memory estimates count."""
    return n_ctx if window is None else min(n_ctx, window + slack)
