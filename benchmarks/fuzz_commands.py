"""Fuzz all commands, the server's endpoints and all readers; the corpus that grew is kept.

    python benchmarks/fuzz_commands.py [--minutes 60] [--seed 0] [--shares 5,2,2]

One process, in memory where /dev/shm is. Minutes are shared between commands, requests and readers;
the result goes to `benchmarks/results/DATE-fuzz-commands.json`. Fails if a case raised, worked for
more than 10 s, took more than 200 MB, wrote outside its folder or more than 200 MB, changed a
source, connected anywhere, loaded a pickle, or sent a control character to a terminal. Cases and
conditions: `tests/fuzz`.
"""

from __future__ import annotations

import argparse
import logging
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

from watch import keep  # noqa: E402

from g4spec import __version__  # noqa: E402
from tests.fuzz import campaign, readers, watching  # noqa: E402

KEPT = 1200
"""Cases of a corpus, the older ones first."""

WATCHED = 0.2
"""Share of the cases whose lines are looked at: a case takes 10 ms, with its lines 25."""


def tell(count: campaign.Count, lines: int) -> None:
    print(f"{count.ran:,} cases, {lines:,} lines, {len(count.kept)} kept, "
          f"broken: {list(count.broken)}", flush=True)  # fmt: skip


def run_commands(base: Path, seconds: list[float], seed: int) -> dict[str, Any]:
    commands, rows = campaign.Commands(base), {}
    for name, share in zip(campaign.SURFACES, seconds, strict=True):
        surface = commands if name == "commands" else campaign.Requests(commands)
        corpus = campaign.saved(name)
        count = campaign.fuzz(surface, share, 10**9, seed, corpus, tell, WATCHED)
        campaign.save(name, [*corpus, *count.kept][:KEPT])
        for what, cases in count.broken.items():
            print(f"BROKEN {what}\n    {cases[0]}", flush=True)
        rows[name] = count.json()
    return rows


def run_readers(base: Path, seconds: float, seed: int) -> dict[str, Any]:
    """The readers by themselves (`cpu_fuzz.py` runs them at length)."""
    row: dict[str, Any] = {"cases": 0, "by_reader": {}, "broken": {}}
    surfaces = readers.surfaces(base)
    for surface in surfaces:
        end, corpus = time.monotonic() + seconds / len(surfaces), readers.saved(surface.name)
        ran = turn = 0
        while time.monotonic() < end:
            verdict = readers.fuzz(surface, 400, seed + turn, cover=False,
                                   corpus=corpus if turn % 8 == 0 else corpus[:20])  # fmt: skip
            ran, turn = ran + verdict.ran, turn + 1
            for what, _ in verdict.failures:
                row["broken"][what] = row["broken"].get(what, 0) + 1
        row["by_reader"][surface.name] = ran
        row["cases"] += ran
        print(f"{surface.name}: {ran:,}", flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shares", default="5,2,2")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    start, shares = time.perf_counter(), [float(s) for s in asked.shares.split(",")]
    seconds = [asked.minutes * 60 * share / sum(shares) for share in shares]
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as folder:
        (Path(folder) / "commands").mkdir()
        rows = run_commands(Path(folder) / "commands", seconds[:2], asked.seed)
        (Path(folder) / "readers").mkdir()
        rows["readers"] = run_readers(Path(folder) / "readers", seconds[2], asked.seed)
    failures = sum(len(row["broken"]) for row in rows.values())
    result = keep(None, "fuzz-commands", {
        "what": "coverage-guided fuzzing of all commands, endpoints and readers",
        "cases": sum(row["cases"] for row in rows.values()), "failures": failures,
        "seconds": round(time.perf_counter() - start, 1), "seed": asked.seed, "cores_used": 1,
        "limits": {"cpu_seconds": watching.SECONDS, "growth_mb": watching.GROWTH >> 20},
        "versions": {"g4spec": __version__, "python": platform.python_version()},
        "surfaces": rows,
    })  # fmt: skip
    print(f"{result['cases']:,} cases, {failures} kinds of failure, {result['seconds']} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
