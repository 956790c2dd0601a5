"""Run random model shapes on the CUDA backend: each must run correctly or be refused by name.

    python benchmarks/random_shapes.py [--count 100] [--seed 1] [--arch sm_90a] [--out DIR]

Draws targets (widths, heads, head sizes, windows, experts, per-layer embeddings, vocabulary, tensor
type, cache type) and a draft of a random kind for each. Two results are correct: an InputError or
UsageError at conversion or load; or text that is the same with and without the draft, with logits
close to the CPU reference. Anything else fails, an AssertionError above all.

Without a GPU the kernels run on the emulator, for `--arch`. Writes
`results/<date>-random-shapes.json`; the exit code is 1 if a shape failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import watch
from g4spec.errors import InputError, UsageError
from tests.emulator import kernels
from tests.gpu import family, hostile
from tests.gpu.device import EMULATED

TYPES = ("q8_0", "bf16", "f16", "q4_0", "q5_0", "q4_k", "q5_k", "q6_k", "q3_k", "q2_k", "iq4_nl")
NEAR = {"f16": 0.5, "q8_0": 2.5}
"""Largest accepted difference of logits from the float32 reference, by cache type. With random
weights the rounding of a Q8_0 cache alone moves logits by 0.9, also on the CPU."""


def shape(draw: random.Random) -> dict[str, Any]:
    """Draw keyword arguments of `tests.support.tiny.target`."""
    global_kv = draw.choice([1, 1, 2, 3])
    kv = draw.choice([1, 2, 3, global_kv])
    heads = kv * global_kv * draw.choice([1, 2, 3, 5])
    large = draw.random() < 0.3
    out: dict[str, Any] = {
        "layers": draw.randint(3, 6),
        "period": draw.randint(2, 4),
        "hidden": draw.choice([33, 36, 64, 66, 96, 128, 130, 256, 260, 320]),
        "inter": draw.choice([draw.randint(8, 300), 64, 256]),
        "heads": heads,
        "kv": kv,
        "global_kv": global_kv,
        "head_dim": 256 if large else draw.choice([32, 64, 2 * draw.randint(1, 48)]),
        "global_head_dim": 512 if large else draw.choice([64, 128, 2 * draw.randint(1, 64)]),
        "window": draw.choice([1, 3, 8, 17, 40, 200]),
        "vocab": draw.choice([512, 515, 600]),
        "softcap": draw.choice([30.0, None]),
        "k_eq_v": draw.random() < 0.7,
    }
    if draw.random() < 0.4:
        experts = draw.randint(1, 9)
        out |= {"experts": experts, "top_k": draw.randint(1, experts)}
        out |= {"expert_inter": draw.choice([draw.randint(8, 70), 32, 64])}
    if draw.random() < 0.2:
        out |= {"ple": draw.choice([10, 16, 32]), "shared": draw.randint(0, 2), "k_eq_v": False}
    return out


def outcome(folder: Path, draw: random.Random) -> tuple[str, dict[str, Any]]:
    """Run one random pair. Return the outcome and the case."""
    at, kind = shape(draw), draw.choice(list(family.DRAFTS))
    whole = at["head_dim"] % 32 == 0 == at["global_head_dim"] % 32
    type, cache = draw.choice(TYPES), draw.choice(["f16", "q8_0"] if whole else ["f16"])
    case = {"target": at, "type": type, "cache": cache, "draft": kind}
    try:
        target = hostile.write_target(folder, at, type)
        wrong = hostile.wrong_text(target, None, cache, NEAR[cache])
        if wrong is None:
            draft = hostile.write_draft(folder, family.DRAFTS[kind])
            wrong = hostile.wrong_text(target, draft, cache)
    except (InputError, UsageError) as refused:
        return "refused", case | {"message": str(refused)}
    except Exception:  # noqa: BLE001  whatever it is, it is what the script looks for
        return "failed", case | {"traceback": traceback.format_exc(limit=-6)}
    return ("failed", case | {"wrong": wrong}) if wrong else ("ran", case)


def main() -> int:
    """Run `--count` shapes and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--arch", default="sm_90a", help="of the emulator")
    parser.add_argument("--out", type=Path, help="file or folder; default: results/")
    args = parser.parse_args()
    counts, kept = Counter[str](), []
    with contextlib.ExitStack() as stack:
        if EMULATED:
            stack.enter_context(kernels.installed(args.arch))
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setattr(torch.cuda, "mem_get_info", lambda device=None: (1 << 33, 1 << 33))
        for i in range(args.count):
            with tempfile.TemporaryDirectory() as folder:
                ended, case = outcome(Path(folder), random.Random(f"{args.seed} {i}"))
            counts[ended] += 1
            if ended != "ran":
                kept.append({"index": i, "ended": ended, **case})
            if ended == "failed":
                print(json.dumps(kept[-1], indent=1), flush=True)
    arch = args.arch if EMULATED else "the GPU's"
    found = {"seed": args.seed, "arch": arch, "counts": dict(counts), "cases": kept}
    watch.write_result(args.out, "random-shapes", found)
    print(dict(counts))
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
