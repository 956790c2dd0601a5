"""Muon for the matrices, AdamW for the rest, one linear schedule."""

import torch
from torch import Tensor, nn


def orthogonal(g: Tensor, steps: int = 5) -> Tensor:
    """Approximate the nearest (semi-)orthogonal matrices of g [B, M, N] by Newton-Schulz steps."""
    x = g.bfloat16()
    flip = x.shape[-2] > x.shape[-1]
    x = x.mT if flip else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.mT if flip else x


class Muon(torch.optim.Optimizer):
    """Muon: orthogonalised momentum, decoupled weight decay; equal shapes are batched."""

    def __init__(self, params: list[nn.Parameter], lr: float, decay: float) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            shapes: dict[torch.Size, list[nn.Parameter]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    shapes.setdefault(p.shape, []).append(p)
            for shape, params in shapes.items():
                momenta = []
                for p in params:
                    m = self.state[p].setdefault("m", torch.zeros_like(p))
                    m.lerp_(p.grad, 0.05)
                    momenta.append(p.grad.lerp(m, 0.95))
                updates = orthogonal(torch.stack(momenta))
                scale = max(1.0, shape[0] / shape[1]) ** 0.5
                for p, u in zip(params, updates, strict=True):
                    p.mul_(1 - group["lr"] * group["decay"]).add_(u, alpha=-group["lr"] * scale)


class Optimizers:
    """Muon and AdamW of one module; `embeds`: 2-D parameters that AdamW updates."""

    def __init__(
        self,
        module: nn.Module,
        embeds: list[nn.Parameter],
        total: int,
        muon: float = 0.02,
        adam: float = 3e-3,
        decay: float = 0.1,
        warmup: int = 50,
    ) -> None:
        chosen = {id(p) for p in embeds}
        trained = [p for p in module.parameters() if p.requires_grad]
        matrices = [p for p in trained if p.ndim == 2 and id(p) not in chosen]
        vectors = [p for p in trained if p.ndim < 2]
        self.all = [Muon(matrices, muon, decay)]
        groups = [
            {"params": vectors, "weight_decay": 0.0},
            {"params": embeds, "weight_decay": 0.01},
        ]
        self.all.append(
            torch.optim.AdamW(
                [g for g in groups if g["params"]], lr=adam, betas=(0.9, 0.97), eps=1e-10
            )
        )
        self.base = [[g["lr"] for g in o.param_groups] for o in self.all]
        self.params, self.total, self.warmup, self.at = trained, total, warmup, 0

    def step(self) -> None:
        """Clip gradients, set the rates (flat 40 %, then linear to 2 %), update, zero gradients."""
        done = self.at / self.total
        rate = min(1.0, (self.at + 1) / self.warmup) * min(1.0, max(0.02, (1 - done) / 0.6))
        torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        for optimizer, lrs in zip(self.all, self.base, strict=True):
            for group, lr in zip(optimizer.param_groups, lrs, strict=True):
                group["lr"] = lr * rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.at += 1
