"""The target in plain torch: Gemma 4 dense text, trainable, with pluggable attention.

The `attend` object decides how the layers run: on whole sequences (`Whole`, training), on greedy
branches from given positions of a sequence (`Branches`, labels for drafts), or on a batch with a KV
cache (`Cache`, generation). There is one K/V head, so K and V have no head axis: [B, T, d].
"""

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class TargetConfig:
    """Shapes of the family's target."""

    vocab: int = 4096
    hidden: int = 256
    mlp: int = 640
    heads: int = 2
    window: int = 128
    softcap: float = 30.0
    dropout: float = 0.0
    layers: tuple[str, ...] = ("S", "S", "F", "S", "S", "F")
    max_position: int = 8192
    head_dim: dict[str, int] = field(default_factory=lambda: {"S": 256, "F": 512})


def rms(x: Tensor, weight: Tensor | None = None) -> Tensor:
    """Compute RMSNorm in float32; the weight multiplies directly (no 1 + w)."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (y if weight is None else y * weight.float()).to(x.dtype)


def rope_tables(positions: Tensor, dim: int, theta: float, rotated: int) -> tuple[Tensor, Tensor]:
    """Return cos, sin [..., dim] of pairs (i, i + dim/2); only the first `rotated` pairs rotate."""
    inverse = theta ** (-2 * torch.arange(dim // 2, device=positions.device).float() / dim)
    inverse = torch.where(torch.arange(dim // 2, device=positions.device) < rotated, inverse, 0.0)
    angle = positions[..., None].float() * inverse
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotate-half RoPE."""
    half = x.shape[-1] // 2
    rotated = torch.cat([-x[..., half:], x[..., :half]], -1)
    return (x * table[0] + rotated * table[1]).to(x.dtype)


class Layer(nn.Module):
    """One decoder layer with sandwich norms and a layer scalar."""

    def __init__(self, c: TargetConfig, kind: str) -> None:
        super().__init__()
        self.kind, self.heads, d = kind, c.heads, c.head_dim[kind]
        self.dropout = nn.Dropout(c.dropout)
        self.d = d
        self.norms = nn.ParameterList(
            [nn.Parameter(torch.full((c.hidden,), g)) for g in (1.0, 0.5, 1.0, 0.5)]
        )
        self.q, self.k = (
            nn.Linear(c.hidden, c.heads * d, bias=False),
            nn.Linear(c.hidden, d, bias=False),
        )
        self.v = nn.Linear(c.hidden, d, bias=False) if kind == "S" else None
        self.o = nn.Linear(c.heads * d, c.hidden, bias=False)
        self.q_norm, self.k_norm = (nn.Parameter(torch.full((d,), d**-0.25)) for _ in range(2))
        self.gate, self.up = (nn.Linear(c.hidden, c.mlp, bias=False) for _ in range(2))
        self.down = nn.Linear(c.mlp, c.hidden, bias=False)
        self.scalar = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor], attend, index: int) -> Tensor:
        """Run the layer, x [B, T, H] -> [B, T, H].

        `attend`: called as attend(index, kind, q [B, T, h, d], k [B, T, d], v [B, T, d]).
        """
        h = rms(x, self.norms[0])
        q = rms(self.q(h).unflatten(-1, (self.heads, self.d)), self.q_norm)
        k = self.k(h)
        v = rms(self.v(h) if self.v is not None else k)
        q = rotate(q, (table[0][..., None, :], table[1][..., None, :]))
        k = rotate(rms(k, self.k_norm), table)
        x = x + self.dropout(
            rms(self.o(attend(index, self.kind, q, k, v).flatten(-2)), self.norms[1])
        )
        h = rms(x, self.norms[2])
        h = self.down(F.gelu(self.gate(h), approximate="tanh") * self.up(h))
        return (x + self.dropout(rms(h, self.norms[3]))) * self.scalar


