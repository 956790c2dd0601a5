"""Fail, limit, fill and kill every command that writes; nothing is lost, half there or left over.

    python benchmarks/write_faults.py [--cases 1000] [--seed 0]

Failing and short writes, fsync, rename, open and chmod; limits of a file's size; SIGKILL, SIGTERM
and SIGINT at random moments, twice, and to as many as four runs to one output; full, filling and
read-only disks where this user may mount them. Cases and conditions: `tests/fuzz/faults.py`. The
result goes to `benchmarks/results/DATE-write-faults.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from watch import keep  # noqa: E402

from g4spec import __version__  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    asked, start = parser.parse_args(), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.faults", "--cases", str(asked.cases), "--seed",
         str(asked.seed), "--disks"],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    found = json.loads(done.stdout)
    keep(None, "write-faults", {
        "what": "faults while commands write", "seed": asked.seed,
        "seconds": round(time.perf_counter() - start, 1),
        "versions": {"g4spec": __version__, "python": platform.python_version()}, **found,
    })  # fmt: skip
    print(f"{found['cases']} cases, {len(found['broken'])} kinds of failure")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
