"""Prompt reading on the GPU: Gemma 4 31B (Q4_K_M) and 26B-A4B at their real shapes, on random
weights made on the GPU. Prints tokens a second and where the time goes.

    python benchmarks/gpu_prefill.py [31b|26b-a4b ...] [--tokens 512 4096 32768] [--chunk 4096]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import watch
from g4spec.models.gemma4 import Config, caches
from g4spec.models.spec import LayerSpec
from g4spec.ops.reference import Ops
from g4spec.runtime.cuda.cache.cuda_kv import CudaKV
from g4spec.runtime.cuda.prefill.prefill import LayerWeights, Prefill, prefill
from g4spec.runtime.cuda.prefill.prefill_attention import (
    Attention,
    Flash,
    HeadWeights,
    Scores,
    Wide,
)
from g4spec.runtime.cuda.prefill.prefill_experts import Experts, ExpertWeights
from g4spec.runtime.cuda.weights import packing
from g4spec.runtime.cuda.weights.dequant import Products, Weight

DEVICE = torch.device("cuda")
SHAPES: dict[str, dict[str, Any]] = {
    "31b": {"layers": 60, "n_embd": 5376, "n_head": 32, "n_kv": (16, 4), "n_ff": 21504},
    "26b-a4b": {"layers": 30, "n_embd": 2816, "n_head": 16, "n_kv": (8, 2), "n_ff": 2112,
                "n_expert": 128, "n_expert_used": 8, "n_ff_expert": 704},
}  # fmt: skip


def config(layers: int, n_embd: int, n_kv: tuple[int, int], **shape: int) -> Config:
    specs = []
    for i in range(layers):
        full = i % 6 == 5
        specs.append(LayerSpec(
            index=i, window=None if full else 1024, n_kv=n_kv[full], v_from_k=full,
            head_dim=512 if full else 256, rope_base=1e6 if full else 1e4,
            rope_partial=0.25 if full else 1.0, **shape,
        ))  # fmt: skip
    return Config(262144, n_embd, 131072, 1e-6, 30.0, tuple(specs))


def matrix(type: str, rows: int, columns: int, matrices: int = 1) -> Weight:
    """Random codes and factors, in packed order; values of about columns^-1/2."""
    if columns % 256 and type.endswith("_k"):
        type = "q5_0" if type == "q4_k" else "q8_0"  # what llama.cpp falls back to
    unit = packing.unit_of(type, columns)
    size, groups = packing.unit_bytes(type, unit), matrices * -(-rows // 128)
    data = torch.randint(0, 256, (groups, columns // unit, size), dtype=torch.uint8, device=DEVICE)
    halves, spread = data.view(torch.float16), columns**-0.5
    if type == "q4_k":  # d, dmin, then random 6-bit factors
        head = halves[..., 8192:].unflatten(-1, (128, 8))
        head[..., 0], head[..., 1] = spread / 150, spread / 20
    elif type == "q6_k":
        halves[..., 13312:] = spread / 1400
    else:
        halves[..., -(unit // 32) * 128 :] = spread / (9 if type == "q5_0" else 74)
    return Weight(type, data, rows, columns, matrices)


def layer(s: LayerSpec, h: int) -> LayerWeights:
    def norm(n: int = h) -> torch.Tensor:
        return 1 + 0.1 * torch.randn(n, device=DEVICE)

    more = "q6_k" if s.index % 2 else "q4_k"  # Q4_K_M gives half of these more bits
    q, kv = s.n_head * s.head_dim, s.n_kv * s.head_dim
    qkv = [matrix("q4_k", q, h), matrix("q4_k", kv, h)] + [matrix(more, kv, h)] * (not s.v_from_k)
    experts = None
    if s.n_expert:
        e, i = s.n_expert, s.n_ff_expert
        experts = ExpertWeights(
            torch.randn(e, h, device=DEVICE), norm(), norm(e), [matrix("q4_k", 2 * i, h, e)],
            matrix("q8_0", h, i, e), norm(), norm(), norm(),
        )  # fmt: skip
    return LayerWeights(
        norm(), qkv, HeadWeights(norm(s.head_dim), norm(s.head_dim)), matrix("q4_k", h, q), norm(),
        norm(), [matrix("q4_k", 2 * s.n_ff, h)], matrix(more, h, s.n_ff), norm(),
        torch.ones(1, device=DEVICE), experts,
    )  # fmt: skip


def build(name: str, n_ctx: int, chunk: int, kind: Any) -> Prefill:
    c, ops = config(**SHAPES[name]), Ops()
    kv = [CudaKV(x.n_kv, x.head_dim, n_ctx, x.window, 16, DEVICE, kind, x.turning)
          for x in caches(c)]  # fmt: skip
    still = torch.tensor([1.0] * 64 + [1e30] * 192)
    freqs = [ops.rope_freqs(s.rope_base, s.head_dim, still if s.window is None else None).cuda()
             for s in c.layers]  # fmt: skip
    return Prefill(c, [layer(s, c.n_embd) for s in c.layers], kv, freqs, chunk, n_ctx)


def run(p: Prefill, x: torch.Tensor) -> None:
    y = x.clone()
    for at in range(0, len(x), p.chunk):
        p(y[at : at + p.chunk], at)
    assert bool(y[-1].isfinite().all())


class Parts:
    """Time by part, from events around calls."""

    def __init__(self) -> None:
        self.events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self.saved: list[tuple[Any, str, Any]] = []

    def watch(self, owner: Any, name: str, part: Callable[..., str]) -> None:
        call = getattr(owner, name)

        def timed(*args: Any, **kw: Any) -> Any:
            a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            a.record()
            out = call(*args, **kw)
            b.record()
            self.events.append((part(*args), a, b))
            return out

        self.saved.append((owner, name, call))
        setattr(owner, name, timed)

    def __enter__(self) -> Parts:
        def place(on: Attention, *_: Any) -> str:
            return "sliding" if on.window < 1 << 30 else "global"

        self.watch(Products, "matrix", lambda *_: "dequantize")
        for name in ("halves", "floats"):
            self.watch(Products, name, lambda *_: "products, with dequantizing")
        self.watch(Experts, "_grouped", lambda *_: "experts' products, with dequantizing")
        self.watch(Experts, "__call__", lambda *_: "experts, all")
        self.watch(Attention, "prepare", lambda *a: f"heads {place(*a)}")
        for kind in (Flash, Wide, Scores):
            self.watch(kind, "attend", lambda *a: f"attention {place(*a)}")
        self.watch(Prefill, "_kernel", lambda _, name, *a: f"norms {name}")
        self.watch(prefill.Prefill, "_dense", lambda *_: "dense feed-forward, with its products")
        return self

    def __exit__(self, *_: Any) -> None:
        for owner, name, call in reversed(self.saved):
            setattr(owner, name, call)

    def total(self) -> dict[str, float]:
        torch.cuda.synchronize()
        out: dict[str, float] = {}
        for part, a, b in self.events:
            out[part] = out.get(part, 0.0) + a.elapsed_time(b)
        return dict(sorted(out.items(), key=lambda item: -item[1]))


def measure(name: str, p: Prefill, count: int) -> dict[str, Any]:
    x = torch.randn(count, p.config.n_embd, device=DEVICE)
    run(p, x[: p.chunk])  # compiled, and warm
    seconds = []
    for _ in range(1 if count > 4 * p.chunk else 3):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run(p, x)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    best = min(seconds)
    print(f"{name} {count:6d} tokens: {best * 1e3:8.1f} ms  {count / best:8.0f} tok/s", flush=True)
    with Parts() as parts:
        run(p, x)
    ms = {part: round(t, 2) for part, t in parts.total().items()}
    print("   ", "; ".join(f"{part} {t:.1f}" for part, t in ms.items()))
    return {"model": name, "tokens": count, "ms": round(best * 1e3, 2),
            "all_ms": [round(s * 1e3, 2) for s in seconds],
            "tokens_per_second": round(count / best), "parts_ms": ms}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(SHAPES))
    parser.add_argument("--tokens", type=int, nargs="*", default=[512, 4096, 32768])
    parser.add_argument("--chunk", type=int, default=4096)
    parser.add_argument("--kv", default="f16", choices=["f16", "q8_0"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = []
    for name in args.models:
        p = build(name, max(args.tokens), args.chunk, args.kv)
        print(f"{name}: {torch.cuda.memory_allocated() / 1e9:.1f} GB allocated", flush=True)
        results += [measure(name, p, count) for count in args.tokens]
        del p
        torch.cuda.empty_cache()
    if args.json:
        watch.keep(args.json, "gpu-prefill", {
            "weights": "random, made on the GPU", "kv": args.kv, "chunk": args.chunk,
            "note": "parts overlap: products contain dequantize, experts their products",
            "results": results,
        })  # fmt: skip


if __name__ == "__main__":
    main()
