"""Fuzz every reader with mutated files, guided by coverage; keep the inputs that reach new code.

    python benchmarks/cpu_fuzz.py [--scale 1.0] [--seed 0]

Runs at least 100,000 inputs at scale 1, on one core, and writes
`benchmarks/results/DATE-cpu-fuzz.json`. Fails if an input raises anything but a G4Error, takes more
than 5 seconds, or makes memory grow by more than 200 MB.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from watch import write_result  # noqa: E402

from g4spec import __version__  # noqa: E402
from tests.fuzz import readers as fuzzing  # noqa: E402

RUNS = {
    "gguf": 12000,
    "validate": 6000,
    "parts": 6000,
    "dialect": 3000,
    "safetensors": 26000,
    "config": 20000,
    "target config": 10000,
    "tokenizer.json": 3000,
    "tokenizer_config.json": 2500,
    "index": 10000,
    "template": 20000,
}
KEPT = 400 << 10
"""Bytes of a corpus, oldest entries first."""


def kept(entries: list[bytes]) -> list[bytes]:
    """Return as many of the entries as the repository should hold."""
    out, size = [], 0
    for data in entries:
        if size + len(data) <= KEPT:
            out.append(data)
            size += len(data)
    return out


def run(scale: float, seed: int) -> dict[str, Any]:
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for surface in fuzzing.surfaces(Path(folder)):
            start = time.perf_counter()
            corpus = fuzzing.saved(surface.name)
            verdict = fuzzing.fuzz(surface, int(RUNS[surface.name] * scale), seed, corpus=corpus)
            fuzzing.save(surface.name, kept(corpus + verdict.kept))
            rows[surface.name] = row = {
                "files": verdict.ran,
                "refused": verdict.refused,
                "accepted": verdict.passed,
                "stopped": verdict.stopped,
                "slowest_seconds": round(verdict.slowest, 3),
                "largest_growth_mb": round(verdict.growth / 2**20, 1),
                "lines_reached": verdict.lines,
                "new_corpus_entries": len(verdict.kept),
                "failures": sorted({text for text, _ in verdict.failures}),
                "seconds": round(time.perf_counter() - start, 1),
            }
            print(f"{surface.name}: {row}", flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    start = time.perf_counter()
    rows = run(asked.scale, asked.seed)
    failures = sum(len(row["failures"]) for row in rows.values())
    result = write_result(
        None,
        "cpu-fuzz",
        {
            "what": "coverage-guided fuzzing of every reader",
            "files": sum(row["files"] for row in rows.values()),
            "failures": failures,
            "seconds": round(time.perf_counter() - start, 1),
            "seed": asked.seed,
            "cores_used": 1,
            "limits": {"seconds": fuzzing.SECONDS, "growth_mb": fuzzing.GROWTH >> 20},
            "versions": {"g4spec": __version__, "python": platform.python_version()},
            "surfaces": rows,
        },
    )
    print(f"{result['files']:,} files, {failures} failures, {result['seconds']} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
