"""Print the timeline of a DFlash cycle by kernel, with a published shape on a GPU.

    python benchmarks/gpu_timeline.py [31b] [--context 64]

For each kernel, in microseconds: its start since the cycle's start, the gap between the end of all
earlier kernels and its start, and how much later than those it ends. Kernels may overlap.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.gpu_steps import timeline
from g4spec.core import Sequence
from g4spec.measure import synthetic
from g4spec.measure import synthetic_bench as steps
from g4spec.runtime import devices
from g4spec.runtime.pool import Pool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="31b", choices=list(synthetic.DRAFTS))
    parser.add_argument("--context", type=int, default=64)
    args = parser.parse_args()
    config = steps.SyntheticConfig(contexts=(args.context,))
    backend: Any = devices.select("cuda", "q8_0")
    n_ctx = args.context + config.room
    target = synthetic.make_target(args.model, config.type, backend, n_ctx)
    drafter = synthetic.make_draft(args.model, config.draft_type, target)
    pool = Pool(target.space)
    sequence = Sequence(pool.free_slots.pop(), [], 0)
    pool.grow(sequence, n_ctx)
    steps.prefill(target, drafter, sequence, args.context)
    cycles = steps.CycleTimer(
        target, drafter, sequence, drafter.max_tokens, config.accept_length - 1
    )

    def run() -> None:
        cycles.time(args.context, 8)

    run()  # records it
    found = timeline(run)
    begins = [i for i, (name, *_) in enumerate(found) if name.startswith("place")]
    first, following = begins[4], begins[5]
    start = found[first][1]
    for name, begin, gap, adds in found[first:following]:
        print(f"{begin - start:8.1f} {gap:6.1f} {adds:7.1f}  {name.removeprefix('void ')[:70]}")
    print(f"{found[following][1] - start:8.1f} the next cycle")


if __name__ == "__main__":
    main()
