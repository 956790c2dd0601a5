"""Inject faults into every command that writes files, and check the files afterwards.

    python benchmarks/write_faults.py [--workers 1] [--cases 1000] [--seconds 3600] [--seed 0]

Faults: failing and short writes, fsync, rename, open and chmod (needs a C compiler); file size
limits; SIGKILL, SIGTERM and SIGINT at random moments, twice, and to up to four runs with one
output; full, filling and read-only disks where this user may mount them. No output may be lost or
incomplete, and the next run must remove temporary files. `--workers` processes share the cases, in
separate folders; the run ends when the time or the number of cases is reached. Cases and
conditions: `tests/fuzz/faults.py`. Writes `DATE-write-faults.json` to `--out` or `results`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from watch import write_result  # noqa: E402

from g4spec import __version__  # noqa: E402


def part(number: int, asked: argparse.Namespace) -> dict[str, Any]:
    """Run the cases of one process; the first one also tests disks."""
    cases = -(-asked.cases // asked.workers)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.fuzz.faults",
            "--cases",
            str(cases),
            "--seconds",
            str(asked.seconds),
            "--seed",
            str(asked.seed * 1000 + number),
            *(["--disks"] if number == 0 else []),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        return {"broken": {f"process {number} ended with {done.returncode}": [done.stderr[-2000:]]}}
    return found


def merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the sums over several processes."""
    out: dict[str, Any] = {}
    for name in ("cases", "signals", "disks"):
        out[name] = sum(p.get(name, 0) for p in parts)
    for name in ("by_fault", "by_command"):
        out[name] = dict(
            sorted(sum((Counter(p.get(name, {})) for p in parts), Counter[str]()).items())
        )
    out["calls_can_fail"] = all(p.get("calls_can_fail", False) for p in parts)
    out["broken"] = {what: some for p in parts for what, some in p["broken"].items()}
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    asked, start = parser.parse_args(), time.perf_counter()
    with ThreadPoolExecutor(asked.workers) as pool:
        parts = list(pool.map(lambda number: part(number, asked), range(asked.workers)))
    found = merged(parts)
    write_result(
        asked.out,
        "write-faults",
        {
            "what": "faults while commands write",
            "seed": asked.seed,
            "workers": asked.workers,
            "seconds": round(time.perf_counter() - start, 1),
            "versions": {"g4spec": __version__, "python": platform.python_version()},
            **found,
        },
    )
    for what, cases in found["broken"].items():
        print(f"BROKEN {what}\n    {cases[0]}")
    print(
        f"{found['cases']} cases, {found['signals']} of them signals, "
        f"{len(found['broken'])} kinds of failure"
    )
    return 1 if found["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
