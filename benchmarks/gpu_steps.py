"""Time decode steps and cycles with the published shapes on a GPU against the required times.

    python benchmarks/gpu_steps.py [31b 26b-a4b ...] [--contexts 64 4096 32768] [--cache-type q8_0]
        [--draft assistant]

Measures as `g4spec bench --synthetic` does (random weights, forced acceptance, after a rest), with
the time by kernel of a step, and steps without a pause for one second, when the power limit lowers
the clock. Writes `results/<date>-gpu-steps.json` or `-gpu-steps-assistant.json`. The exit code is 1
if a required time is missed; these apply to an H200 only.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT.parent))

from g4spec.measure import synthetic_bench as steps  # noqa: E402
from g4spec.runtime import devices  # noqa: E402
from g4spec.runtime.cuda.cache.cache_types import KINDS  # noqa: E402

# Model, context, figure: required and stretch, milliseconds.
GOALS = {
    ("31b", 64, "step_1_ms"): (5.6, 5.0),
    ("31b", 64, "step_16_ms"): (6.2, 5.4),
    ("31b", 64, "cycle_ms"): (7.0, 6.0),
    ("31b", 32768, "step_1_ms"): (6.4, 5.6),
    ("26b-a4b", 64, "step_1_ms"): (1.6, 1.1),
    ("26b-a4b", 64, "step_16_ms"): (5.0, 3.8),
}


def timeline(run: Callable[[], Any]) -> list[tuple[str, float, float, float]]:
    """Return the kernels that `run` launches, in order: name, start, gap after the end of all
    earlier kernels, and how much later than those it ends, in microseconds. Kernels may
    overlap."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        run()
        torch.cuda.synchronize()
    ran = sorted(
        (e.time_range.start, e.time_range.end, e.name)
        for e in seen.events()
        if e.device_type.name == "CUDA"
    )
    found, latest = [], ran[0][0]
    for begin, end, name in ran:
        gap, adds = max(0.0, begin - latest), max(0.0, end - latest)
        found.append((name.split("(")[0], begin, gap, adds))
        latest = max(latest, end)
    return found


def kernels(play: Any, times: int = 5) -> dict[str, float]:
    """Return the milliseconds that each kernel adds to a replay of a graph, largest first."""
    total: defaultdict[str, float] = defaultdict(float)
    for name, _, _, adds in timeline(lambda: [play() for i in range(times)]):
        total[name] += adds
    return {
        name: round(us / 1e3 / times, 4)
        for name, us in sorted(total.items(), key=lambda item: -item[1])
        if us
    }


def sustained(play: Any, seconds: float = 1.0) -> dict[str, float]:
    """Return milliseconds per step without a pause, and watts and megahertz at the end."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = max(10, round(seconds * 1e3 / steps.milliseconds(play, 3)))
    begin.record()
    for i in range(times):
        play()
        if i == times * 9 // 10:
            late = torch.cuda.Event()
            late.record()
    end.record()
    late.synchronize()
    watts, clock = torch.cuda.power_draw() / 1e3, torch.cuda.clock_rate()
    end.synchronize()
    each = begin.elapsed_time(end) / times
    return {"ms": round(each, 3), "watts": watts, "clock_mhz": clock}


def keep(into: dict[str, dict[str, Any]], context: int, rows: int, play: Any) -> None:
    if rows in (1, 16):
        into["kernels_ms"][f"{rows} rows at {context}"] = kernels(play)
    if rows in (1, 8, 16):
        into["sustained"][f"{rows} rows at {context}"] = sustained(play)


def goals(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the required figures with the measured ones."""
    out = []
    for (model, context, figure), (required, stretch) in GOALS.items():
        if figure == "cycle_ms" and result["draft"] != "dflash":
            continue
        for row in result["rows"]:
            if (model, context) == (result["model"], row["context"]):
                out.append(
                    {
                        "model": model,
                        "context": context,
                        "figure": figure,
                        "found": row[figure],
                        "required": required,
                        "stretch": stretch,
                        "met": row[figure] <= required,
                    }
                )
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=["31b", "26b-a4b"])
    parser.add_argument("--contexts", type=int, nargs="*", default=[64, 4096, 32768])
    parser.add_argument("--type", default="q4_k_m")
    parser.add_argument("--draft", default="dflash", choices=["dflash", "assistant"])
    parser.add_argument("--streams", type=int, nargs="*", default=[], help="texts in one step")
    parser.add_argument("--cache-type", default="q8_0", choices=KINDS)
    parser.add_argument("--out", type=Path, default=ROOT / "results")
    args = parser.parse_args()
    config = steps.SyntheticConfig(
        type=args.type, draft=args.draft, contexts=tuple(args.contexts), streams=tuple(args.streams)
    )
    results, found = [], []
    for name in args.models:
        backend: Any = devices.select("cuda", args.cache_type)
        seen: dict[str, dict[str, Any]] = {"kernels_ms": {}, "sustained": {}}
        result = steps.measure(name, backend, config, functools.partial(keep, seen))
        results.append(result | seen)
        found += goals(result)
        for row in result["rows"]:
            print(name, *(f"{k} {v:g}" for k, v in row.items() if v is not None), flush=True)
        torch.cuda.empty_cache()
    for goal in found:
        print("met   " if goal["met"] else "MISSED", *(f"{k} {v}" for k, v in goal.items()))
    kind = "" if args.draft == "dflash" else f"-{args.draft}"
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{datetime.date.today()}-gpu-steps{kind}.json"
    path.write_text(json.dumps({"results": results, "goals": found}, indent=1) + "\n")
    print(f"wrote {path}")
    return not all(goal["met"] for goal in found)


if __name__ == "__main__":
    sys.exit(main())
