"""Time chains of two `wgmma`s beside other instructions on a GPU with sm_90.

    python benchmarks/gpu_wgmma_overlap.py [--out FILE]

A chain multiplies 64 weight rows, 32 columns and N rows of activations, as `linear_wide` does for
a quant group; tensor cores need N cycles for it. Prints the cycles of a chain on a multiprocessor
with two warp groups: beside integer adds, float adds, and multiply-adds on other registers; and
with its sums scaled and added, from weights that are constant, dequantized, or in shared memory.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import watch  # noqa: E402

from g4spec.runtime.cuda.build import launch  # noqa: E402

KERNEL = str(HERE / "gpu_wgmma_overlap.cu")
WARP_GROUPS, CHAINS = 2, 64 * 16  # as in the kernel
OPS = ("integer add", "float add", "multiply-add")
OPERANDS = ("constant", "dequantized", "in shared memory")


def cycles(instance: str) -> float:
    """Return the cycles of a chain on one multiprocessor, the median of all."""
    count = launch.processors()
    taken = torch.zeros(count, dtype=torch.int64, device="cuda")
    sums = torch.zeros(count * 128 * WARP_GROUPS, device="cuda")
    for _ in range(2):
        launch.kernel(KERNEL, instance)(
            count, 128 * WARP_GROUPS, cycles=taken, sums=sums, scale=1.0, shared=49152
        )
    return round(taken.double().median().item() / CHAINS / WARP_GROUPS, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="file or folder of the result (default: results/)")
    args = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    for n in (32, 64, 128):
        line = {"nothing": cycles(f"beside<{n}, 0, 0>")}
        for op, name in enumerate(OPS):
            for count in (16, 32, 64):
                line[f"{count} x {name}"] = cycles(f"beside<{n}, {op}, {count}>")
        found[f"{n} rows, beside"] = line
        if n < 128:  # sums of two tiles of 128 rows do not fit into registers
            found[f"{n} rows, 8-bit activations"] = {"dequantized": cycles(f"integers<{n}>")}
            found[f"{n} rows, scaled and added, weights"] = {
                name: cycles(f"scaled<{n}, {kind}>")
                for kind, name in enumerate(OPERANDS if n == 64 else OPERANDS[:2])
            }
    for name, line in found.items():
        print(name, *(f"\n    {what:18} {value:6.1f}" for what, value in line.items()))
    watch.write_result(args.out, "gpu-wgmma-overlap", found)


if __name__ == "__main__":
    main()
