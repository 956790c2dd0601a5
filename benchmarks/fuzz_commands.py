"""Fuzz all commands, the server's endpoints and all readers; keep the corpus.

    python benchmarks/fuzz_commands.py [--workers 16] [--seconds 330] [--cases 250000] [--out DIR]
    python benchmarks/fuzz_commands.py --replay DIR/fuzz-failures/FILE

`--workers` processes with different seeds share the cases; the run ends when the time or the number
of cases is reached. Both are divided among commands, requests and readers. Writes
`DATE-fuzz-commands.json`; one file in `fuzz-failures` per failing case, at once; and
`cases.json.xz`, the corpus of `tests/fuzz/corpus` with the cases that reached new lines.

A case fails if it raises, uses more than 10 s of processor time or 200 MB, writes outside its
folder or more than 200 MB, changes a source file, opens a connection, loads a pickle, sends a
control character to a terminal, or ends its process. Excess time and memory count only if they
recur when the case runs alone, after all others. Cases and conditions: `tests/fuzz`.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from watch import RESULTS, write_result  # noqa: E402

from g4spec import __version__  # noqa: E402
from tests.fuzz import campaign, watching, workers  # noqa: E402
from tests.fuzz.worker import Job  # noqa: E402

WATCHED = 0.2
"""Share of the cases whose lines are looked at: a case takes 9 ms, with its lines 25."""


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--cases", type=int, default=10**9, help="in all, at most")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100_000)
    parser.add_argument("--shares", default="6,3,1", help="commands, requests, readers")
    parser.add_argument("--out", type=Path, help="folder; default: results and the corpus in place")
    parser.add_argument("--replay", type=Path, help="run a case that failed, and nothing else")
    return parser.parse_args()


def main() -> int:
    asked, start = parsed(), time.perf_counter()
    if asked.replay:
        broken = workers.replay_alone(asked.replay)
        print(broken or "nothing is broken")
        return 1 if broken else 0
    out = asked.out or RESULTS
    failures = out.resolve() / "fuzz-failures"
    failures.mkdir(parents=True, exist_ok=True)
    for old in failures.glob("*.json"):
        old.unlink()
    parts = [float(s) for s in asked.shares.split(",")]
    first, second, third = (part / sum(parts) for part in parts)

    def most(share: float) -> int:
        """Return a worker's cases of a surface, rounded up."""
        return -int(-asked.cases * share // asked.workers)

    job = Job(
        0,
        asked.workers,
        asked.seed,
        (asked.seconds * first, asked.seconds * second, asked.seconds * third),
        (most(first), most(second), most(third)),
        WATCHED,
        str(failures),
    )
    with workers.results_folder() as folder:
        run = workers.Workers(folder, job, asked.workers)
        run.run()
        seconds = time.perf_counter() - start
        rows = run.rows()
    surfaces = {name: workers.merge_rows(some) for name, some in rows.items()}
    cases: dict[str, list[tuple[int, ...]]] = {}
    for name in campaign.SURFACES:
        cases[name], surfaces[name]["lines"] = workers.corpus(rows[name], campaign.saved(name))
        surfaces[name]["corpus"] = len(cases[name])
    if all(cases.values()):
        campaign.save(cases, asked.out / "cases.json.xz" if asked.out else campaign.CORPUS)
    found = workers.classify_failures(failures, time.monotonic() + 120)
    counted = [name for name, row in found.items() if row["counts"]]
    result = write_result(
        out,
        "fuzz-commands",
        {
            "what": "coverage-guided fuzzing of all commands, endpoints and readers",
            "cases": sum(row["cases"] for row in surfaces.values()),
            "failures": len(counted),
            "seconds": round(seconds, 1),
            "seed": asked.seed,
            "workers": asked.workers,
            "limits": {"cpu_seconds": watching.SECONDS, "growth_mb": watching.GROWTH >> 20},
            "versions": {"g4spec": __version__, "python": platform.python_version()},
            "broken": found,
            "surfaces": surfaces,
        },
    )
    for name, row in found.items():
        print("BROKEN" if row["counts"] else "not reproduced alone:", name, row, sep="\n    ")
    print(f"{workers.total(rows)}, {len(counted)} kinds of failure, {result['seconds']} s")
    return 1 if counted else 0


if __name__ == "__main__":
    sys.exit(main())
