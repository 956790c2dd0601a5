"""Time decode attention over sequences of very different contexts in one launch on a GPU.

    python benchmarks/gpu_shares.py [--long 32000] [--texts 64] [--rows 1 16]

Uses a global layer of the 31B (4 KV heads of size 512, 8 query heads each). Prints microseconds for
sequences of equal context, for one long sequence alone, and for the long one together with others
that are a thousand times shorter, each with what reading the keys and values takes at `--gb-per-s`.
Writes `results/<date>-gpu-shares.json`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import watch
from g4spec.core import CacheShape
from g4spec.measure.synthetic_bench import milliseconds
from g4spec.runtime.cuda.build.constants import CACHE_ROTARY_PAIRS
from g4spec.runtime.cuda.cache.cuda_kv import CudaKV
from g4spec.runtime.cuda.step import graphs
from g4spec.runtime.cuda.step.attention import attend
from tests.gpu.batches import rows_of, spread

N_KV, GROUP, DIM = 4, 8, 512


def timed(kv: CudaKV, contexts: list[int], rows: int) -> float:
    """Return microseconds for `rows` rows at the end of each context."""
    batch = rows_of([(slot, n - rows, rows) for slot, n in enumerate(contexts)], "cuda")
    q = torch.randn(len(batch), N_KV * GROUP, DIM, device="cuda").half()
    first, last = torch.zeros_like(batch.positions), batch.positions

    def run() -> tuple[()]:
        for _ in range(10):
            attend(q, kv, batch, first, last, 0.05)
        return ()

    run()  # loads the kernels
    play = graphs.Capture(run, None).replay
    return milliseconds(play, 20, 0.1) * 1e2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--long", type=int, default=32000)
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16], help="rows of each text")
    parser.add_argument("--gb-per-s", type=float, default=4550, help="of the GPU's memory")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    shape = CacheShape(N_KV, DIM, None, CACHE_ROTARY_PAIRS)
    kv = CudaKV(shape, spread(args.texts, args.long, device="cuda"))
    for plane in kv.planes:
        plane.random_(0, 64) if plane.dtype is torch.uint8 else plane.normal_()
    found = []
    for rows in args.rows:
        short = max(rows, args.long // 1000)
        even = (args.long + short * (args.texts - 1)) // args.texts
        for name, contexts in {
            "the long one alone": [args.long],
            "the long one and short ones": [args.long, *[short] * (args.texts - 1)],
            "as many positions, all alike": [even] * args.texts,
        }.items():
            us = timed(kv, contexts, rows)
            memory = sum(contexts) * N_KV * 2 * (DIM + DIM // 16) / args.gb_per_s / 1e3
            found.append({"rows": rows, "contexts": name, "us": us, "memory_us": memory})
            print(f"{rows:2} rows, {name:30} {us:8.1f} us, memory {memory:.1f}", flush=True)
    result = {"long": args.long, "texts": args.texts, "cases": found}
    watch.write_result(args.out, "gpu-shares", result)


if __name__ == "__main__":
    main()
