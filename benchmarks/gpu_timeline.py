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
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent.parent))

from g4spec.runtime import devices, steps, synthetic
from g4spec.runtime.sampling import Sampler


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

        def go(times: int) -> None:
            player.begin(7, args.context)
            player.start(drafter.max_tokens)
            for _ in range(times):
                player.start(drafter.max_tokens)
                player.result()
            player.result()

        go(5)
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
            go(8)
            torch.cuda.synchronize()
    ran = sorted((e.time_range.start, e.time_range.end, e.name) for e in seen.events()
                 if e.device_type.name == "CUDA")  # fmt: skip
    begins = [i for i, (_, _, name) in enumerate(ran) if name.startswith("place")]
    first, following = begins[4], begins[5]
    latest = max(end for _, end, _ in ran[:first])
    for start, end, name in ran[first:following]:
        print(f"{start - ran[first][0]:8.1f} {max(0.0, start - latest):6.1f} "
              f"{max(0.0, end - latest):7.1f}  {name.removeprefix('void ').split('(')[0][:70]}")
        latest = max(latest, end)
    print(f"{ran[following][0] - ran[first][0]:8.1f} the next cycle")


if __name__ == "__main__":
    main()