class Target(nn.Module):
    """Gemma 4 target: embedding, layers, final norm and tied head."""

    def __init__(self, c: TargetConfig | None = None) -> None:
        super().__init__()
        self.c = c = c or TargetConfig()
        self.embed = nn.Embedding(c.vocab, c.hidden)
        self.layers = nn.ModuleList(Layer(c, kind) for kind in c.layers)
        self.norm = nn.Parameter(torch.ones(c.hidden))
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=p.shape[-1] ** -0.5)

    def tables(self, positions: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Return RoPE tables of both layer kinds at `positions` [B or 1, T]."""
        s, f = self.c.head_dim["S"], self.c.head_dim["F"]
        return {
            "S": rope_tables(positions, s, 1e4, s // 2),
            "F": rope_tables(positions, f, 1e6, f // 8),
        }

    def forward(self, ids: Tensor, positions: Tensor, attend) -> tuple[Tensor, list[Tensor]]:
        """Return hidden states after the final norm [B, T, H], and the output of every layer."""
        x = self.embed(ids) * math.sqrt(self.c.hidden)
        tables = self.tables(positions)
        outputs: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            x = layer(x, tables[layer.kind], attend, i)
            outputs.append(x)
        return rms(x, self.norm), outputs

    def head(self, hidden: Tensor) -> Tensor:
        """Return soft-capped logits in float32."""
        cap = self.c.softcap
        return cap * torch.tanh(F.linear(hidden, self.embed.weight.to(hidden.dtype)).float() / cap)


def weigh(scores: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Compute the softmax over the concatenation of `scores`, and split it again."""
    p = torch.softmax(torch.cat(scores, -1).float(), -1).to(dtype)
    return list(p.split([s.shape[-1] for s in scores], -1))


class Whole:
    """Causal attention over whole sequences (T must be a multiple of the window).

    `keep`: keep K and V of every layer in `kv`.
    """

    def __init__(self, window: int, keep: bool = False) -> None:
        self.window, self.keep, self.kv = window, keep, {}

    def __call__(self, index: int, kind: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.keep:
            self.kv[index] = (k, v)
        return self.banded(q, k, v) if kind == "S" else self.causal(q, k, v)

    @staticmethod
    def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute full causal attention."""
        t = q.shape[1]
        mask = torch.ones(t, t, dtype=torch.bool, device=q.device).tril()
        s = torch.einsum("bqhd,bkd->bhqk", q, k).float().masked_fill(~mask, -1e30)
        return torch.einsum("bhqk,bkd->bqhd", torch.softmax(s, -1).to(v.dtype), v)

    def banded(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute sliding-window attention in chunks of one window; each sees the previous one."""
        b, t, h, d = q.shape
        w = self.window
        q = q.view(b, t // w, w, h, d)
        k2, v2 = (
            torch.cat(
                [
                    F.pad(x, (0, 0, w, 0))[:, :t].reshape(b, t // w, w, d),
                    x.reshape(b, t // w, w, d),
                ],
                2,
            )
            for x in (k, v)
        )
        i, j = (
            torch.arange(w, device=q.device)[:, None] + w,
            torch.arange(2 * w, device=q.device)[None],
        )
        mask = ((j <= i) & (i - j < w))[None].repeat(t // w, 1, 1)
        mask[0, :, :w] = False
        s = (
            torch.einsum("bnqhd,bnkd->bnhqk", q, k2)
            .float()
            .masked_fill(~mask[None, :, None], -1e30)
        )
        return torch.einsum("bnhqk,bnkd->bnqhd", torch.softmax(s, -1).to(v.dtype), v2).reshape(
            b, t, h, d
        )


class Branches:
    """Attention of A greedy branches per sequence that start at `anchors` [B, A].

    Step j of a branch is at position anchors + j.
    """

    def __init__(self, kv: dict, anchors: Tensor, steps: int, window: int) -> None:
        self.kv, self.anchors, self.window, self.step = kv, anchors, window, 0
        self.steps, self.own = steps, {}

    def __call__(self, index: int, kind: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx_k, ctx_v = self.kv[index]
        b, a, _, d = q.shape
        if index not in self.own:
            self.own[index] = tuple(
                torch.zeros(b, a, self.steps, d, dtype=k.dtype, device=k.device) for _ in "kv"
            )
        own_k, own_v = self.own[index]
        own_k[:, :, self.step], own_v[:, :, self.step] = k, v
        t = torch.arange(ctx_k.shape[1], device=q.device)
        mask = t < self.anchors[..., None]
        if kind == "S":
            mask = mask & (self.anchors[..., None] + self.step - t < self.window)
        s_ctx = torch.einsum("bahd,btd->bhat", q, ctx_k).masked_fill(~mask[:, None], -1e30)
        s_own = torch.einsum("bahd,bard->bhar", q, own_k)
        s_own = s_own.masked_fill(torch.arange(self.steps, device=q.device) > self.step, -1e30)
        p_ctx, p_own = weigh([s_ctx, s_own], v.dtype)
        return torch.einsum("bhat,btd->bahd", p_ctx, ctx_v) + torch.einsum(
            "bhar,bard->bahd", p_own, own_v
        )


@torch.no_grad()
def rollout(model: Target, kv: dict, ids: Tensor, anchors: Tensor, steps: int) -> Tensor:
    """Return the greedy continuations [B, A, steps] of `anchors`, given K/V of the rows."""
    attend = Branches(kv, anchors, steps, model.c.window)
    token, out = ids.gather(1, anchors), []
    for j in range(steps):
        attend.step = j
        hidden, _ = model(token, anchors + j, attend)
        token = model.head(hidden).argmax(-1)
        out.append(token)
    return torch.stack(out, -1)


class Cache:
    """Static KV cache of a batch whose sequences are all at the same position."""

    def __init__(self, size: int, window: int) -> None:
        self.size, self.window, self.at, self.kv = size, window, 0, {}

    def __call__(self, index: int, kind: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, n, _, d = q.shape
        if index not in self.kv:
            self.kv[index] = tuple(
                torch.zeros(b, self.size, d, dtype=k.dtype, device=k.device) for _ in "kv"
            )
        all_k, all_v = self.kv[index]
        all_k[:, self.at : self.at + n], all_v[:, self.at : self.at + n] = k, v
        end = self.at + n
        start = max(0, self.at - self.window + 1) if kind == "S" else 0
        key, value = all_k[:, start:end], all_v[:, start:end]
        i = torch.arange(self.at, end, device=q.device)[:, None]
        j = torch.arange(start, end, device=q.device)[None]
        mask = (j <= i) & ((i - j < self.window) | (kind == "F"))
        s = torch.einsum("bqhd,bkd->bhqk", q, key).float().masked_fill(~mask, -1e30)
        return torch.einsum("bhqk,bkd->bqhd", torch.softmax(s, -1).to(v.dtype), value)


@torch.no_grad()
def generate(
    model: Target,
    prompts: Tensor,
    length: int,
    temperature: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continue prompts [B, P] to [B, length]; `temperature` [B], 0 = greedy (None: all greedy)."""
    cache = Cache(length, model.c.window)
    out, feed = prompts, prompts
    while out.shape[1] < length:
        positions = torch.arange(cache.at, cache.at + feed.shape[1], device=prompts.device)[None]
        hidden, _ = model(feed, positions, cache)
        cache.at += feed.shape[1]
        logits = model.head(hidden[:, -1])
        token = logits.argmax(-1)
        if temperature is not None:
            noise = -torch.empty_like(logits).exponential_(generator=generator).log()
            token = torch.where(
                temperature > 0, (logits + temperature[:, None] * noise).argmax(-1), token
            )
        feed = token[:, None]
        out = torch.cat([out, feed], 1)
    return out
