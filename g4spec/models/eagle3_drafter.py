"""How an EAGLE-3 draft computes: tokens beside features, a cache of its own, a chain of tokens."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from g4spec.models.drafter import WeightedDrafter
from g4spec.models.spec import (
    MAX_DRAFT,
    MAX_STEP_ROWS,
    Attention,
    Chooser,
    Committed,
    LayerSpec,
    Pick,
    Reach,
    Unseen,
)

if TYPE_CHECKING:
    import torch

    from g4spec.models.eagle3 import Config


class Drafter(WeightedDrafter):
    """Proposes a chain of tokens, or P-EAGLE's block (`g4spec.models.spec.Draft`).

    Row p of the cache holds token p + 1 beside the feature of position p. The feature of the newest
    position waits for the token after it, which is the next anchor.
    """

    name = "eagle3"
    config: Config

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        c, ops, layer = self.config, self.ops, self.config.layers[0]
        self.max_tokens = min(c.depths or MAX_DRAFT, MAX_DRAFT)
        self.at_once = c.depths > 0
        self._freqs = ops.rope_freqs(layer.rope_base, layer.head_dim)
        self.mask = c.mask_token
        self._waiting = self._freqs.new_zeros(1, c.n_embd)
        sizes = (1, 2, 4, 8, MAX_STEP_ROWS)
        self._features = ops.graph(self._fused, sizes, keep=1)
        self._context = ops.graph(self._read_context, sizes)
        self._draft = ops.graph(self._read_and_head, sizes)
        self.reset()

    def reset(self) -> None:
        """Forget the sequence; cache rows are addressed by position and overwritten."""
        self._begun = False

    def commit(self, step: Committed) -> None:
        """Read verified tokens beside the features before them."""
        (g,), ids, start = self._features(step.ids, step.start, step.taps), step.ids, step.start
        if self._begun:
            features, start = self.ops.join([self._waiting, g[:-1]]), start - 1
        else:
            ids, features = ids[1:], g[:-1]
        if ids:
            self._context(ids, start, features)
        self._waiting.copy_(g[-1:])
        self._begun = True

    def propose(self, anchor: int, position: int, count: int, chooser: Chooser) -> list[int]:
        """Up to `count` tokens for positions `position + 1 ...`."""
        assert self._begun, "propose before commit"
        if self.config.depths:
            return self._block(anchor, position, count, chooser)
        token, feature, out = anchor, self._waiting, list[int]()
        seen_from = self.ops.positions(position - 1, 1)
        for j in range(count):
            # The window stays where the first row put it, as in training.
            logits, feature = self._draft([token], position - 1 + j, feature, seen_from)
            token = chooser.choose(logits[0], position + 1 + j)
            out.append(token)
        return out

    def _block(self, anchor: int, position: int, count: int, chooser: Chooser) -> list[int]:
        ids = [anchor, *[self.mask] * (count - 1)]
        logits, _ = self._draft(ids, position - 1, self._block_features(count),
                                self.ops.positions(position - 1, count))  # fmt: skip
        return [chooser.choose(row, position + 1 + j) for j, row in enumerate(logits)]

    def _block_features(self, count: int) -> torch.Tensor:
        """What stands beside the tokens of P-EAGLE's block: [count, E]."""
        return self.ops.join([self._waiting, self._unknown.expand(count - 1, -1)])

    @cached_property
    def _unknown(self) -> torch.Tensor:
        """P-EAGLE's feature of positions that nobody has read, [1, E]."""
        ids, taps = self.ops.ids([0]), self.w["mask_hidden.weight"][0]
        return self._fused(ids, ids, taps)[0]

    def fill(
        self, ids: torch.Tensor, positions: torch.Tensor, count: int, pick: Pick
    ) -> torch.Tensor:
        """See `g4spec.models.spec.Recordable`."""
        rows = positions[:count] - 1
        if self.config.depths:
            logits, _ = self._read_and_head(ids[:count], rows, self._block_features(count), rows)
            return pick(logits, 0)
        token, feature, out = ids[:1], self._waiting, []
        for j in range(count):
            logits, feature = self._read_and_head(token, rows[j : j + 1], feature, rows[:1])
            token = pick(logits, j)
            out.append(token)
        return self.ops.join(out)

    def take(self, rows: Unseen, accepted: torch.Tensor) -> None:
        """See `g4spec.models.spec.Recordable`. `fill` has left the row in front of the step's: the
        anchor beside the feature that waited for it. So this reads nothing that it writes, and may
        be done again."""
        (g,) = self._fused(rows.ids, rows.positions, rows.taps)
        self._read_context(rows.ids[1:], rows.positions[:-1], g[:-1])
        self._waiting.copy_(g[accepted])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows [T, H] -> logits over the target's vocabulary [T, V], -inf where undraftable."""
        c = self.config
        if not c.own_head:
            return self.ops.logits(hidden, self.target.table)
        z = self.ops.logits(hidden, self.w["output.weight"])
        return self.ops.scatter(z, self.w["d2t"], c.n_vocab) if c.n_draft else z

    def _fused(
        self, ids: torch.Tensor, positions: torch.Tensor, taps: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Features of the target [T, n * B] -> [T, E]."""
        c, ops = self.config, self.ops
        if c.norm_before_fc:
            taps = ops.rms_norm(taps, self.w["enc.output_norm.weight"], c.eps)
        if c.fc_norm:
            parts = taps.chunk(len(c.target_layers), dim=-1)
            taps = ops.concat([ops.rms_norm(part, self.w[f"fc_norm.{i}.weight"], c.eps)
                               for i, part in enumerate(parts)])  # fmt: skip
        return (ops.linear(taps, self.w["fc.weight"]),)

    def _read_context(
        self, ids: torch.Tensor, positions: torch.Tensor, features: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Keys and values of verified tokens [T] beside features [T, E], at rows `positions`."""
        self._read(ids, positions, features, positions, keys_only=True)
        return ()

    def _read_and_head(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        features: torch.Tensor,
        seen_from: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Tokens beside features -> their logits, and the features of the rows after them."""
        x = self._read(ids, positions, features, seen_from)
        h = self.ops.rms_norm(x, self.w["output_norm.weight"], self.config.eps)
        return self.logits(h), h if self.config.norm_output else x

    def _read(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        features: torch.Tensor,
        seen_from: torch.Tensor,
        *,
        keys_only: bool = False,
    ) -> torch.Tensor:
        """Tokens beside features [T, E] -> hidden rows before the norm [T, E].

        Args:
            seen_from: the row from which the window of each row is counted, [T].
            keys_only: stop when the last layer has its keys and values.
        """
        c, ops, w = self.config, self.ops, self.w
        e = (ops.embed(w["token_embd.weight"], ids, 1.0) if c.own_embed
             else self.target.embed(ids, 1.0))  # fmt: skip
        x, last = features, len(c.layers) - 1
        reaches = [Reach.causal(s.window or self.window) for s in c.layers]
        spans = ops.spans(seen_from, set(reaches))
        for spec in c.layers:
            b = f"blk.{spec.index}."
            if spec.index == 0:
                normed = ops.rms_norm(x, w[b + "attn_norm_2.weight"], c.eps)
                h = ops.concat([ops.rms_norm(e, w[b + "attn_norm.weight"], c.eps), normed])
                x = normed if c.norm_before_residual else x
            done = keys_only and spec.index == last
            q = ops.qkv(h, self._attention(spec), positions, self.kv[spec.index], queries=not done)
            if done:
                break
            first, _ = spans[reaches[spec.index]]
            h = ops.attend(q, self.kv[spec.index], first, positions, spec.head_dim**-0.5)
            h = ops.linear(h, w[b + "attn_output.weight"], parts=True)
            x, h = ops.norm_residual_norm(h, x, None, c.eps, w[b + "ffn_norm.weight"])
            following = w[f"blk.{spec.index + 1}.attn_norm.weight"] if spec.index < last else None
            h = self.gated(b, h, parts=True)
            x, h = ops.norm_residual_norm(h, x, None, c.eps, following)
        return x

    def _attention(self, spec: LayerSpec) -> Attention:
        w, b, normed = self.w, f"blk.{spec.index}.", self.config.qk_norm
        return Attention(
            q=w[b + "attn_q.weight"],
            k=w[b + "attn_k.weight"],
            v=w[b + "attn_v.weight"],
            q_norm=w[b + "attn_q_norm.weight"] if normed else None,
            k_norm=w[b + "attn_k_norm.weight"] if normed else None,
            v_norm=False,
            head_dim=spec.head_dim,
            eps=self.config.eps,
            freqs=self._freqs,
            pairs=True,
        )
