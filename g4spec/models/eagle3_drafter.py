"""How an EAGLE-3 draft computes: tokens beside features, a cache of its own, a chain of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from g4spec.models.spec import MAX_DRAFT, Chooser, Committed, LayerSpec, TargetView

if TYPE_CHECKING:
    import torch

    from g4spec.gguf import GGUF
    from g4spec.models.eagle3 import Config
    from g4spec.runtime.kv import LayerKV
    from g4spec.runtime.ops import Ops


class Drafter:
    """Proposes a chain of tokens, or P-EAGLE's block (`g4spec.models.spec.Draft`).

    Row p of the cache holds token p + 1 beside the feature of position p. The feature of the newest
    position waits for the token after it, which is the next anchor.

    Args:
        file: the draft's GGUF file (unused: everything is in its tensors).
        kv: one `LayerKV` per layer, shaped as `caches` asks.
        window: bound on what full-attention layers see, or None.
    """

    name = "eagle3"

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
        self.max_tokens = min(config.depths or MAX_DRAFT, MAX_DRAFT)
        layer = config.layers[0]
        self._freqs = ops.rope_freqs(layer.rope_base, layer.head_dim)
        self.reset()

    def reset(self) -> None:
        """Forget the sequence; cache rows are addressed by position and overwritten."""
        self._waiting: torch.Tensor | None = None

    def commit(self, step: Committed) -> None:
        """Read verified tokens beside the features before them."""
        g, ids, start = self._fused(step.taps), list(step.ids), step.start
        if self._waiting is None:
            ids, features = ids[1:], g[:-1]
        else:
            features, start = self.ops.join([self._waiting, g[:-1]]), start - 1
        if ids:
            self._read(ids, features, start, keys_only=True)
        self._waiting = g[-1:]

    def propose(self, anchor: int, position: int, count: int, chooser: Chooser) -> list[int]:
        """Up to `count` tokens for positions `position + 1 ...`."""
        assert self._waiting is not None, "propose before commit"
        if self.config.depths:
            return self._block(anchor, position, count, chooser)
        token, feature, out = anchor, self._waiting, list[int]()
        for j in range(count):
            # The window stays where the first row put it, as in training.
            x = self._read([token], feature, position - 1 + j, seen_from=position - 1)
            h = self.ops.rms_norm(x, self.w["output_norm.weight"], self.config.eps)
            token = chooser.choose(self.logits(h)[0], position + 1 + j)
            feature = h if self.config.norm_output else x
            out.append(token)
        return out

    def _block(self, anchor: int, position: int, count: int, chooser: Chooser) -> list[int]:
        assert self._waiting is not None
        mask = self._fused(self.w["mask_hidden.weight"][0])
        features = self.ops.join([self._waiting, *[mask] * (count - 1)])
        ids = [anchor, *[self.config.mask_token] * (count - 1)]
        x = self._read(ids, features, position - 1)
        z = self.logits(self.ops.rms_norm(x, self.w["output_norm.weight"], self.config.eps))
        return [chooser.choose(row, position + 1 + j) for j, row in enumerate(z)]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows [T, H] -> logits over the target's vocabulary [T, V], -inf where undraftable."""
        c = self.config
        if not c.own_head:
            return self.target.head(hidden)
        z = self.ops.linear(hidden, self.w["output.weight"])
        return self.ops.scatter(z, self.w["d2t"], c.n_vocab) if c.n_draft else z

    def _fused(self, taps: torch.Tensor) -> torch.Tensor:
        """Features of the target [T, n * B] -> [T, E]."""
        c, ops = self.config, self.ops
        if c.norm_before_fc:
            taps = ops.rms_norm(taps, self.w["enc.output_norm.weight"], c.eps)
        if c.fc_norm:
            parts = taps.chunk(len(c.target_layers), dim=-1)
            taps = ops.concat([ops.rms_norm(part, self.w[f"fc_norm.{i}.weight"], c.eps)
                               for i, part in enumerate(parts)])  # fmt: skip
        return ops.linear(taps, self.w["fc.weight"])

    def _read(
        self,
        ids: Sequence[int],
        features: torch.Tensor,
        start: int,
        *,
        seen_from: int | None = None,
        keys_only: bool = False,
    ) -> torch.Tensor:
        """Tokens beside features [T, E] at rows start ... -> hidden rows before the norm [T, E].

        Args:
            seen_from: the row from which a window is counted; default: each row itself.
            keys_only: stop when the last layer has its keys and values.
        """
        c, ops, w = self.config, self.ops, self.w
        tokens = ops.ids(list(ids))
        e = (ops.embed(w["token_embd.weight"], tokens, 1.0) if c.own_embed
             else self.target.embed(tokens, scaled=False))  # fmt: skip
        positions = ops.positions(start, len(ids))
        x = features
        for spec in c.layers:
            b = f"blk.{spec.index}."
            h = ops.rms_norm(e if spec.index == 0 else x, w[b + "attn_norm.weight"], c.eps)
            if spec.index == 0:
                normed = ops.rms_norm(x, w[b + "attn_norm_2.weight"], c.eps)
                h = ops.concat([h, normed])
                x = normed if c.norm_before_residual else x
            self._append(spec, h, positions)
            if keys_only and spec.index == len(c.layers) - 1:
                break
            x = x + self._attention(spec, h, positions, seen_from)
            h = ops.rms_norm(x, w[b + "ffn_norm.weight"], c.eps)
            x = x + ops.gated(h, w[b + "ffn_gate.weight"], w[b + "ffn_up.weight"],
                              w[b + "ffn_down.weight"], ops.silu)  # fmt: skip
        return x

    def _heads(self, spec: LayerSpec, h: torch.Tensor, positions: torch.Tensor, of: str) -> Any:
        """Queries or keys `of` "attn_q" or "attn_k", rotated: [T, n, D]."""
        ops, b = self.ops, f"blk.{spec.index}."
        y = ops.linear(h, self.w[f"{b}{of}.weight"]).view(len(h), -1, spec.head_dim)
        if self.config.qk_norm:
            y = ops.rms_norm(y, self.w[f"{b}{of}_norm.weight"], self.config.eps)
        return ops.rope_pairs(y, positions, self._freqs)

    def _append(self, spec: LayerSpec, h: torch.Tensor, positions: torch.Tensor) -> None:
        v = self.ops.linear(h, self.w[f"blk.{spec.index}.attn_v.weight"])
        k = self._heads(spec, h, positions, "attn_k")
        self.kv[spec.index].append(int(positions[0]), k, v.view(len(h), spec.n_kv, spec.head_dim))

    def _attention(
        self, spec: LayerSpec, h: torch.Tensor, positions: torch.Tensor, seen_from: int | None
    ) -> torch.Tensor:
        window = spec.window or self.window
        first = positions * 0
        if window is not None:
            begin = positions if seen_from is None else first + seen_from
            first = (begin - window + 1).clamp(min=0)
        q = self._heads(spec, h, positions, "attn_q")
        h = self.ops.attend(q, self.kv[spec.index], first, positions, spec.head_dim**-0.5)
        return self.ops.linear(h, self.w[f"blk.{spec.index}.attn_output.weight"])
