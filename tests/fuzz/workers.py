"""Many processes of a long run: started, monitored, restarted, and their results merged.

If a worker dies or hangs, its case is saved here. Failures that may be caused by a busy machine
(hangs, memory) count only if they are reproduced when the case runs alone, after all others.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.fuzz import campaign, watching
from tests.fuzz.worker import Job

ROOT = Path(__file__).parents[2]
LOAD_RELATED = re.compile(
    r"hang|memory grew|out of memory|.*the server still holds|Hang|MemoryError"
)
"""Failures that a busy machine may cause."""
MARGIN = 5
"""CPU seconds over a case's limit, and as many over its limit of elapsed time, after which a worker
is killed because it could not end the case itself."""
REPLAYS = 3
"""Number of cases of each kind of failure that are run again, alone."""
NAMES = (*campaign.SURFACES, "readers")


@dataclass
class Process:
    """A worker. `case`: the running case, and when it started, in CPU seconds and in seconds of the
    clock."""

    job: Job
    popen: subprocess.Popen[bytes]
    case: tuple[str | None, float, float] = (None, 0.0, 0.0)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, including its threads."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


@dataclass
class Workers:
    """Worker processes with the same job but different numbers and seeds.

    Attributes:
        ended: cases that killed a worker or made it hang.
    """

    folder: Path
    job: Job
    count: int
    processes: list[Process] = field(default_factory=list)
    ended: list[tuple[str, Path]] = field(default_factory=list)
    _end: float = 0.0
    _number: int = 0

    def run(self) -> None:
        """Run until the time or the number of cases is reached."""
        self._end = time.monotonic() + sum(self.job.seconds)
        for _ in range(self.count):
            self._start(self.job)
        last_report = time.monotonic()
        try:
            while self.processes:
                time.sleep(0.3)
                for process in list(self.processes):
                    self._look(process)
                if time.monotonic() - last_report > 20:
                    last_report = time.monotonic()
                    print(total(self.rows()), f"{len(self.ended)} ended", sep=", ", flush=True)
        finally:
            for process in self.processes:
                process.popen.kill()

    def _start(self, job: Job) -> None:
        number, self._number = self._number, self._number + 1
        mine = replace(job, number=number, seed=self.job.seed * 1000 + number)
        (self.folder / f"beat-{number}").write_bytes(b"")
        with (self.folder / f"stderr-{number}").open("wb") as err:
            started = subprocess.Popen(
                [sys.executable, "-m", "tests.fuzz.worker", str(self.folder), mine.text()],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=err,
                stderr=err,
                env=environment(),
            )
        self.processes.append(Process(mine, started))

    def _look(self, process: Process) -> None:
        number, code = process.job.number, process.popen.poll()
        if code is not None:
            self.processes.remove(process)
            if code:
                output = (self.folder / f"stderr-{number}").read_text(errors="replace")
                self._lost(process, f"a worker ended with {code}: {output[-600:]}")
            return
        beat = (self.folder / f"beat-{number}").read_bytes().decode().strip()
        try:
            spent = cpu_seconds(process.popen.pid)
        except OSError:  # the process has just ended
            return
        now = time.monotonic()
        if beat != process.case[0]:
            process.case = (beat, spent, now)
        worked, waited = spent - process.case[1], now - process.case[2]
        slow = not beat or beat.startswith("readers")  # readers run many cases per beat
        most = 300 if slow else watching.SECONDS + MARGIN
        if worked > most or waited > 10 * most + watching.WALL:
            process.popen.kill()
            process.popen.wait()
            self.processes.remove(process)
            self._lost(process, f"hang: a case worked {worked:.0f} s and waited {waited:.0f} s")

    def _lost(self, process: Process, what: str) -> None:
        """Save the case of a dead process, and start another one for the remaining time."""
        beat = (self.folder / f"beat-{process.job.number}").read_text().strip()
        surface, _, rest = beat.partition(" ")
        path = Path(process.job.failures) / f"ended-{process.job.seed}.json"
        numbers = json.loads(rest.rpartition(" ")[0] or "[]")
        path.write_text(json.dumps({"surface": surface, "broken": [what], "numbers": numbers}))
        self.ended.append((what, path))
        left = self._end - time.monotonic()
        if left > 10 and self._number < 3 * self.count:
            share = left / sum(self.job.seconds)
            self._start(replace(self.job, seconds=tuple(s * share for s in self.job.seconds)))

    def rows(self) -> dict[str, list[dict[str, Any]]]:
        """Return the results of each process, by surface."""
        files = {name: sorted(self.folder.glob(f"{name}-*.json")) for name in NAMES}
        return {name: [json.loads(p.read_text()) for p in some] for name, some in files.items()}


def environment() -> dict[str, str]:
    """Return the environment of a worker: one thread, no GPU, fixed hash seed."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONHASHSEED": "0",
        "HF_HUB_OFFLINE": "1",
    }


