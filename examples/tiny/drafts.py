"""The drafts in plain torch: DFlash (both published formats) and the MTP assistant.

All methods work on batches. `anchors` [B, A] are positions whose token is known; a draft proposes
the tokens after them. Target features, K and V come from one pass over the whole rows
(`target.Whole(keep=True)`).
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from target import Target, TargetConfig, rms, rope_tables, rotate, weigh
from torch import Tensor, nn

MASK = 4


@dataclass(frozen=True)
class DFlashConfig:
    """Shapes of a DFlash draft; `own_head` > 0: speculators format with that many draft ids."""

    layers: tuple[str, ...] = ("S", "S", "F")
    taps: tuple[int, ...] = (1, 3, 4)  # indices of target layers whose output is read
    block: int = 16
    window: int = 256
    theta: float = 1e6
    own_head: int = 0
    hidden: int = 256
    mlp: int = 384
    heads: int = 4
    kv: int = 2
    head_dim: int = 64


ZLAB = DFlashConfig()
SPECULATORS = DFlashConfig(("S", "F"), (1, 2, 4), block=8, window=128, theta=1e4, own_head=1536)


class DFlashLayer(nn.Module):
    """Qwen3-style layer that attends to the context and then to the block."""

    def __init__(self, c: DFlashConfig, kind: str) -> None:
        super().__init__()
        self.c, self.kind = c, kind
        self.q, self.o = (
            nn.Linear(c.hidden, c.heads * c.head_dim, bias=False),
            nn.Linear(c.heads * c.head_dim, c.hidden, bias=False),
        )
        self.k, self.v = (nn.Linear(c.hidden, c.kv * c.head_dim, bias=False) for _ in "kv")
        self.gate, self.up = (nn.Linear(c.hidden, c.mlp, bias=False) for _ in "gu")
        self.down = nn.Linear(c.mlp, c.hidden, bias=False)
        self.norms = nn.ParameterList([nn.Parameter(torch.ones(c.hidden)) for _ in "ab"])
        self.q_norm, self.k_norm = (nn.Parameter(torch.ones(c.head_dim)) for _ in "qk")

    def visible(self, anchors: Tensor, t: int) -> Tensor:
        """Return which context rows each block row sees, bool [B, A, N, T]."""
        at, rows = (
            torch.arange(t, device=anchors.device),
            torch.arange(self.c.block, device=anchors.device),
        )
        mask = (at < anchors[..., None])[:, :, None].expand(-1, -1, self.c.block, -1)
        if self.kind == "F":
            return mask
        if self.c.own_head:  # the speculators package: the same rows for the whole block
            return mask & (at >= anchors[..., None, None] - self.c.window)
        return mask & (anchors[..., None, None] + rows[:, None] - at < self.c.window)

    def forward(self, x: Tensor, ctx: Tensor, anchors: Tensor, tables: tuple) -> Tensor:
        """Run the layer: x [B, A, N, H], ctx [B, T, H] -> [B, A, N, H]."""
        c, h = self.c, rms(x, self.norms[0])
        split = lambda y, n: y.unflatten(-1, (n, c.head_dim))  # noqa: E731
        (cos_c, sin_c), (cos_b, sin_b) = tables
        ctx_table, block_table = (
            (cos_c[..., None, :], sin_c[..., None, :]),
            (cos_b[..., None, :], sin_b[..., None, :]),
        )
        q = rotate(rms(split(self.q(h), c.heads), self.q_norm), block_table).unflatten(
            3, (c.kv, c.heads // c.kv)
        )
        k_c = rotate(rms(split(self.k(ctx), c.kv), self.k_norm), ctx_table)
        k_b = rotate(rms(split(self.k(h), c.kv), self.k_norm), block_table)
        v_c, v_b = split(self.v(ctx), c.kv), split(self.v(h), c.kv)
        scale = c.head_dim**-0.5
        s_c = torch.einsum("banhgd,bthd->bhgant", q, k_c) * scale
        s_c = s_c.masked_fill(~self.visible(anchors, ctx.shape[1])[:, None, None], -1e30)
        s_b = torch.einsum("banhgd,bamhd->bhganm", q, k_b) * scale
        if self.kind == "S":
            s_b = s_b.masked_fill(
                ~torch.ones(c.block, c.block, dtype=torch.bool, device=x.device).tril(), -1e30
            )
        p_c, p_b = weigh([s_c, s_b], v_c.dtype)
        out = torch.einsum("bhgant,bthd->banhgd", p_c, v_c) + torch.einsum(
            "bhganm,bamhd->banhgd", p_b, v_b
        )
        x = x + self.o(out.flatten(3))
        h = rms(x, self.norms[1])
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class DFlash(nn.Module):
    """Block draft that proposes block - 1 tokens at once."""

    def __init__(
        self, c: DFlashConfig, draft_ids: Tensor | None = None, embed: Tensor | None = None
    ) -> None:
        super().__init__()
        self.c, self.drafted = c, c.block - 1
        self.fc = nn.Linear(len(c.taps) * c.hidden, c.hidden, bias=False)
        self.hidden_norm, self.norm = (nn.Parameter(torch.ones(c.hidden)) for _ in "hn")
        self.layers = nn.ModuleList(DFlashLayer(c, kind) for kind in c.layers)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=p.shape[-1] ** -0.5)
        if c.own_head:
            self.embed = nn.Embedding.from_pretrained(embed.clone().float(), freeze=True)
            self.lm_head = nn.Linear(c.hidden, c.own_head, bias=False)
            self.lm_head.weight.data.copy_(embed[draft_ids])
            self.register_buffer("draft_ids", draft_ids, persistent=False)
            inverse = torch.full((embed.shape[0],), -100)
            inverse[draft_ids] = torch.arange(len(draft_ids))
            self.register_buffer("inverse", inverse, persistent=False)

    def forward(
        self, target: Target, ids: Tensor, outputs: list[Tensor], anchors: Tensor
    ) -> Tensor:
        """Return logits [B, A, block - 1, V or draft ids] of the rows after the anchor."""
        c = self.c
        ctx = rms(self.fc(torch.cat([outputs[i] for i in c.taps], -1)), self.hidden_norm)
        block = torch.full((*anchors.shape, c.block), MASK, device=ids.device)
        block[..., 0] = ids.gather(1, anchors)
        x = self.embed(block) if c.own_head else target.embed(block) * math.sqrt(c.hidden)
        positions = anchors[..., None] + torch.arange(c.block, device=ids.device)
        tables = tuple(
            rope_tables(p, c.head_dim, c.theta, c.head_dim // 2)
            for p in (torch.arange(ids.shape[1], device=ids.device)[None], positions)
        )
        for layer in self.layers:
            x = layer(x, ctx, anchors, tables)
        rows = rms(x[:, :, 1:], self.norm)
        return self.lm_head(rows).float() if c.own_head else target.head(rows)

    def loss(
        self,
        target: Target,
        ids: Tensor,
        outputs: list[Tensor],
        anchors: Tensor,
        labels: Tensor,
        live: Tensor,
    ) -> Tensor:
        """Compute the cross-entropy to the target's greedy tokens; early positions weigh more."""
        logits, n = self(target, ids, outputs, anchors), self.drafted
        labels = self.inverse[labels[..., :n]] if self.c.own_head else labels[..., :n]
        ce = F.cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="none").view(
            labels.shape
        )
        w = (
            torch.exp(-torch.arange(n, device=ids.device) / (n / 2.5))
            * live[..., :n]
            * (labels >= 0)
        )
        return (ce * w).sum() / w.sum()

    @torch.no_grad()
    def propose(
        self,
        target: Target,
        ids: Tensor,
        outputs: list[Tensor],
        kv: dict,
        hidden: Tensor,
        anchors: Tensor,
        n: int,
    ) -> Tensor:
        """Return drafted ids [B, A, n]."""
        best = self(target, ids, outputs, anchors)[..., :n, :].argmax(-1)
        return self.draft_ids[best] if self.c.own_head else best


