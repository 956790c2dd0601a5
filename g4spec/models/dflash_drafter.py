"""How a DFlash draft computes: context from target features, one block a proposal.

DSpark and DFlash2 change what is read from the block (`choose`) and wrap the sublayers of its rows
(`before`, `after`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from g4spec.models import gemma4
from g4spec.models.spec import Chooser, Committed, LayerSpec, TargetView

if TYPE_CHECKING:
    import torch

    from g4spec.gguf import GGUF
    from g4spec.models.dflash_backbone import Config
    from g4spec.runtime.kv import LayerKV
    from g4spec.runtime.ops import Ops


class Drafter:
    """Proposes a block of tokens in one pass (`g4spec.models.spec.Draft`).

    Args:
        file: the draft's GGUF file (unused: everything is in its tensors).
        kv: one `LayerKV` per layer, shaped as `caches` asks.
        window: bound on the context rows that full-attention layers see, or None.
    """

    name = "dflash"

    def __init__(
        self,
        config: Config,
        weights: Mapping[str, Any],
        ops: Ops,
        target: TargetView,
        file: GGUF,
        kv: list[LayerKV],
        window: int | None = None,
    ) -> None:
        self.config, self.w, self.ops, self.target, self.kv = config, weights, ops, target, kv
        self.window = window
        self.taps = config.target_layers
        self.max_tokens = config.n_drafted
        layer = config.layers[0]
        self._freqs = ops.rope_freqs(layer.rope_base, layer.head_dim,
                                     weights.get("rope_freqs.weight"))  # fmt: skip

    def reset(self) -> None:
        """Nothing to forget: cache rows are addressed by position and overwritten."""

    def commit(self, step: Committed) -> None:
        """Append the context keys and values of verified tokens."""
        ops, w, eps = self.ops, self.w, self.config.eps
        context = ops.rms_norm(ops.linear(step.taps, w["fc.weight"]),
                               w["enc.output_norm.weight"], eps)  # fmt: skip
        positions = ops.positions(step.start, len(step.ids))
        for spec in self.config.layers:
            self._append(spec, context, positions)

    def propose(self, anchor: int, position: int, count: int, chooser: Chooser) -> list[int]:
        """Up to `count` tokens for positions `position + 1 ...`."""
        return self.choose(self.block(anchor, position), anchor, position, count, chooser)

    def block(self, anchor: int, position: int) -> torch.Tensor:
        """Rows of the block that starts at `position`, after the final norm: [B, H]."""
        c, ops = self.config, self.ops
        ids = ops.ids([anchor] + [c.mask_token] * (c.block_size - 1))
        if c.own_embed:
            x = ops.embed(self.w["token_embd.weight"], ids, c.embed_scale)
        else:
            x = self.target.embed(ids, scaled=False) * c.embed_scale
        positions = ops.positions(position, c.block_size)
        for spec in c.layers:
            x = self._layer(spec, x, positions, position)
        return ops.rms_norm(x, self.w["output_norm.weight"], c.eps)

    def choose(
        self, rows: torch.Tensor, anchor: int, position: int, count: int, chooser: Chooser
    ) -> list[int]:
        """Tokens read from the block's rows [B, H]."""
        z = self.widen(self.logits(self.drafting(rows, count)))
        return [chooser.choose(row, position + 1 + j) for j, row in enumerate(z)]

    def drafting(self, rows: torch.Tensor, count: int) -> torch.Tensor:
        """The `count` rows [count, H] of a block [B, H] that draft a token each."""
        first = 0 if self.config.from_anchor else 1
        return rows[first : first + count]

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows [T, H] -> logits of the head's own rows [T, D]."""
        if self.config.own_head:
            return self.ops.linear(hidden, self.w["output.weight"])
        if self.config.own_embed:
            return self.ops.linear(hidden, self.w["token_embd.weight"])
        return self.target.head(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`head`, capped."""
        z = self.head(hidden)
        return self.ops.softcap(z, self.config.softcap) if self.config.softcap else z

    def widen(self, z: torch.Tensor) -> torch.Tensor:
        """Logits [T, D] over the target's vocabulary [T, V], -inf where undraftable."""
        c = self.config
        return self.ops.scatter(z, self.w["d2t"], c.n_vocab) if c.n_draft else z

    def before(self, name: str, h: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """What the sublayer `name` ("blk.0.attn") is given for its normed input `h` [B, H], and
        what `after` wants to know."""
        return h, None

    def after(self, name: str, h: torch.Tensor, kept: Any) -> torch.Tensor:
        """What becomes of the sublayer's output `h` [B, H]."""
        return h

    def _append(self, spec: LayerSpec, h: torch.Tensor, positions: torch.Tensor) -> None:
        ops, w, b, c = self.ops, self.w, f"blk.{spec.index}.", self.config
        k = ops.linear(h, w[b + "attn_k.weight"]).view(len(h), spec.n_kv, spec.head_dim)
        v = k
        if not spec.v_from_k:
            v = ops.linear(h, w[b + "attn_v.weight"]).view(len(h), spec.n_kv, spec.head_dim)
        if c.gemma:
            v = ops.rms_norm(v, None, c.eps)
        k = ops.rope(ops.rms_norm(k, w[b + "attn_k_norm.weight"], c.eps), positions, self._freqs)
        self.kv[spec.index].append(int(positions[0]), k, v)

    def _layer(
        self, spec: LayerSpec, x: torch.Tensor, positions: torch.Tensor, anchor: int
    ) -> torch.Tensor:
        ops, w, b, c = self.ops, self.w, f"blk.{spec.index}.", self.config
        h, kept = self.before(b + "attn", ops.rms_norm(x, w[b + "attn_norm.weight"], c.eps))
        self._append(spec, h, positions)
        q = ops.heads(h, w[b + "attn_q.weight"], w[b + "attn_q_norm.weight"], spec.head_dim, c.eps)
        first, last = self._interval(spec, positions, anchor)
        h = ops.attend(ops.rope(q, positions, self._freqs), self.kv[spec.index], first, last,
                       1.0 if c.gemma else spec.head_dim**-0.5)  # fmt: skip
        h = self.after(b + "attn", ops.linear(h, w[b + "attn_output.weight"]), kept)
        if c.gemma:
            return gemma4.sandwich(ops, w, b, x, h, c.eps)
        x = x + h
        h, kept = self.before(b + "ffn", ops.rms_norm(x, w[b + "ffn_norm.weight"], c.eps))
        h = ops.gated(h, w[b + "ffn_gate.weight"], w[b + "ffn_up.weight"],
                      w[b + "ffn_down.weight"], ops.silu)  # fmt: skip
        return x + self.after(b + "ffn", h, kept)

    def _interval(
        self, spec: LayerSpec, positions: torch.Tensor, anchor: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """First and last position each row of the block sees, [B] each."""
        last = positions if spec.causal else positions * 0 + positions[-1]
        if spec.window is None:
            first = positions * 0 + max(0, anchor - self.window if self.window else 0)
        elif self.config.window_from_anchor:
            first = positions * 0 + max(0, anchor - spec.window)
        else:
            first = (positions - spec.window + 1).clamp(min=0)
        return first, last
