"""A DFlash cycle kernel by kernel, at a published shape with random weights on a GPU.

    python benchmarks/gpu_timeline.py [31b] [--context 64]

For each kernel: microseconds from the cycle's begin to its own, what lies between it and the end of
all before it, and by how much it ends later than these (a kernel may begin while others run).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.gpu_steps import timeline
from g4spec.measure import synthetic
from g4spec.measure import synthetic_bench as steps
from g4spec.ops.sampling import Sampler
from g4spec.runtime import devices


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="31b", choices=list(synthetic.DRAFTS))
    parser.add_argument("--context", type=int, default=64)
    args = parser.parse_args()
    protocol = steps.Protocol(contexts=(args.context,))
    ops: Any = devices.select("cuda", "q8_0")[0]
    with torch.cuda.device(ops.device):
        target = synthetic.target(args.model, protocol.type, ops, args.context + protocol.room)
        drafter = synthetic.draft(args.model, protocol.draft_type, ops, target)
        steps._fill(target, drafter, args.context)
        player = target.ops.player(target, drafter, protocol.accept_length - 1)
        player.ready(Sampler())

        def run() -> None:
            steps._cycle(player, drafter.max_tokens, args.context, 8)

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
