"""How a DFlash draft computes: context from target features, one block a proposal.

DSpark and DFlash2 change what is read from the block (`choose`) and wrap the sublayers of its rows
(`before`, `after`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from g4spec.core import MAX_STEP_ROWS, Batch, Pick, Reach, StepRows
from g4spec.models import gemma4
from g4spec.models.drafter import WeightedDrafter
from g4spec.models.spec import LayerSpec
from g4spec.ops.weights import Attention

if TYPE_CHECKING:
    import torch

    from g4spec.models.dflash_backbone import Config


class Drafter(WeightedDrafter):
    """Proposes a block of tokens in one pass.

    Attributes:
        numbers: whether `before` and `after` compute with the sublayers' input themselves.
    """

    name = "dflash"
    config: Config
    unpacked = False
    one_pass = True

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        c, ops = self.config, self.ops
        self.max_tokens = c.n_drafted
        layer = c.layers[0]
        self._freqs = ops.rope_freqs(
            layer.rope_base, layer.head_dim, self.w.get("rope_freqs.weight")
        )
        self.mask = c.mask_token
        self.rows = max(c.block_size, MAX_STEP_ROWS)

    def commit(self, rows: StepRows, accepted: torch.Tensor) -> None:
        """Append the context keys and values of all rows."""
        ops, w, layers = self.ops, self.w, self.config.layers
        context = ops.norm_rows(
            ops.linear(rows.taps, w["fc.weight"]), w["enc.output_norm.weight"], self.config.eps
        )
        ops.keys_values(
            context,
            [self._attention(s) for s in layers],
            rows.batch,
            [self.caches[s.index] for s in layers],
        )

    def propose(self, batch: Batch, count: int, pick: Pick) -> torch.Tensor:
        """See `g4spec.core.Draft`."""
        c, n = self.config, len(batch.sizes)
        rows = self.block(batch.columns(0, c.block_size))
        drafting = self.draft_rows(rows, count)
        if self.one_pass and not c.n_draft:
            flat = drafting.flatten(0, 1)
            return self.ops.pick(flat, self._table, pick, 0, c.softcap).view(n, count)
        logits = self.logits(drafting.flatten(0, 1)).view(n, count, -1)
        return self.choose(rows, logits, batch.columns(0, 1).ids, pick)

    def choose(
        self, rows: torch.Tensor, logits: torch.Tensor, anchors: torch.Tensor, pick: Pick
    ) -> torch.Tensor:
        """Tokens [S, count] read from blocks [S, B, H] and their drafting rows' logits
        [S, count, D]; `anchors` [S]."""
        return pick(self.to_full_vocab(logits.flatten(0, 1)), 0).view(logits.shape[:2])

    def draft_rows(self, rows: torch.Tensor, count: int) -> torch.Tensor:
        """The `count` rows of each block [S, B, H] that draft a token each, [S, count, H]."""
        first = 0 if self.config.from_anchor else 1
        return rows[:, first : first + count]

    def logits(self, hidden: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Rows [T, H] -> capped logits of the head's own rows [T, D]."""
        return self.ops.logits(hidden, self._table, self.config.softcap, scale)

    @property
    def _table(self) -> Any:
        """What the head multiplies with: the draft's own, or the target's."""
        c = self.config
        if not (c.own_head or c.own_embed):
            return self.target.table
        return self.w["output.weight" if c.own_head else "token_embd.weight"]

    def to_full_vocab(self, z: torch.Tensor) -> torch.Tensor:
        """Logits [T, D] over the target's vocabulary [T, V], -inf where undraftable."""
        c = self.config
        return self.ops.scatter(z, self.w["d2t"], c.n_vocab) if c.n_draft else z

    def before_sublayer(self, name: str, h: Any, batch: Batch) -> tuple[Any, Any]:
        """What the sublayer `name` ("blk.0.attn") is given for its normed input `h` (rows [T, H];
        see `numbers`), and what `after` wants to know."""
        return h, None

    def after_sublayer(self, name: str, h: torch.Tensor, kept: Any) -> torch.Tensor:
        """What becomes of the sublayer's output `h` [T, H]."""
        return h

    def block(self, batch: Batch) -> torch.Tensor:
        """Rows of S blocks after the final norm, [S, B, H]; `batch`: anchors and masks."""
        c, ops, w = self.config, self.ops, self.w
        if c.own_embed:
            x = ops.embed(w["token_embd.weight"], batch.ids, c.embed_scale)
        else:
            x = self.target.embed(batch.ids, c.embed_scale)
        reaches = [self._reach(s.window, s.causal) for s in c.layers]
        spans = ops.spans(batch, set(reaches))
        norms = [w[f"blk.{s.index}.attn_norm.weight"] for s in c.layers]
        h = (ops.rms_norm if self.unpacked else ops.norm_rows)(x, norms[0], c.eps)
        next_norms = [*norms[1:], w["output_norm.weight"]]
        for spec, reach, next_norm in zip(c.layers, reaches, next_norms, strict=True):
            x, h = self._layer(spec, x, h, batch, spans[reach], next_norm)
        return h.view(len(batch.sizes), c.block_size, -1)

    def _attention(self, spec: LayerSpec) -> Attention:
        w, b, c = self.w, f"blk.{spec.index}.", self.config
        return Attention(
            q=w[b + "attn_q.weight"],
            k=w[b + "attn_k.weight"],
            v=None if spec.v_from_k else w[b + "attn_v.weight"],
            q_norm=w[b + "attn_q_norm.weight"],
            k_norm=w[b + "attn_k_norm.weight"],
            v_norm=c.gemma,
            head_dim=spec.head_dim,
            eps=c.eps,
            freqs=self._freqs,
        )

    def _layer(
        self,
        spec: LayerSpec,
        x: torch.Tensor,
        h: Any,
        batch: Batch,
        span: tuple[torch.Tensor, torch.Tensor],
        next_norm: torch.Tensor,
    ) -> tuple[torch.Tensor, Any]:
        """One layer of the block: residual `x` [T, H] and its normed rows `h`, of this layer and
        then of the next, or behind the last one numbers."""
        ops, w, b, c = self.ops, self.w, f"blk.{spec.index}.", self.config
        h, kept = self.before_sublayer(b + "attn", h, batch)
        q = ops.qkv(h, self._attention(spec), batch, self.caches[spec.index])
        scale = 1.0 if c.gemma else spec.head_dim**-0.5
        h = ops.linear(
            ops.attend(q, self.caches[spec.index], batch, *span, scale),
            w[b + "attn_output.weight"],
            partial_sums=not self.unpacked,
        )
        h = self.after_sublayer(b + "attn", h, kept)
        unpacked = self.unpacked or spec is c.layers[-1]
        if c.gemma:
            return gemma4.finish_layer(ops, w, b, x, h, c.eps, next_norm, unpacked=unpacked)
        x, h = ops.norm_residual_norm(
            h, x, None, c.eps, w[b + "ffn_norm.weight"], unpacked=self.unpacked
        )
        h, kept = self.before_sublayer(b + "ffn", h, batch)
        h = self.after_sublayer(b + "ffn", self.gated(b, h, partial_sums=not self.unpacked), kept)
        return ops.norm_residual_norm(h, x, None, c.eps, next_norm, unpacked=unpacked)

    def _reach(self, window: int | None, causal: bool) -> Reach:
        """What the rows of a block see in a layer."""
        if window is not None and not self.config.window_from_anchor:
            return Reach(window - 1, to_last=not causal)
        return Reach(window or self.window, from_first=True, to_last=not causal)
