"""Long fuzzing runs in many processes: reproducible cases, and processes that die or hang."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz import campaign, workers
from tests.fuzz.campaign import Commands
from tests.fuzz.cases import files_of_case
from tests.fuzz.requests import RandomHttpRequest
from tests.fuzz.worker import Job
from tests.fuzz.workers import Process, Workers


def job(folder: Path, *cases: int) -> Job:
    return Job(0, 1, 3, (60.0, 60.0, 60.0), cases or (3, 3, 0), 0.5, str(folder))  # type: ignore[arg-type]


def test_a_saved_case_is_complete(tmp_path: Path) -> None:
    commands = Commands(tmp_path)
    for numbers in campaign.saved("commands")[::17]:
        case = commands.make(numbers)
        again = commands.read(json.loads(json.dumps(commands.packed(case))))
        assert (again.argv, again.given, again.terminal) == (case.argv, case.given, case.terminal)
        for name in files_of_case(case, commands.family):
            assert again.changed[name] == case.changed.get(name, commands.family.data[name])
    for numbers in campaign.saved("requests")[::17]:
        sent = RandomHttpRequest(numbers)
        other = RandomHttpRequest.of_json(json.loads(json.dumps(sent.json())))
        assert (other.method, other.path, other.headers, other.sent, other.leaves) == (
            sent.method,
            sent.path,
            sent.headers,
            sent.sent,
            sent.leaves,
        )


def test_a_worker_runs_and_its_rows_are_merged(tmp_path: Path) -> None:
    failures = tmp_path / "failures"
    failures.mkdir()
    run = Workers(tmp_path, job(failures), 1)
    run.run()
    rows = run.rows()
    cases = [workers.merge_rows(rows[name])["cases"] for name in workers.NAMES]
    assert run.ended == [] and cases == [3, 3, 0]
    kept, lines = workers.corpus(rows["commands"], campaign.saved("commands"))
    assert 0 < len(kept) <= 3 and lines > 300
    assert workers.classify_failures(failures, time.monotonic()) == {}


@pytest.mark.parametrize(
    "program,what",
    [
        ("raise SystemExit(9)", "a worker ended with 9"),
        ("import time; time.sleep(99)", "hang"),
    ],
)
def test_the_case_of_a_dead_worker_is_saved(program: str, what: str, tmp_path: Path) -> None:
    run = Workers(tmp_path, job(tmp_path), 1, _end=0.0)
    started = subprocess.Popen([sys.executable, "-c", program])
    beat = "commands [7, 8] 1.0"
    process = Process(run.job, started, (beat, 0.0, -1e9))
    run.processes.append(process)
    (tmp_path / "beat-0").write_text(beat.ljust(256))
    (tmp_path / "stderr-0").write_text("")
    if what != "hang":
        started.wait()
    run._look(process)
    (found, path), tree = run.ended[0], json.loads(run.ended[0][1].read_text())
    assert found.startswith(what) and tree["numbers"] == [7, 8] and tree["surface"] == "commands"
    assert path.parent == tmp_path and not run.processes and started.poll() is not None


def test_hangs_count_only_if_reproduced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i, broken in enumerate(["hang: x after 10 s of work", "a.py:3: KeyError: 'x'"]):
        (tmp_path / f"{i}.json").write_text(json.dumps({"surface": "commands", "broken": [broken]}))
    for alone, count in (([], 1), (["it is broken"], 2)):
        monkeypatch.setattr(workers, "replay_alone", lambda path, alone=alone: alone)
        found: dict[str, Any] = workers.classify_failures(tmp_path, time.monotonic() + 9)
        assert len(found) == 2 and sum(row["counts"] for row in found.values()) == count
