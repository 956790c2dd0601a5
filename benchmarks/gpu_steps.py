"""Steps and cycles on a GPU: random weights at the real shapes, forced acceptance.

    python benchmarks/gpu_steps.py [31b 26b-a4b ...] [--contexts 64 4096 32768] [--json FILE]

Times are of a recorded step played again and again (CUDA events, median), so they hold what the GPU
does and not what Python adds; `cycle` is timed by the clock, with everything between.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.gpu_prefill import driver
from g4spec.models.spec import Committed
from g4spec.runtime import provenance, synthetic
from g4spec.runtime.cuda.ops import CudaOps
from g4spec.runtime.sampling import Sampler

ROWS = (1, 2, 4, 8, 16)


def milliseconds(run: Callable[[], Any], times: int = 20) -> float:
    """Median time on the GPU of what `run` launches."""
    run()
    out = []
    for _ in range(times):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        out.append(begin.elapsed_time(end))
    return round(median(out), 3)


def bandwidth() -> float:
    """Bytes a second of a sum over 8 GiB."""
    x = torch.ones(1 << 31, dtype=torch.float32, device="cuda")
    return x.nbytes / (milliseconds(x.sum, 5) * 1e-3)


def weight_bytes(model: Any) -> int:
    """Bytes of the matrices as they lie in memory, each counted once."""
    seen = {}
    for w in model.values():
        data = w if isinstance(w, torch.Tensor) else w.table
        seen[data.data_ptr()] = data.nbytes
    return sum(seen.values())


def cycle(target: Any, draft: Any, at: int, accepted: int, times: int = 20) -> float:
    """Median milliseconds of a cycle that accepts `accepted` - 1 drafted tokens, by the clock."""
    chooser, out = target.ops.chooser(Sampler()), []
    for i in range(times + 3):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        drafted = draft.propose(7, at, draft.max_tokens, chooser)
        step = target.step([7, *drafted], at)
        chosen = list(chooser.choose_rows(step.logits, at + 1))
        assert len(chosen) == 1 + draft.max_tokens
        n = accepted
        r = step.read
        draft.commit(Committed(r.ids[:n], r.start, r.hidden[:n], r.taps[:n]))
        torch.cuda.synchronize()
        if i >= 3:
            out.append((time.perf_counter() - begin) * 1e3)
    return round(median(out), 3)


def fill(target: Any, draft: Any, tokens: int) -> float:
    """Read random tokens so that caches are real; tokens a second."""
    ids = torch.randint(10, 200_000, (tokens,)).tolist()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for read in target.prefill(ids):
        if draft is not None:
            draft.commit(read)
    torch.cuda.synchronize()
    return tokens / (time.perf_counter() - begin)


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    ops = CudaOps("cuda", args.cache_type)
    target = synthetic.target(name, args.type, ops, max(args.contexts) + 64)
    draft = None
    if name in synthetic.DRAFTS and not args.no_draft:
        draft = synthetic.draft(name, args.draft_type, ops, target)
    out: dict[str, Any] = {"model": name, "type": args.type, "cache": args.cache_type, "at": {}}
    for context in args.contexts:
        found: dict[str, Any] = {"prefill_tokens_per_second": round(fill(target, draft, context))}
        for rows in ROWS if context == min(args.contexts) else (1, 16):
            ids = torch.randint(10, 200_000, (rows,)).tolist()
            logits = target.step(ids, context).logits
            assert bool(logits.isfinite().all()), (name, context, rows)
            recording = target._step._made[rows]
            found[f"step_{rows}_ms"] = milliseconds(recording.graph.replay)
        if draft is not None:
            found["cycle_ms"] = cycle(target, draft, context, args.accept_length)
            found["draft_ms"] = milliseconds(next(iter(draft._block._made.values())).graph.replay)
            found["tokens_per_second"] = round(args.accept_length / found["cycle_ms"] * 1e3, 1)
        out["at"][context] = found
        shown = "  ".join(f"{k} {v}" for k, v in found.items())
        print(f"{name} at {context}: {shown}", flush=True)
    out["weight_bytes"] = weight_bytes(target.model.w)
    out["without_kernel"] = sorted(ops.without_kernel)
    out["accept_length"] = args.accept_length
    weights, missing = out["weight_bytes"] / 1e9, out["without_kernel"]
    print(f"  weights {weights:.2f} GB; without a kernel: {missing}", flush=True)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=["31b", "26b-a4b"])
    parser.add_argument("--type", default="q4_k_m")
    parser.add_argument("--draft-type", default="q8_0")
    parser.add_argument("--cache-type", default="q8_0", choices=["f16", "q8_0"])
    parser.add_argument("--contexts", type=int, nargs="*", default=[64, 4096, 32768])
    parser.add_argument("--accept-length", type=int, default=6)
    parser.add_argument("--no-draft", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    record = {
        "device": torch.cuda.get_device_name(), "driver": driver(), "torch": torch.__version__,
        "machine": provenance.machine(), "commit": provenance.commit(),
        "weights": "random, made on the GPU; acceptance forced",
        "read_bytes_per_second": bandwidth(), "results": [],
    }  # fmt: skip
    torch.cuda.empty_cache()
    for name in args.models:
        record["results"].append(measure(name, args))
        torch.cuda.empty_cache()
        if args.json:
            args.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