def total(rows: dict[str, list[dict[str, Any]]]) -> str:
    return " + ".join(f"{sum(r['cases'] for r in some):,} {name}" for name, some in rows.items())


def merge_rows(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge rows of the same surface."""
    by: dict[str, Counter[str]] = {}
    kinds: Counter[str] = Counter()
    for row in rows:
        for name, codes in row["by_command"].items():
            by.setdefault(name, Counter()).update(codes)
        kinds.update(row["by_input"])
    return {
        "cases": sum(row["cases"] for row in rows),
        "by_command": {n: dict(sorted(c.items())) for n, c in sorted(by.items())},
        "by_input": dict(sorted(kinds.items())),
        "slowest_cpu_seconds": max((row["slowest_cpu_seconds"] for row in rows), default=0),
        "largest_growth_mb": max((row["largest_growth_mb"] for row in rows), default=0),
    }


def corpus(rows: list[dict[str, Any]], older: list[tuple[int, ...]]) -> tuple[list[Any], int]:
    """Return cases that together reach all lines reached, older ones first, and the number of
    lines."""
    known = {tuple(numbers) for numbers in older}
    cases = [(tuple(n), lines) for row in rows for n, lines in row["kept"]]
    cases.sort(key=lambda entry: (entry[0] not in known, -len(entry[1])))
    kept, lines = {}, set[str]()
    for numbers, new in cases:
        if not lines.issuperset(new):
            kept[numbers] = None
            lines.update(new)
    return list(kept), len(lines)


def replay_alone(path: Path) -> list[str]:
    """Return the violations of a case that runs alone in a new process."""
    limit = 3 * watching.WALL
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tests.fuzz.worker", "--replay", str(path)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=limit,
            env=environment(),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [f"hang: alone, {limit} s"]
    print(done.stderr[-4000:], file=sys.stderr)
    if done.returncode:
        number = -done.returncode
        name = signal.Signals(number).name if number > 0 else f"exit code {done.returncode}"
        return [f"a worker ended with {name}: {done.stderr[-600:]}"]
    return list(json.loads(done.stdout.splitlines()[-1]))


def classify_failures(failures: Path, end: float) -> dict[str, dict[str, Any]]:
    """Return kind of failure -> number of cases, an example, whether it is reproduced alone, and
    whether it counts.

    Args:
        end: time on the monotonic clock after which nothing is run again; then all failures count.
    """
    found: dict[str, dict[str, Any]] = {}
    tried: Counter[str] = Counter()
    for path in sorted(failures.glob("*.json")):
        for what in json.loads(path.read_text())["broken"]:
            name = campaign.sort(what)
            row = found.setdefault(
                name, {"cases": 0, "first": path.name, "what": what, "again_alone": None}
            )
            row["cases"] += 1
            tried[name] += 1
            if path.name.startswith("ended") and not json.loads(path.read_text())["numbers"]:
                continue  # no case had started
            if tried[name] > REPLAYS or row["again_alone"] or time.monotonic() > end:
                continue
            alone = replay_alone(path)
            row["again_alone"] = bool(alone)
            row["alone"] = alone
    for name, row in found.items():
        row["counts"] = row["again_alone"] is not False or not LOAD_RELATED.match(name)
    return found


@contextlib.contextmanager
def results_folder() -> Any:
    """Create a folder for the results of the processes."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)
