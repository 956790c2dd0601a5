"""Forward pass of DFlash drafts: a KV cache of target features, one block per proposal.

DSpark and DFlash2 override how tokens are chosen from the block (`choose`); DFlash2 also hooks into
the sublayers (`before_sublayer`, `after_sublayer`).
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
    from g4spec.ops.spans import Span


MAX_COMMIT_ROWS = 128
"""Maximum number of rows per sequence of a `commit` after several steps."""


class Drafter(WeightedDrafter):
    """Proposes a block of tokens in one pass.

    Attributes:
        unpacked: whether the sublayer hooks need float32 tensors instead of packed rows.
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
        # Rows are computed one by one, but no two may have the same place in a ring.
        self.commit_rows = min([MAX_COMMIT_ROWS, *(kv.capacity for kv in self.caches if kv.window)])

    def commit(self, rows: StepRows, accepted: torch.Tensor) -> None:
        """Append the keys and values of all rows, computed from the target's features."""
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
        predicting = self.draft_rows(rows, count)
        if self.one_pass and not c.n_draft:
            flat = predicting.flatten(0, 1)
            return self.ops.pick(flat, self._table, pick, 0, c.softcap).view(n, count)
        logits = self.logits(predicting.flatten(0, 1)).view(n, count, -1)
        return self.choose(rows, logits, batch.columns(0, 1).ids, pick)

    def choose(
        self, rows: torch.Tensor, logits: torch.Tensor, anchors: torch.Tensor, pick: Pick
    ) -> torch.Tensor:
        """Choose tokens [S, count].

        Args:
            rows: final-norm output of the blocks, [S, B, H].
            logits: logits of the predicting rows, [S, count, D].
            anchors: token ids [S].
        """
        return pick(self.to_full_vocab(logits.flatten(0, 1)), 0).view(logits.shape[:2])

    def draft_rows(self, rows: torch.Tensor, count: int) -> torch.Tensor:
        """Return the `count` rows of each block [S, B, H] that predict a token: [S, count, H]."""
        first = 0 if self.config.from_anchor else 1
        return rows[:, first : first + count].contiguous()  # of one row, flatten would be a view

    def logits(self, hidden: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Compute softcapped logits [T, D] of rows [T, H], over the draft's own vocabulary."""
        return self.ops.logits(hidden, self._table, self.config.softcap, scale)

    @property
    def _table(self) -> Any:
        """Output projection: the draft's own, or the target's."""
        c = self.config
        if not (c.own_head or c.own_embed):
            return self.target.table
        return self.w["output.weight" if c.own_head else "token_embd.weight"]

    def to_full_vocab(self, z: torch.Tensor) -> torch.Tensor:
        """Expand logits [T, D] to the target's vocabulary [T, V]; -inf for tokens it cannot
        draft."""
        c = self.config
        return self.ops.scatter(z, self.w["d2t"], c.n_vocab) if c.n_draft else z

    def before_sublayer(self, name: str, h: Any, batch: Batch) -> tuple[Any, Any]:
        """Hook before sublayer `name` ("blk.0.attn"): return its input, computed from the normed
        rows `h` [T, H], and a value for `after_sublayer`."""
        return h, None

    def after_sublayer(self, name: str, h: torch.Tensor, saved: Any) -> torch.Tensor:
        """Hook after a sublayer: return its output, computed from `h` [T, H]."""
        return h

    def block(self, batch: Batch) -> torch.Tensor:
        """Compute S blocks -> [S, B, H] after the final norm. `batch`: anchors and mask tokens."""
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
            x, h = self._layer(spec, x, h, spans[reach], next_norm)
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
        span: Span,
        next_norm: torch.Tensor,
    ) -> tuple[torch.Tensor, Any]:
        """Compute one layer of the block.

        Args:
            x, h: residual [T, H] and its norm as rows.
            next_norm: weight [H] of the norm after the layer.

        Returns:
            Residual and norm for the next layer; the norm is float32 after the last layer.
        """
        ops, w, b, c = self.ops, self.w, f"blk.{spec.index}.", self.config
        h, saved = self.before_sublayer(b + "attn", h, span.batch)
        q = ops.qkv(h, self._attention(spec), span.batch, self.caches[spec.index])
        scale = 1.0 if c.gemma else spec.head_dim**-0.5
        h = ops.linear(
            ops.attend(q, self.caches[spec.index], span, scale),
            w[b + "attn_output.weight"],
            partial_sums=not self.unpacked,
        )
        h = self.after_sublayer(b + "attn", h, saved)
        unpacked = self.unpacked or spec is c.layers[-1]
        if c.gemma:
            return gemma4.finish_layer(ops, w, b, x, h, c.eps, next_norm, unpacked=unpacked)
        x, h = ops.norm_residual_norm(
            h, x, None, c.eps, w[b + "ffn_norm.weight"], unpacked=self.unpacked
        )
        h, saved = self.before_sublayer(b + "ffn", h, span.batch)
        h = self.after_sublayer(b + "ffn", self.gated(b, h, partial_sums=not self.unpacked), saved)
        return ops.norm_residual_norm(h, x, None, c.eps, next_norm, unpacked=unpacked)

    def _reach(self, window: int | None, causal: bool) -> Reach:
        """Return the range of positions that rows of a block attend to in a layer."""
        if window is not None and not self.config.window_from_anchor:
            return Reach(window - 1, to_last=not causal)
        return Reach(window or self.window, from_first=True, to_last=not causal)
