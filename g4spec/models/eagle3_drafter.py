"""Forward pass of EAGLE-3 and P-EAGLE drafts."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from g4spec.core import MAX_DRAFT, MAX_STEP_ROWS, Batch, Pick, Reach, StepRows
from g4spec.models.drafter import WeightedDrafter, accepted_rows, first_rows
from g4spec.models.spec import LayerSpec
from g4spec.ops.weights import Attention

if TYPE_CHECKING:
    import torch

    from g4spec.models.eagle3_config import Config


class Drafter(WeightedDrafter):
    """Drafts one token per pass, or P-EAGLE's block in one pass (`g4spec.core.Draft`).

    Row p of the cache is computed from token p and the feature of position p - 1; row 0 has no
    feature, and other rows do not attend to it. So a row depends only on tokens up to its own, and
    sequences with a common prefix can share pages. The feature of the last position is stored until
    the next anchor is known.
    """

    name = "eagle3"
    commit_rows = MAX_STEP_ROWS
    config: Config

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        c, ops, layer = self.config, self.ops, self.config.layers[0]
        self.max_tokens = min(c.depths or MAX_DRAFT, MAX_DRAFT)
        self.one_pass = c.depths > 0
        self._freqs = ops.rope_freqs(layer.rope_base, layer.head_dim)
        self.mask = c.mask_token
        self._last_feature = self._freqs.new_zeros(self.n_slots, c.n_embd)
        self.state = (self._last_feature,)

    def commit(self, rows: StepRows, accepted: torch.Tensor) -> None:
        """Append the cache rows of tokens with the features of their previous positions; the first
        token uses the stored feature."""
        batch = rows.batch
        slots, g = first_rows(batch, batch.slots), self._fused(rows.taps)
        previous = self._shifted(batch, g, self._last_feature[slots])
        self._layers(batch, previous, batch.positions, keys_only=True)
        self._last_feature[slots] = accepted_rows(batch, g, accepted)

    def propose(self, batch: Batch, count: int, pick: Pick) -> torch.Tensor:
        """See `g4spec.core.Draft`. The window of all rows starts where that of the anchor does, as
        in training."""
        rows = batch.columns(0, 1)
        feature, window_position = self._last_feature[rows.slots], rows.positions
        if self.config.depths:
            return self._block(batch.columns(0, count), feature, count, pick)
        out = []
        for j in range(count):
            logits, feature = self._forward(
                rows.with_positions(window_position + j), feature, window_position
            )
            token = pick(logits, j)
            out.append(token)
            rows = rows.with_ids(token)
        return self.ops.stack_columns(out)

    def _block(self, batch: Batch, feature: torch.Tensor, count: int, pick: Pick) -> torch.Tensor:
        """Draft P-EAGLE's block of `count` rows. `feature` [S, E]: features of the anchors."""
        n = len(batch.sizes)
        features = self._mask_feature.expand(n, count, -1).clone()
        features[:, 0] = feature
        logits, _ = self._forward(batch, features.flatten(0, 1), batch.positions)
        return pick(logits, 0).view(n, count)

    @cached_property
    def _mask_feature(self) -> torch.Tensor:
        """P-EAGLE's learned feature of mask tokens, [1, E]."""
        return self._fused(self.w["mask_hidden.weight"][0])

    def _shifted(self, batch: Batch, g: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        """Shift features g [T, E] one row down within each sequence; its first row is `first`
        [S, E]."""
        if len(batch.sizes) == 1:
            return self.ops.concat_rows([first, g[:-1]])
        out = self.ops.concat_rows([g[:1], g[:-1]])
        if n := batch.rows_per_sequence:
            out.view(len(batch.sizes), n, -1)[:, 0] = first
        else:
            out[list(batch.starts)] = first
        return out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits over the target's vocabulary [T, V] of rows [T, H]; -inf for tokens that
        it cannot draft."""
        c = self.config
        if not c.own_head:
            return self.ops.logits(hidden, self.target.table)
        z = self.ops.logits(hidden, self.w["output.weight"])
        return self.ops.scatter(z, self.w["d2t"], c.n_vocab) if c.n_draft else z

    def _fused(self, taps: torch.Tensor) -> torch.Tensor:
        """Project features of the target [T, n * B] -> [T, E]."""
        c, ops = self.config, self.ops
        if c.norm_before_fc:
            taps = ops.rms_norm(taps, self.w["enc.output_norm.weight"], c.eps)
        if c.fc_norm:
            parts = taps.chunk(len(c.target_layers), dim=-1)
            taps = ops.concat_columns(
                [
                    ops.rms_norm(part, self.w[f"fc_norm.{i}.weight"], c.eps)
                    for i, part in enumerate(parts)
                ]
            )
        return ops.linear(taps, self.w["fc.weight"])

    def _forward(
        self, batch: Batch, features: torch.Tensor, window_position: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute logits [T, V] of tokens and features, and the features for the next pass [T,
        E]."""
        x = self._layers(batch, features, window_position)
        h = self.ops.rms_norm(x, self.w["output_norm.weight"], self.config.eps)
        return self.logits(h), h if self.config.norm_output else x

    def _layers(
        self,
        batch: Batch,
        features: torch.Tensor,
        window_position: torch.Tensor,
        *,
        keys_only: bool = False,
    ) -> torch.Tensor:
        """Compute all layers over tokens and features [T, E] -> rows before the final norm [T, E].

        Args:
            window_position: position from which the window of each row is counted back, [T].
            keys_only: stop once the last layer has appended its keys and values.
        """
        c, ops, w = self.config, self.ops, self.w
        e = (
            ops.embed(w["token_embd.weight"], batch.ids, 1.0)
            if c.own_embed
            else self.target.embed(batch.ids, 1.0)
        )
        x, last = features, len(c.layers) - 1
        reaches = [Reach.causal(s.window or self.window) for s in c.layers]
        spans = ops.spans(batch.with_positions(window_position), set(reaches))
        own = batch.positions
        for spec in c.layers:
            b = f"blk.{spec.index}."
            if spec.index == 0:
                normed = ops.rms_norm(x, w[b + "attn_norm_2.weight"], c.eps)
                h = ops.concat_columns([ops.rms_norm(e, w[b + "attn_norm.weight"], c.eps), normed])
                x = normed if c.norm_before_residual else x
            done = keys_only and spec.index == last
            q = ops.qkv(h, self._attention(spec), batch, self.caches[spec.index], queries=not done)
            if done:
                break
            span = spans[reaches[spec.index]]
            first = span.first.clamp(min=1).minimum(own)  # row 0 attends to itself only
            span = replace(span, batch=batch, first=first, last=own)
            h = ops.attend(q, self.caches[spec.index], span, spec.head_dim**-0.5)
            h = ops.linear(h, w[b + "attn_output.weight"], partial_sums=True)
            x, h = ops.norm_residual_norm(h, x, None, c.eps, w[b + "ffn_norm.weight"])
            next_norm = w[f"blk.{spec.index + 1}.attn_norm.weight"] if spec.index < last else None
            h = self.gated(b, h, partial_sums=True)
            x, h = ops.norm_residual_norm(h, x, None, c.eps, next_norm)
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
            interleaved=True,
        )
