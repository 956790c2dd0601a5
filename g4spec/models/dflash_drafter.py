"""How a DFlash draft computes: context from target features, one block a proposal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from g4spec.models.spec import MAX_DRAFT, Chooser, Committed, LayerSpec, TargetView

if TYPE_CHECKING:
    import torch

    from g4spec.gguf import GGUF
    from g4spec.models.dflash import Config
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
        self.max_tokens = min(config.block_size - 1, MAX_DRAFT)
        self._freqs = ops.rope_freqs(config.layers[0].rope_base, config.layers[0].head_dim)

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
        c, ops = self.config, self.ops
        ids = ops.ids([anchor] + [c.mask_token] * (c.block_size - 1))
        if c.own_embed:
            x = ops.embed(self.w["token_embd.weight"], ids, c.embed_scale)
        else:
            x = self.target.embed(ids, scaled=False) * c.embed_scale
        positions = ops.positions(position, c.block_size)
        for spec in c.layers:
            x = self._layer(spec, x, positions, position)
        hidden = ops.rms_norm(x, self.w["output_norm.weight"], c.eps)
        logits = self.logits(hidden[1 : 1 + count])
        return [chooser.choose(row, position + 1 + j) for j, row in enumerate(logits)]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows [T, H] -> logits over the target's vocabulary [T, V], -inf where undraftable."""
        c = self.config
        if c.own_head:
            z = self.ops.linear(hidden, self.w["output.weight"])
        elif c.own_embed:
            z = self.ops.linear(hidden, self.w["token_embd.weight"])
        else:
            z = self.target.head(hidden)
        if c.softcap:
            z = self.ops.softcap(z, c.softcap)
        return self.ops.scatter(z, self.w["d2t"], c.n_vocab) if c.n_draft else z

    def _append(self, spec: LayerSpec, h: torch.Tensor, positions: torch.Tensor) -> None:
        ops, w, b, eps = self.ops, self.w, f"blk.{spec.index}.", self.config.eps
        k = ops.heads(h, w[b + "attn_k.weight"], w[b + "attn_k_norm.weight"], spec.head_dim, eps)
        v = ops.linear(h, w[b + "attn_v.weight"]).view(len(h), spec.n_kv, spec.head_dim)
        self.kv[spec.index].append(int(positions[0]), ops.rope(k, positions, self._freqs), v)

    def _layer(
        self, spec: LayerSpec, x: torch.Tensor, positions: torch.Tensor, anchor: int
    ) -> torch.Tensor:
        ops, w, b, eps = self.ops, self.w, f"blk.{spec.index}.", self.config.eps
        h = ops.rms_norm(x, w[b + "attn_norm.weight"], eps)
        self._append(spec, h, positions)
        q = ops.heads(h, w[b + "attn_q.weight"], w[b + "attn_q_norm.weight"], spec.head_dim, eps)
        first, last = self._interval(spec, positions, anchor)
        h = ops.attend(ops.rope(q, positions, self._freqs), self.kv[spec.index], first, last,
                       spec.head_dim**-0.5)  # fmt: skip
        x = x + ops.linear(h, w[b + "attn_output.weight"])
        h = ops.rms_norm(x, w[b + "ffn_norm.weight"], eps)
        return x + ops.gated(h, w[b + "ffn_gate.weight"], w[b + "ffn_up.weight"],
                             w[b + "ffn_down.weight"], ops.silu)  # fmt: skip

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
