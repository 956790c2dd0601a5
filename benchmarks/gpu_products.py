"""Products of a layer of the 31B by numbers of rows on a GPU, without anything between them.

    python benchmarks/gpu_products.py [--rows 16 32 64 128] [--layers 6] [--most-groups 4 2]

Queries to values, output, gates and ups, down in Q4_K, random codes and scales, of so many layers,
which do not fit into L2. First that 16 rows keep their bits among more; then microseconds of a
layer's products one behind the other (a CUDA graph), and of each by itself. `--most-groups`: of 16
rows that are multiplied at once.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from g4spec import quant
from g4spec.measure import synthetic
from g4spec.measure.synthetic_bench import milliseconds
from g4spec.runtime.cuda.build import launch, units
from g4spec.runtime.cuda.ops import CudaOps
from g4spec.runtime.cuda.step import graphs, linear, linear_wide, packed_rows
from g4spec.runtime.cuda.weights.dequant import Weight

SHAPES = {"qkv": (16384, 5376), "o": (5376, 8192), "gate_up": (43008, 5376), "down": (5376, 21504)}
BEGAN = time.perf_counter()


def say(*what: object) -> None:
    print(f"{time.perf_counter() - BEGAN:6.1f} s", *what, flush=True)


def run(name: str, x: packed_rows.Rows, weight: Weight, by: linear.Exchange) -> torch.Tensor:
    """The product of this name; what it leaves."""
    if name == "gate_up":
        return linear_wide.gate_up(x, weight, by).data
    return linear_wide.linear(x, weight, by, parts=True)


def compile_first(rows: list[int], most: list[int], arch: str) -> None:
    """Compile what is measured in several processes."""
    names = set()
    for groups in {min(-(-count // 16), limit) for count in rows for limit in most if count > 16}:
        for narrow in (False, True):
            how = linear.cut("q4_k", 256, 2, 2, arch, narrow)
            (own,) = linear_wide.widened((how,), groups, arch)
            names |= {own.name("linear"), own.name("gate_up")}
    units.compile_all([units.Job("linear_wide.cu", n, arch) for n in sorted(names)], workers=16)


def main() -> None:
    faulthandler.dump_traceback_later(20, repeat=True)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=[16, 32, 64, 128])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--most-groups", type=int, nargs="*", default=[linear.MOST_GROUPS])
    parser.add_argument("--compile", action="store_true", help="do nothing else")
    args = parser.parse_args()
    compile_first(args.rows, args.most_groups, launch.arch())
    say("compiled")
    if args.compile:
        return
    ops = CudaOps("cuda")
    by, form = linear.Exchange(ops.device), quant.get("q4_k")
    first = {n: synthetic._matrix(form, shape, ops).alone for n, shape in SHAPES.items()}
    layers = [first] + [{n: replace(w, data=w.data.clone()) for n, w in first.items()}
                        for _ in range(args.layers - 1)]  # fmt: skip
    say("weights are there")
    numbers = {n: torch.randn(max(args.rows), k, device=ops.device) for n, (_, k) in SHAPES.items()}
    for limit in args.most_groups:
        linear_wide.MOST_GROUPS = limit
        for count in args.rows:
            x = {n: packed_rows.pack_rows(v[:count]) for n, v in numbers.items()}
            same = []
            for n, w in first.items():
                few = run(n, packed_rows.pack_rows(numbers[n][:16].contiguous()), w, by)
                many = run(n, x[n], w, by)
                torch.cuda.synchronize()
                if n != "gate_up":
                    same.append(torch.equal(many[..., :16, :], few))
                elif count > 16:
                    same.append(torch.equal(many[0], few))
            say(count, "rows,", limit, "groups at most: the bits of 16 rows", same)
            pool, line = torch.cuda.graph_pool_handle(), []
            for names in ([*SHAPES], *([n] for n in SHAPES)):

                def chain(names: list[str] = names, x: dict = x) -> tuple[()]:  # type: ignore[type-arg]
                    for layer in layers:
                        for n in names:
                            run(n, x[n], layer[n], by)
                    return ()

                play = graphs.Capture(chain, pool).replay
                each = milliseconds(play, 20, 0.1) * 1e3 / args.layers
                line.append(f"{'layer' if len(names) > 1 else names[0]} {each:.1f}")
            say(count, "rows, us:", *line)


if __name__ == "__main__":
    main()
