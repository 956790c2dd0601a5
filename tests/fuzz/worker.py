"""One process of a long run: runs cases of each surface in turn, or replays one that failed.

python -m tests.fuzz.worker FOLDER '{"number": 0, ...}'     as `workers.py` starts it python -m
tests.fuzz.worker --replay FILE                   prints the violations as JSON
"""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.fuzz import campaign, readers
from tests.fuzz.campaign import CaseResult, Commands, ProgressListener, Requests, Totals

BEAT = 256
"""Size of the file that says which case is running, in bytes."""
ROOM = 2 << 30
"""Bytes that must be free in memory to use it for files."""


@dataclass(frozen=True)
class Job:
    """The task of a worker.

    Attributes:
        number: index of the worker among `together`.
        seconds, cases: limits per surface, readers last.
        watched: see `campaign.fuzz`.
        failures: folder for cases with violations.
    """

    number: int
    together: int
    seed: int
    seconds: tuple[float, float, float]
    cases: tuple[int, int, int]
    watched: float
    failures: str

    def text(self) -> str:
        return json.dumps(asdict(self))


@contextmanager
def place() -> Iterator[Path]:
    """Yield a working folder, in memory if there is room; also used for temporary files."""
    memory = Path("/dev/shm")
    there = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > ROOM
    with tempfile.TemporaryDirectory(dir=memory if there else None) as name:
        before, tempfile.tempdir = tempfile.tempdir, str(Path(name) / "tmp")
        try:
            yield Path(name)
        finally:
            tempfile.tempdir = before


class Worker:
    """Runs cases and records their outcomes as it goes."""

    def __init__(self, folder: Path, job: Job) -> None:
        self.folder, self.job, self.failed = folder, job, 0
        self.recent: list[tuple[int, ...]] = []
        self.surface: Any = None
        self.name = ""
        flags = os.O_CREAT | os.O_WRONLY
        self._beat = os.open(folder / f"beat-{job.number}", flags)

    def begun(self, numbers: tuple[int, ...]) -> None:
        self.recent = [*self.recent[-30:], numbers]
        at = time.process_time()
        os.pwrite(self._beat, f"{self.name} {list(numbers)} {at:.3f}".encode().ljust(BEAT), 0)

    def broke(self, case: Any, ran: CaseResult) -> None:
        self.failed += 1
        path = Path(self.job.failures) / f"{self.name}-{self.job.seed}-{self.failed}.json"
        path.write_text(
            json.dumps(
                {
                    "surface": self.name,
                    "broken": ran.outcome.broken,
                    "case": self.surface.packed(case),
                    "before": self.recent[:-1],
                    "seed": self.job.seed,
                }
            )
        )

    def told(self, count: Totals, done: bool = False) -> None:
        row = count.json() | {"kept": count.kept, "done": done, "shown": count.broken}
        path = self.folder / f"{self.name}-{self.job.number}.json"
        path.with_suffix(".new").write_text(json.dumps(row))
        path.with_suffix(".new").replace(path)

    def run(self, base: Path) -> None:
        job, commands = self.job, Commands(base)
        watch = ProgressListener(self.begun, self.broke, self.told)
        for i, name in enumerate(campaign.SURFACES):
            if not job.cases[i]:
                continue
            self.name = name
            self.surface = commands if name == "commands" else Requests(commands)
            corpus = campaign.saved(name)
            first = corpus[job.number % job.together :: job.together]
            self.told(
                campaign.fuzz(
                    self.surface,
                    job.seconds[i],
                    job.cases[i],
                    job.seed,
                    corpus,
                    watch,
                    job.watched,
                    first,
                ),
                True,
            )
        if job.cases[2]:
            self._readers(base / "readers")

    def _readers(self, base: Path) -> None:
        """Run the readers (`cpu_fuzz.py` runs them at length)."""
        base.mkdir()
        self.name, count = "readers", Totals()
        surfaces = readers.surfaces(base)
        share = self.job.cases[2] // len(surfaces) + 1
        for surface in surfaces:
            end = time.monotonic() + self.job.seconds[2] / len(surfaces)
            corpus, ran, turn = readers.saved(surface.name), 0, 0
            while ran < share and time.monotonic() < end:
                self.begun((turn,))
                verdict = readers.fuzz(
                    surface,
                    min(200, share - ran),
                    self.job.seed + turn,
                    False,
                    corpus if turn % 8 == 0 else corpus[:20],
                )
                ran, turn = ran + verdict.ran, turn + 1
                for what, data in verdict.failures:
                    self._reader_broke(surface.name, what, data)
                    count.broken.setdefault(campaign.sort(what), []).append(surface.name)
            count.ran += ran
            count.by[surface.name] = campaign.Counter({"ran": ran})
            count.kinds[f"reader: {surface.name}"] = ran
        self.told(count, True)

    def _reader_broke(self, name: str, what: str, data: bytes) -> None:
        self.failed += 1
        path = Path(self.job.failures) / f"reader-{self.job.seed}-{self.failed}.json"
        path.write_text(
            json.dumps({"surface": "readers", "broken": [what], "reader": name, "data": data.hex()})
        )


def replay(file: Path) -> list[str]:
    """Run a saved case by itself and return its violations."""
    tree = json.loads(file.read_text())
    with place() as base:
        if tree["surface"] == "readers":
            (base / "readers").mkdir()
            found = [s for s in readers.surfaces(base / "readers") if s.name == tree["reader"]]
            verdict = readers.Verdict()
            readers.run_input(found[0], bytes.fromhex(tree["data"]), verdict)
            return [what for what, _ in verdict.failures]
        commands = Commands(base)
        surface: Any = commands if tree["surface"] == "commands" else Requests(commands)
        with surface.ready():
            case = (
                surface.make(tuple(tree["numbers"]))
                if "numbers" in tree
                else surface.read(tree["case"])
            )
            ran: CaseResult = surface.run(case)
            print(
                ran.shown[:3000],
                f"exit or status: {ran.outcome.code}",
                ran.outcome.err[-1000:],
                sep="\n",
                file=sys.stderr,
            )
            return ran.outcome.broken


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.argv[1] == "--replay":
        print(json.dumps(replay(Path(sys.argv[2]))))
        return
    folder, job = Path(sys.argv[1]), Job(**json.loads(sys.argv[2]))
    worker = Worker(folder, job)
    try:
        with place() as base:
            worker.run(base)
    except BaseException:
        (folder / f"traceback-{job.number}").write_text(traceback.format_exc())
        raise


if __name__ == "__main__":
    main()
