"""Measure prefill on a GPU with the shapes of Gemma 4 (Q4_K_M, random weights).

    python benchmarks/gpu_prefill.py [31b|26b-a4b ...] [--tokens 512 4096 32768] [--chunk 4096]
        [--short-block 0]

Prints tokens per second, time by kernel, and the draft's share. Prompts are read in blocks of 512
rows whose bits do not depend on what follows; `ms_whole` is the time with GEMMs over a whole chunk,
so the difference is the cost of the blocks. A last block of at most `--short-block` rows is read
as in a step. The exit code is 1 if rows differ between reading by block and reading in chunks.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import watch
from g4spec.core import PROMPT_BLOCK, Draft
from g4spec.measure import run_record, synthetic
from g4spec.runtime.cuda.backend import CudaBackend
from g4spec.runtime.cuda.cache.cache_types import KINDS
from g4spec.runtime.cuda.prefill.long_ops import LongOps
from g4spec.runtime.cuda.prefill.prefill_attention import Attention, Flash, Scores, Wide
from g4spec.runtime.cuda.prefill.prefill_experts import Experts
from g4spec.runtime.cuda.prefill.reader import Reader
from g4spec.runtime.cuda.weights.dequant import Products

SLOT = 0


class Prompts:
    """A target that reads prompts, and the draft that is given them."""

    def __init__(
        self, name: str, n_ctx: int, chunk: int, kind: Any, short_block: int | None
    ) -> None:
        backend = CudaBackend(0, kind)
        self.target = synthetic.make_target(name, "q4_k_m", backend, n_ctx)
        self.target.chunk = self.chunk = chunk
        space = self.target.space
        space.assign(SLOT, range(1, space.n_pages + 1))
        self.draft: Draft = synthetic.make_draft(name, "q8_0", self.target)
        self.reader = Reader(backend, self.target)
        if short_block is not None:
            self.reader.max_short_block = short_block

    def read(self, count: int, chunk: int, *, drafting: bool = False) -> torch.Tensor:
        """Prefill `count` tokens and return the final hidden states of the last chunk."""
        hidden = torch.empty(0)
        for at in range(0, count, chunk):
            n = min(chunk, count - at)
            ids = [5 + 7 * i * i % 250_000 for i in range(at, at + n)]
            rows = self.reader.read(SLOT, ids, at)
            if drafting:
                self.reader.commit(self.draft, rows)
            hidden = rows.hidden
        return hidden

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Use GEMMs over a whole chunk, which changes bits."""
        if self.reader._long is None:  # only short prompts
            yield
            return
        assert isinstance(self.reader._long.ops, LongOps)
        products = self.reader._long.ops.products
        products.block = self.chunk
        yield
        products.block = PROMPT_BLOCK


class Parts:
    """Times by part of the forward pass, from CUDA events around calls."""

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
        self.watch(Experts, "_products", lambda *_: "experts' products, with dequantizing")
        self.watch(Experts, "__call__", lambda *_: "experts, all")
        self.watch(Attention, "prepare", lambda *a: f"heads {place(*a)}")
        for kind in (Flash, Wide, Scores):
            self.watch(kind, "attend", lambda *a: f"attention {place(*a)}")
        self.watch(LongOps, "_kernel", lambda _, name, *a: f"norms {name}")
        self.watch(LongOps, "gated", lambda *_: "dense feed-forward, with its products")
        self.watch(Reader, "commit", lambda *_: "draft")
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


def timed(p: Prompts, count: int, *, drafting: bool = False) -> list[float]:
    """Return the milliseconds of each prefill of a prompt."""
    out = []
    for _ in range(1 if count > 4 * p.chunk else 3):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        p.read(count, p.chunk, drafting=drafting)
        torch.cuda.synchronize()
        out.append(round((time.perf_counter() - begin) * 1e3, 2))
    return out


def measure(name: str, p: Prompts, count: int) -> dict[str, Any]:
    p.read(min(count, p.chunk), p.chunk, drafting=True)  # compiled, packed and warm
    every = timed(p, count)
    with p.whole():
        p.read(min(count, p.chunk), p.chunk)
        whole = min(timed(p, count))
    drafting, best = min(timed(p, count, drafting=True)), min(every)
    print(
        f"{name} {count:6d} tokens: {best:8.1f} ms  {count / best * 1e3:8.0f} tok/s; products as "
        f"long as a chunk {whole:.1f} ms; with the draft {drafting:.1f} ms",
        flush=True,
    )
    with Parts() as parts:
        p.read(count, p.chunk, drafting=True)
    ms = {part: round(t, 2) for part, t in parts.total().items()}
    print("   ", "; ".join(f"{part} {t:.1f}" for part, t in ms.items()))
    return {
        "model": name,
        "tokens": count,
        "ms": best,
        "all_ms": every,
        "ms_whole": whole,
        "ms_drafting": drafting,
        "tokens_per_second": round(count / best * 1e3),
        "parts_ms": ms,
    }


def canonical(p: Prompts, count: int) -> bool:
    """Return whether the last block has the same bits read by itself and in a chunk."""
    whole, blocks = (p.read(count, chunk)[-PROMPT_BLOCK:] for chunk in (p.chunk, PROMPT_BLOCK))
    return torch.equal(whole.view(torch.int32), blocks.view(torch.int32))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=["31b", "26b-a4b"])
    parser.add_argument("--tokens", type=int, nargs="*", default=[512, 4096, 32768])
    parser.add_argument("--chunk", type=int, default=4096)
    parser.add_argument("--short-block", type=int, help="default: as the engine")
    parser.add_argument("--kv", default="f16", choices=KINDS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results, exact = [], {}
    for name in args.models:
        p = Prompts(name, max(args.tokens), args.chunk, args.kv, args.short_block)
        results += [measure(name, p, count) for count in args.tokens]
        exact[name] = canonical(
            p, 2 * args.chunk if max(args.tokens) >= 2 * args.chunk else max(args.tokens)
        )
        print(
            f"{name}: bits of blocks and chunks are {'equal' if exact[name] else 'NOT equal'}; "
            f"at most {torch.cuda.max_memory_allocated() / 1e9:.1f} GB allocated",
            flush=True,
        )
        short_block = p.reader.max_short_block
        overridden = run_record.overridden(p.target.ops)
        del p
        torch.cuda.empty_cache()
    if args.json:
        watch.write_result(
            args.json,
            "gpu-prefill",
            {
                "weights": "random, made on the GPU",
                "overridden_ops": overridden,
                "kv": args.kv,
                "chunk": args.chunk,
                "short_block": short_block,
                "note": "parts overlap: products contain dequantize, experts their products",
                "bits_equal": exact,
                "results": results,
            },
        )
    return 0 if all(exact.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
