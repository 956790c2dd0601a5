"""Time the GEMMs of a 31B layer by number of rows on a GPU, back to back.

    python benchmarks/gpu_products.py [--rows 16 32 64 128] [--layers 6] [--forms wgmma mma wgmma:2]

The matrices (qkv, o, gate_up, down) are Q4_K (or `--type`) with random codes and scales; several
layers, so that they do not fit into L2. First checks that each row has the same bits as among 16
rows. Then prints microseconds per layer in a CUDA graph, and per matrix with `--each`. A form is
`wgmma` or `mma`, then the maximum number of 16-row groups per pass, then the maximum number of
stages: `wgmma:4:2`. A table of all forms is printed at the end.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from g4spec import quant
from g4spec.measure import synthetic
from g4spec.measure.synthetic_bench import milliseconds
from g4spec.runtime.cuda.build import launch, units
from g4spec.runtime.cuda.ops import CudaOps
from g4spec.runtime.cuda.step import (
    gemm_tiles,
    graphs,
    linear,
    linear_wide,
    packed_layout,
    packed_rows,
)
from g4spec.runtime.cuda.step.packed_rows import GROUP_ROWS, PackedRows
from g4spec.runtime.cuda.weights.dequant import Weight

SHAPES = {"qkv": (16384, 5376), "o": (5376, 8192), "gate_up": (43008, 5376), "down": (5376, 21504)}
STAGES = dict(gemm_tiles.MAX_STAGES)
BEGAN = time.perf_counter()


def say(*what: object) -> None:
    print(f"{time.perf_counter() - BEGAN:6.1f} s", *what, flush=True)


@dataclass(frozen=True)
class Form:
    """An implementation of GEMMs with more than 16 rows."""

    name: str
    wgmma: bool
    groups: int
    stages: int

    @classmethod
    def of(cls, name: str) -> Form:
        kind, *numbers = name.split(":")
        groups, stages = (*map(int, numbers), *(linear.MAX_ROW_GROUPS, 8)[len(numbers) :])
        return cls(name, {"wgmma": True, "mma": False}[kind], groups, stages)

    def take(self) -> None:
        """Use this form for all GEMMs from now on."""
        linear_wide.WGMMA, linear_wide.MAX_ROW_GROUPS = self.wgmma, self.groups
        for rows, most in STAGES.items():
            gemm_tiles.MAX_STAGES[rows] = min(most, self.stages)
        linear_wide.for_row_groups.cache_clear()

    def jobs(self, type: str, rows: list[int], arch: str) -> set[units.Job]:
        """Return the compile jobs of the form."""
        self.take()
        names = set()
        for count in rows:
            left = packed_rows.groups(count) if count > GROUP_ROWS else 0
            while left:
                most = min(left, self.groups)
                for narrow in (False, True):
                    how = gemm_tiles.gemm_config(type, 256, 2, 2, arch, narrow)
                    (own,) = linear_wide.for_row_groups((how,), most, arch, self.wgmma)
                    names |= {own.name("linear"), own.name("gate_up")}
                left -= most
        return {units.Job("linear_wide.cu", name, arch) for name in names}


def run(
    name: str, x: PackedRows, weight: Weight, by: linear.SplitKWorkspace
) -> torch.Tensor | PackedRows:
    """Run the GEMM of this name and return its output."""
    if name == "gate_up":
        return linear_wide.gate_up(x, weight, by)
    return linear_wide.linear(x, weight, by, parts=True)


def values(found: torch.Tensor | PackedRows) -> torch.Tensor:
    """Return the output as float32 [..., T, N]."""
    return packed_layout.unpack(found)[0][: len(found)] if isinstance(found, PackedRows) else found


def wrong(x: torch.Tensor, name: str, weight: Weight, by: linear.SplitKWorkspace) -> int:
    """Return how many numbers differ from those of 16 rows at a time."""
    got = values(run(name, packed_rows.pack_rows(x), weight, by))
    few = [
        values(run(name, packed_rows.pack_rows(x[at : at + GROUP_ROWS].contiguous()), weight, by))
        for at in range(0, len(x), GROUP_ROWS)
    ]
    want = torch.cat(few, dim=-2)
    return int((got.view(want.dtype) != want).sum()) + int((~got.isfinite()).sum())


def timed(
    names: list[str],
    x: dict[str, PackedRows],
    layers: list[dict[str, Weight]],
    by: linear.SplitKWorkspace,
) -> float:
    """Return microseconds per layer."""

    def chain() -> tuple[()]:
        for layer in layers:
            for n in names:
                run(n, x[n], layer[n], by)
        return ()

    chain()  # loads the kernels, which a capture cannot
    play = graphs.Capture(chain, None).replay
    return milliseconds(play, 20, 0.1) * 1e3 / len(layers)


def main() -> None:
    faulthandler.dump_traceback_later(60, repeat=True)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=[16, 32, 64, 128])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--type", default="q4_k")
    parser.add_argument("--forms", nargs="*", default=["wgmma", "mma"])
    parser.add_argument("--each", action="store_true", help="each product by itself, too")
    parser.add_argument("--compile", action="store_true", help="do nothing else")
    args = parser.parse_args()
    forms = [Form.of(name) for name in args.forms]
    jobs = {job for form in forms for job in form.jobs(args.type, args.rows, launch.arch())}
    units.compile_all(sorted(jobs, key=lambda job: job.name), workers=16)
    say("compiled", len(jobs))
    if args.compile:
        return
    ops = CudaOps("cuda")
    by, format = linear.SplitKWorkspace(ops.device), quant.get(args.type)
    first = {n: synthetic._matrix(format, shape, ops).weight for n, shape in SHAPES.items()}
    layers = [first] + [
        {n: replace(w, data=w.data.clone()) for n, w in first.items()}
        for _ in range(args.layers - 1)
    ]
    say("weights are there")
    numbers = {n: torch.randn(max(args.rows), k, device=ops.device) for n, (_, k) in SHAPES.items()}
    table: dict[str, list[float]] = {form.name: [] for form in forms}
    for form in forms:
        form.take()
        for count in args.rows:
            if count > GROUP_ROWS:
                bad = {n: wrong(numbers[n][:count], n, w, by) for n, w in first.items()}
                say(f"{form.name}, {count} rows: numbers with other bits", bad)
            x = {n: packed_rows.pack_rows(v[:count]) for n, v in numbers.items()}
            table[form.name].append(timed([*SHAPES], x, layers, by))
            each = {n: round(timed([n], x, layers, by), 1) for n in SHAPES} if args.each else ""
            say(f"{form.name}, {count} rows: {table[form.name][-1]:.1f} us a layer", each)
    print(torch.cuda.get_device_name(), args.type)
    print("us a layer".ljust(12), *(f"{count:8}" for count in args.rows))
    for name, line in table.items():
        print(name.ljust(12), *(f"{us:8.1f}" for us in line))


if __name__ == "__main__":
    main()
