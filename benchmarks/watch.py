"""Measure time and memory of processes, and write results as dated JSON."""

import datetime
import hashlib
import json
import resource
import statistics
import subprocess
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from g4spec.measure import run_record as provenance


def measure_process(command: list[object], env: dict[str, str] | None = None) -> dict[str, float]:
    """Run a program to its end. Return its seconds, CPU seconds, and peak memory in megabytes
    (10^6 bytes).

    `anonymous_mb` is memory that the program allocated (RssAnon, sampled 200 times a second).
    `resident_mb` also counts pages of mapped files (VmHWM), which the system can drop at any time.
    """
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    child = subprocess.Popen(
        list(map(str, command)), stdout=subprocess.DEVNULL, env=env, stderr=subprocess.PIPE
    )
    peak = {"RssAnon": 0, "VmHWM": 0}

    def sample() -> None:
        while child.returncode is None:
            try:
                text = Path(f"/proc/{child.pid}/status").read_text()
            except (OSError, ProcessLookupError):
                return
            for line in text.splitlines():
                key, _, value = line.partition(":")
                if key in peak:
                    peak[key] = max(peak[key], int(value.split()[0]))
            time.sleep(0.005)

    watcher = threading.Thread(target=sample)
    watcher.start()
    _, err = child.communicate()
    seconds = time.perf_counter() - start
    watcher.join()
    if child.returncode:
        raise SystemExit(f"{command[:4]}: exit {child.returncode}\n{err.decode()[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "seconds": seconds,
        "cpu_seconds": cpu,
        "anonymous_mb": peak["RssAnon"] * 1024 / 1e6,
        "resident_mb": peak["VmHWM"] * 1024 / 1e6,
    }


def summarize(runs: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of the times and the maximum of the memory figures of several runs."""
    return {
        key: round(statistics.median(v) if key.endswith("seconds") else max(v), 3)
        for key in runs[0]
        for v in [[r[key] for r in runs]]
    }


RESULTS = Path(__file__).parent / "results"


def today() -> str:
    """Return the date in UTC, as 2026-12-31."""
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Return eight hexadecimal digits that are equal for tensors with the same bytes."""
    data = b"".join(x.cpu().numpy().tobytes() for x in tensors)
    return hashlib.sha256(data).hexdigest()[:8]


def write_result(out: Path | None, name: str, found: dict[str, Any]) -> dict[str, Any]:
    """Write a result as dated JSON, with the machine, its GPU and the commit. Return the content.

    Args:
        out: a file (.json), or a folder for DATE-`name`.json; default `results/`.
    """
    day = today()
    gpu = (
        {
            "device": torch.cuda.get_device_name(),
            "driver": provenance.driver(),
            "torch": torch.__version__,
        }
        if torch.cuda.is_available()
        else {}
    )
    result = {
        "date": day,
        "machine": provenance.describe_machine(),
        **gpu,
        "commit": provenance.commit(),
        **found,
    }
    path = out or RESULTS
    path = path if path.suffix == ".json" else path / f"{day}-{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path.name}")
    return result
