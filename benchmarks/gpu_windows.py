"""Time the attention of layers with a window alone, one row of each of many texts.

    python benchmarks/gpu_windows.py [--kv-heads 16] [--cases 64x64 64x180 64x1500]

A case is texts x tokens of each. A graph of six layers, each with keys and values of its own (Q8_0,
random), from the QKV projection to the input of the output projection. Prints for each case:
microseconds a layer, those that reading the keys and values takes at `--gb-per-s`, and a digest of
the results (two versions of the kernels with the same bits print the same). Writes
`results/<date>-gpu-windows.json`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import watch
from g4spec.core import Batch, CacheShape
from g4spec.measure import synthetic_bench as steps
from g4spec.ops.kv import Space
from g4spec.ops.reference import Ops
from g4spec.runtime.cuda.cache.cuda_kv import CudaKV
from g4spec.runtime.cuda.cache.heads import Heads
from g4spec.runtime.cuda.step import attention_window, graphs
from g4spec.runtime.cuda.step.attention_window import ProjectedQkv

LAYERS, DIM, WINDOW = 6, 256, 1024
CASES = ["1x400", "8x400", "16x64", "16x326", "16x1500", "64x64", "64x180", "64x1500"]


def layer(texts: int, n_kv: int) -> CudaKV:
    """Return a cache with random rows in all places of all rings."""
    kv = CudaKV(CacheShape(n_kv, DIM, WINDOW), Space(texts, 4096, texts, "cuda"), 16, "q8_0")
    for plane in (kv.keys, kv.values):
        plane.random_(0, 256)
    for plane in (kv.key_scales, kv.value_scales):
        plane.uniform_(0.005, 0.02)
    return kv


def timed(caches: list[CudaKV], heads: Heads, texts: int, tokens: int, gb_per_s: float) -> Any:
    """Return the times of the last row of each of `texts` texts of `tokens` tokens."""
    n_kv = heads.n_kv
    slots = torch.arange(texts, device="cuda")
    positions = torch.full_like(slots, tokens - 1)
    batch = Batch(torch.zeros_like(slots), positions, slots, (1,) * texts)
    first = (positions - WINDOW + 1).clamp(min=0)
    arrived = torch.zeros(n_kv * texts, dtype=torch.int32, device="cuda")
    blocks = torch.cuda.get_device_properties("cuda").multi_processor_count
    y = torch.randn(texts, 4 * n_kv * DIM, device="cuda", generator=torch.Generator("cuda"))

    def step() -> tuple[torch.Tensor, ...]:
        q = ProjectedQkv(heads, y)
        return tuple(
            attention_window.attend(q, kv, batch, first, positions, DIM**-0.5, arrived, blocks).data
            for kv in caches
        )

    step()
    graph = graphs.Capture(step, None)
    graph.replay()
    read = texts * min(tokens, WINDOW) * n_kv * 2 * (DIM + DIM // 16)
    return {
        "us": round(steps.milliseconds(graph.replay) * 1e3 / len(caches), 2),
        "memory_us": round(read / gb_per_s / 1e3, 1),
        "digest": watch.digest(graph.outputs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kv-heads", type=int, default=16, help="31B: 16, 26B-A4B: 8")
    parser.add_argument("--cases", nargs="*", default=CASES)
    parser.add_argument("--gb-per-s", type=float, default=4550, help="of the GPU's memory")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    q, k = (1 + 0.1 * torch.randn(DIM, device="cuda") for _ in "qk")
    freqs = Ops("cpu").rope_freqs(1e4, DIM).cuda()
    heads = Heads(2 * args.kv_heads, args.kv_heads, q, k, True, False, freqs, 1e-6)
    cases = [tuple(map(int, case.split("x"))) for case in args.cases]
    caches = [layer(max(texts for texts, _ in cases), args.kv_heads) for _ in range(LAYERS)]
    found = []
    for texts, tokens in cases:
        times = timed(caches, heads, texts, tokens, args.gb_per_s)
        found.append({"texts": texts, "tokens": tokens, **times})
        print(
            "{texts:3} x {tokens:4}: {us:7.2f} us, memory {memory_us}  {digest}".format(**found[-1])
        )
    result = {"kv_heads": args.kv_heads, "cases": found}
    watch.write_result(args.out, "gpu-windows", result)


if __name__ == "__main__":
    main()
