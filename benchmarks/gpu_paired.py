"""Time decode steps and cycles of several checkouts in alternation on one GPU.

    git worktree add /tmp/before HEAD~1
    python benchmarks/gpu_paired.py /tmp/before . [--model 31b] [--contexts 64 700] [--rounds 2]

Cards differ by more than most changes do, and a card differs from minute to minute; so compare only
within one call. Prints one line per checkout and round. For each number of rows: milliseconds per
step after half a second of rest, milliseconds without a pause, and joules per step. Then the same
for a draft (without joules) and for cycles, 20 in a row from the given context. The GPU's energy
counter is updated ten times per second, so energy is measured over four seconds. Each checkout is
timed with its own `synthetic_bench`, so a checkout must not be older than this script's names.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

METERED = 4.0
"""Seconds over which energy is measured."""


def energy() -> float:
    """Return the GPU's energy counter in joules."""
    import pynvml
    import torch

    device = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
    return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(device) / 1e3)


def rested_and_long(play: Any, seconds: float = METERED) -> tuple[float, float, float]:
    """Return milliseconds after a rest, milliseconds without a pause for `seconds`, and
    joules per run."""
    import torch

    from g4spec.measure import synthetic_bench as steps

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    rested = steps.milliseconds(play, rest=steps.REST)
    times = round(seconds * 1e3 / rested)
    for _ in range(times // 4):
        play()
    torch.cuda.synchronize()
    before = energy()
    begin.record()
    for _ in range(times):
        play()
    end.record()
    torch.cuda.synchronize()
    joules = (energy() - before) / times
    return rested, begin.elapsed_time(end) / times, joules


def measure(label: str, model: str, contexts: list[int], rows: list[int]) -> None:
    """Print the lines of the checkout that is imported."""
    import pynvml

    from g4spec.core import Sequence
    from g4spec.measure import synthetic
    from g4spec.measure import synthetic_bench as steps
    from g4spec.runtime import devices
    from g4spec.runtime.pool import Pool

    pynvml.nvmlInit()
    config = steps.SyntheticConfig(contexts=tuple(contexts))
    backend: Any = devices.select("cuda", "q8_0")
    n_ctx = max(contexts) + config.room
    target = synthetic.make_target(model, config.type, backend, n_ctx)
    drafter = synthetic.make_draft(model, config.draft_type, target)
    pool = Pool(target.space)
    sequence = Sequence(pool.free_slots.pop(), [], 0)
    pool.grow(sequence, n_ctx)
    for context in contexts:
        steps.prefill(target, drafter, sequence, context)
        found = []
        for count in rows:
            play = steps.StepGraph(target, [sequence], count, context).replay
            found.append("{}: {:.3f} {:.3f} {:.2f} J".format(count, *rested_and_long(play)))
        most = drafter.max_tokens
        cycles = steps.CycleTimer(target, drafter, sequence, most, config.accept_length - 1)
        first, lasting = cycles.time(context, config.times, steps.REST), []
        alone = cycles.draft
        calls = round(METERED * 1e3 / first / (config.times + steps.WARM + 1))
        before = energy()
        for _ in range(calls):
            lasting.append(cycles.time(context, config.times))
        joules = (energy() - before) / (calls * (config.times + steps.WARM + 1))
        found.append(f"draft {alone:.3f} cycle {first:.3f} {lasting[-1]:.3f} {joules:.2f} J")
        print(f"{label:24s} {context:6d} |", " | ".join(found), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", nargs="+", type=Path)
    parser.add_argument("--model", default="31b")
    parser.add_argument("--contexts", type=int, nargs="*", default=[64])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--here", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        measure(args.here, args.model, args.contexts, args.rows)
        return
    for _ in range(args.rounds):
        for checkout in args.checkouts:
            path = os.pathsep.join([str(checkout.resolve()), os.environ.get("PYTHONPATH", "")])
            command = [sys.executable, __file__, *sys.argv[1:], "--here", str(checkout)]
            subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=True)


if __name__ == "__main__":
    main()
