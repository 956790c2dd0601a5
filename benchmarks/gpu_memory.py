"""Check that a run on a GPU uses no more memory than was computed before loading.

    python benchmarks/gpu_memory.py --work DIR [--gib 23] [--layers 60]

Writes the 31B in Q4_K_M and its DFlash draft in Q8_0, random numbers, to DIR, and deletes them
afterwards. The GPU is limited to `--gib`, the free memory of a 24 GB card: torch may not allocate
more, free memory is reported accordingly, and prompts use the chunk size of such a card. The
largest context is taken from the error message for one that does not fit. With it, a prompt of half
as many tokens is read and 64 tokens are generated, greedy and sampled. Prints the computed memory
and the decrease of the driver's free memory. The exit code is 1 if the decrease is larger, or if
memory runs out.
"""

import functools
import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import gpu_first_token, synthetic, watch
from g4spec.convert import convert
from g4spec.errors import EnvironmentProblem
from g4spec.measure import run_record
from g4spec.ops.sampling import Sampler
from g4spec.runtime.cuda import gpu_memory as memory
from g4spec.runtime.cuda.cache.cache_types import KINDS
from g4spec.runtime.cuda.gpu_memory import Card
from g4spec.runtime.engine import Engine, Options

TOKENS, LENGTH = 64, 15
SAMPLERS = (Sampler(), Sampler(temperature=0.7, top_k=40, seed=1))


def free() -> int:
    """Return the driver's free memory in bytes."""
    return int(torch.cuda.mem_get_info()[0])


def loaded(target: Path, draft: Path, device: str, cache_type: str) -> Engine:
    """Load the engine with the largest context that the error message names."""
    load = functools.partial(Engine.load, target, draft, device=device, cache_type=cache_type)
    try:
        return load(n_ctx=262144)
    except EnvironmentProblem as problem:
        found = re.search(r"`n_ctx` (\d+)", problem.fix or "")
        if found is None:
            raise
        print(problem, flush=True)
        return load(n_ctx=int(found[1]))


def measure(target: Path, draft: Path, device: str, cache_type: str, gib: float) -> dict[str, Any]:
    """Return the measured and the computed memory of a run, in bytes."""
    before = free()
    limit = int(gib * 2**30)
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.mem_get_info()[1])
    chunk = memory.chunk(limit)
    with (
        mock.patch.object(Card, "available", lambda card: limit - (before - free())),
        mock.patch.object(memory, "chunk", lambda total: chunk),
    ):
        engine = loaded(target, draft, device, cache_type)
    prompt = [2, *([9, 17, 33, 65] * engine.n_ctx)][: engine.n_ctx // 2]
    for sampler in SAMPLERS:
        run = engine.generate(prompt, Options(TOKENS, sampler, LENGTH, ignore_eos=True))
        for _ in run:
            pass
    plan = engine.memory
    return {
        "overridden_ops": run_record.overridden(engine.target.ops),
        "cache_type": cache_type,
        "n_ctx": engine.n_ctx,
        "computed": plan.total,
        "weights": plan.weights + plan.draft_weights,
        "taken": before - free(),
        "allocated": torch.cuda.max_memory_allocated(),
    }


def main() -> int:
    """Make the files, run, and write the result."""
    parser = gpu_first_token.options(__doc__)
    parser.add_argument("--gib", type=float, default=23.0)
    parser.add_argument("--cache-type", default="q8_0", choices=KINDS)
    args = parser.parse_args()
    with gpu_first_token.made(args.work, args.layers) as target:
        draft = target.with_name("draft.gguf")
        convert(synthetic.draft(target.with_name("draft")), draft, target=target, type="q8_0")
        found = measure(target, draft, args.device, args.cache_type, args.gib)
    print(
        *(
            f"{key} {value:,}" if isinstance(value, int) else f"{key} {value}"
            for key, value in found.items()
        ),
        sep="\n",
    )
    watch.write_result(args.out, "gpu-memory", {"layers": args.layers, "gib": args.gib, **found})
    return 0 if found["taken"] <= found["computed"] else 1


if __name__ == "__main__":
    sys.exit(main())