@dataclass(frozen=True)
class AssistantConfig:
    """Shapes of the MTP assistant."""

    layers: tuple[str, ...] = ("S", "S", "S", "F")
    hidden: int = 128
    mlp: int = 256
    heads: int = 2
    centroids: int = 64
    top_k: int = 16
    steps: int = 6  # unrolled in training


class AssistantLayer(nn.Module):
    """Gemma 4 layer with queries only; it attends to the target's keys and values."""

    def __init__(self, c: AssistantConfig, t: TargetConfig, kind: str) -> None:
        super().__init__()
        self.kind, self.heads, self.d, self.window = kind, c.heads, t.head_dim[kind], t.window
        self.norms = nn.ParameterList(
            [nn.Parameter(torch.full((c.hidden,), g)) for g in (1.0, 0.5, 1.0, 0.5)]
        )
        self.q, self.o = (
            nn.Linear(c.hidden, c.heads * self.d, bias=False),
            nn.Linear(c.heads * self.d, c.hidden, bias=False),
        )
        self.q_norm = nn.Parameter(torch.full((self.d,), self.d**-0.25))
        self.gate, self.up = (nn.Linear(c.hidden, c.mlp, bias=False) for _ in "gu")
        self.down = nn.Linear(c.mlp, c.hidden, bias=False)
        self.scalar = nn.Parameter(torch.ones(1))

    def forward(
        self, x: Tensor, table: tuple[Tensor, Tensor], kv: tuple[Tensor, Tensor], mask: Tensor
    ) -> Tensor:
        """Run the layer on x [B, A, h]; mask [B, A, T]: visible keys."""
        q = rms(self.q(rms(x, self.norms[0])).unflatten(-1, (self.heads, self.d)), self.q_norm)
        q = rotate(q, (table[0][..., None, :], table[1][..., None, :]))
        s = torch.einsum("bahd,btd->bhat", q, kv[0]).float().masked_fill(~mask[:, None], -1e30)
        h = torch.einsum("bhat,btd->bahd", torch.softmax(s, -1).to(q.dtype), kv[1])
        x = x + rms(self.o(h.flatten(2)), self.norms[1])
        h = rms(x, self.norms[2])
        h = self.down(F.gelu(self.gate(h), approximate="tanh") * self.up(h))
        return (x + rms(h, self.norms[3])) * self.scalar


