"""Compare `g4spec quantize` with llama.cpp's `llama-quantize`: time, error, and tensor types.

    python benchmarks/quantize.py --tool LLAMA_BUILD/bin/llama-quantize [--file BF16.gguf]
                                  [--imatrix FILE]

Both run in alternation with one thread. Processor time is compared, start-up included, because a
busy machine affects it least. Without --file a random target of 110 million weights is used. With
--imatrix both use it and errors are weighted by it; tensors that it lacks are left out. The result
is written as dated JSON. The exit code is 1 if the type of a tensor differs, the bytes of a type
without a search differ, or an error is larger than llama.cpp's.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from math import prod
from pathlib import Path
from typing import Any

from watch import write_result

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT.parent))

from g4spec import convert  # noqa: E402
from g4spec.gguf import GGUF, imatrix  # noqa: E402
from g4spec.measure import run_record as provenance  # noqa: E402
from g4spec.quant import policy  # noqa: E402
from g4spec.validate.loss import losses, total  # noqa: E402
from tests.support import tiny  # noqa: E402

PLAIN = {"q5_k": "Q5_K_S", "q3_k": "Q3_K_S"}
"""Map types to the mixes under whose names llama-quantize has them. Q4_K alone it has not."""
NAMES = {
    n: PLAIN.get(n, n.upper())
    for n in policy.names()
    if policy.parse_type(n).base.quantized and n != "q4_k"
}
WEIGHTED = ("q4_0", "q4_1", "q5_0", "q5_1")
"""Types that are searched for, too, with an imatrix."""
SEARCHED = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs")
SIZE: dict[str, Any] = {
    "layers": 8,
    "hidden": 1024,
    "inter": 4096,
    "heads": 8,
    "head_dim": 128,
    "kv": 4,
    "global_head_dim": 256,
}


def timed(core: int, *command: object) -> float:
    """Return the seconds of processor time of a process on one core."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    if done.returncode:
        raise SystemExit(f"{command[0]}: exit {done.returncode}\n{done.stderr[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime


def weighted(source: Path, path: Path, weights: imatrix.Imatrix) -> dict[str, float]:
    """Return the weighted relative RMS error of each quantized tensor that the imatrix
    contains."""
    out = {}
    with GGUF(source) as a, GGUF(path) as b:
        for name, info in b.tensors.items():
            w = weights.weights(name, info.shape) if info.format.quantized else None
            if w is None:
                continue
            x, y = (g.array(name).astype(float).reshape(len(w), -1, info.shape[-1]) for g in (a, b))
            of = w[:, None].astype(float)
            out[name] = float(((of * (y - x) ** 2).sum() / (of * x**2).sum()) ** 0.5)
    return out


def compared(
    source: Path, ours: Path, theirs: Path, weights: imatrix.Imatrix | None
) -> dict[str, Any]:
    """Return types, bytes and errors of two results."""
    searched = (*SEARCHED, *WEIGHTED) if weights else SEARCHED
    with GGUF(ours) as a, GGUF(theirs) as b:
        types = [{n: t.format.name for n, t in f.tensors.items()} for f in (a, b)]
        exact = [n for n, t in types[1].items() if t not in searched]
        bytes_equal = all((a.raw(n) == b.raw(n)).all() for n in exact if types[0][n] == types[1][n])
    found: dict[str, Any] = {"types_equal": types[0] == types[1], "bytes_equal": bytes_equal}
    errors = []
    for side, path in (("g4spec", ours), ("llama_cpp", theirs)):
        lost = losses(source, path)
        summed = total(lost)
        found[side] = summed.json() if summed else None
        errors.append(
            weighted(source, path, weights)
            if weights
            else {loss.difference.name: loss.difference.relative_rms for loss in lost}
        )
        if weights:
            found[side]["weighted_errors"] = errors[-1]
    found["larger_errors"] = [n for n, e in errors[0].items() if e > errors[1].get(n, 0)]
    return found


def one(
    tool: Path, source: Path, name: str, repeats: int, folder: Path, matrix: Path | None
) -> dict[str, Any]:
    """Return the result for one type."""
    more = ["--imatrix", matrix] if matrix else []
    ours, theirs = folder / "ours.gguf", folder / "theirs.gguf"
    core = min(os.sched_getaffinity(0))
    seconds: dict[str, list[float]] = {"g4spec": [], "llama_cpp": []}
    for _ in range(repeats):
        seconds["llama_cpp"].append(timed(core, tool, *more, source, theirs, NAMES[name], 1))
        seconds["g4spec"].append(
            timed(
                core,
                sys.executable,
                "-m",
                "g4spec",
                "quantize",
                source,
                ours,
                "--type",
                name,
                *more,
            )
        )
    middle = {side: statistics.median(s) for side, s in seconds.items()}
    return {
        "seconds": seconds,
        "speedup": middle["llama_cpp"] / middle["g4spec"],
        **compared(source, ours, theirs, imatrix.read(matrix) if matrix else None),
    }


def main() -> int:
    """Measure all types and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tool", type=Path, required=True)
    parser.add_argument("--file", type=Path)
    parser.add_argument("--imatrix", type=Path)
    parser.add_argument("--types", nargs="*", default=list(NAMES), choices=list(NAMES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "results")
    args = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder, source = Path(temporary), args.file
        if source is None:
            source = folder / "source.gguf"
            convert.convert(tiny.target(folder / "target", **SIZE), source, type="bf16")
        with GGUF(source) as g:
            weights = sum(prod(t.shape) for t in g.tensors.values() if len(t.shape) > 1)
        for name in args.types:
            r = found[name] = one(args.tool, source, name, args.repeats, folder, args.imatrix)
            errors = [r[side]["relative_rms"] for side in ("g4spec", "llama_cpp")]
            print(
                f"{name}: {r['speedup']:.2f} times as fast as llama.cpp; error {errors[0]:.4%}, "
                f"there {errors[1]:.4%}; types equal {r['types_equal']}, bytes "
                f"{r['bytes_equal']}",
                flush=True,
            )
        write_result(
            args.out,
            f"quantize{'-imatrix' if args.imatrix else ''}",
            {
                "weights": weights,
                "file": provenance.describe_file(source),
                "tool": args.tool.name,
                "types": found,
            },
        )
    good = all(
        r["types_equal"] and r["bytes_equal"] and not r["larger_errors"] for r in found.values()
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