def clusters(embed: Tensor, count: int) -> Tensor:
    """Order token ids so that equal chunks are clusters (median splits, main direction)."""
    parts = [torch.arange(embed.shape[0])]
    while len(parts) < count:
        halves: list[Tensor] = []
        for part in parts:
            x = embed[part].double() - embed[part].double().mean(0)
            along = x @ torch.linalg.eigh(x.T @ x)[1][:, -1]
            order = part[along.argsort(stable=True)]
            halves += list(order.chunk(2))
        parts = halves
    return torch.cat([p.sort()[0] for p in parts])


class Assistant(nn.Module):
    """MTP assistant: drafts one token per step, always at the position of the anchor."""

    def __init__(self, c: AssistantConfig, t: TargetConfig, ordering: Tensor) -> None:
        super().__init__()
        self.c, self.t, self.drafted = c, t, 15
        self.embed = nn.Embedding(t.vocab, c.hidden)
        self.pre, self.post = (
            nn.Linear(2 * t.hidden, c.hidden, bias=False),
            nn.Linear(c.hidden, t.hidden, bias=False),
        )
        self.layers = nn.ModuleList(AssistantLayer(c, t, kind) for kind in c.layers)
        self.norm = nn.Parameter(torch.ones(c.hidden))
        self.centroids = nn.Linear(c.hidden, c.centroids, bias=False)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=p.shape[-1] ** -0.5)
        self.register_buffer("ordering", ordering, persistent=False)
        cluster = torch.empty(t.vocab, dtype=torch.long)
        cluster[ordering.cpu()] = torch.arange(t.vocab) // (t.vocab // c.centroids)
        self.register_buffer("cluster", cluster, persistent=False)

    def context(self, anchors: Tensor, length: int) -> tuple[dict, dict]:
        """Return RoPE tables at the anchors and masks of visible target keys, by layer kind."""
        at = torch.arange(length, device=anchors.device)
        before = at < anchors[..., None]
        masks = {"F": before, "S": before & (anchors[..., None] - at < self.t.window)}
        s, f = self.t.head_dim["S"], self.t.head_dim["F"]
        return {
            "S": rope_tables(anchors, s, 1e4, s // 2),
            "F": rope_tables(anchors, f, 1e6, f // 8),
        }, masks

    def step(self, e: Tensor, h: Tensor, tables: dict, masks: dict, kv: dict) -> Tensor:
        """Return the normed hidden state [B, A, h] for embedding `e` and hidden state `h`."""
        donors = {kind: max(i for i, k in enumerate(self.t.layers) if k == kind) for kind in "SF"}
        x = self.pre(torch.cat([e, h.to(e.dtype)], -1))
        for layer in self.layers:
            x = layer(x, tables[layer.kind], kv[donors[layer.kind]], masks[layer.kind])
        return rms(x, self.norm)

    def loss(
        self,
        target: Target,
        ids: Tensor,
        kv: dict,
        hidden: Tensor,
        anchors: Tensor,
        labels: Tensor,
        live: Tensor,
    ) -> Tensor:
        """Compute the loss of tokens and clusters; inputs are the target's greedy tokens."""
        tables, masks = self.context(anchors, ids.shape[1])
        token, total, weight = ids.gather(1, anchors), 0.0, 0.0
        h = hidden.gather(1, (anchors - 1)[..., None].expand(-1, -1, hidden.shape[-1]))
        for j in range(self.c.steps):
            y = self.step(target.embed(token) * math.sqrt(self.t.hidden), h, tables, masks, kv)
            token = labels[..., j]
            ce = F.cross_entropy(
                F.linear(y, self.embed.weight.to(y.dtype)).float().flatten(0, 1),
                token.flatten(),
                reduction="none",
            )
            near = F.cross_entropy(
                self.centroids(y).float().flatten(0, 1),
                self.cluster[token].flatten(),
                reduction="none",
            )
            w = live[..., j].flatten() * math.exp(-j / 4)
            total, weight = total + ((ce + 0.3 * near) * w).sum(), weight + w.sum()
            h = self.post(y)
        return total / weight

    @torch.no_grad()
    def propose(
        self,
        target: Target,
        ids: Tensor,
        outputs: list[Tensor],
        kv: dict,
        hidden: Tensor,
        anchors: Tensor,
        n: int,
    ) -> Tensor:
        """Return drafted ids [B, A, n], chosen with the centroid head."""
        tables, masks = self.context(anchors, ids.shape[1])
        token, out = ids.gather(1, anchors), []
        h = hidden.gather(1, (anchors - 1)[..., None].expand(-1, -1, hidden.shape[-1]))
        for _ in range(n):
            y = self.step(target.embed(token) * math.sqrt(self.t.hidden), h, tables, masks, kv)
            chosen = self.centroids(y).topk(self.c.top_k, -1)[1]
            allowed = torch.zeros(
                *y.shape[:-1], self.c.centroids, dtype=torch.bool, device=y.device
            ).scatter(-1, chosen, True)
            logits = F.linear(y, self.embed.weight.to(y.dtype)).float()
            token = logits.masked_fill(~allowed[..., self.cluster], -torch.inf).argmax(-1)
            out.append(token)
            h = self.post(y)
        return torch.stack(out, -1)
