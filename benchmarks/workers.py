"""Run a benchmark in several processes and merge their results."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def spread(script: str, shares: list[list[object]]) -> tuple[dict[str, Any], int]:
    """Run a script once for each list of arguments, all at the same time, a core each.

    Args:
        script: a file that takes `--out FILE.json`.

    Returns:
        What they found, see `merged`, and how many exit codes were not 0. The end of such a
        process' output is printed.
    """
    with tempfile.TemporaryDirectory() as name:
        files = [Path(name) / f"{i}.json" for i in range(len(shares))]
        logs = [file.with_suffix(".log") for file in files]
        running = []
        for share, file, log in zip(shares, files, logs, strict=True):
            command = [sys.executable, script, *share, "--out", file]
            with log.open("wb") as output:
                running.append(
                    subprocess.Popen(
                        list(map(str, command)),
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        env={**os.environ, "OMP_NUM_THREADS": "1"},
                    )
                )
        codes = [process.wait() for process in running]
        for i, (code, log) in enumerate(zip(codes, logs, strict=True)):
            if code:
                print(f"worker {i}: exit code {code}\n{log.read_text(errors='replace')[-3000:]}")
        found = [json.loads(file.read_text()) for file in files if file.exists()]
        return merged(found) if found else {}, sum(map(bool, codes))


def merged(parts: list[Any]) -> Any:
    """Put results of one form together: numbers are added, lists joined; what is equal in all
    (words, lists) is kept once."""
    first = parts[0]
    if isinstance(first, dict):
        keys = dict.fromkeys(key for part in parts for key in part)
        return {key: merged([part[key] for part in parts if key in part]) for key in keys}
    if isinstance(first, (int, float)) and not isinstance(first, bool):
        return sum(parts)
    if isinstance(first, list) and any(part != first for part in parts):
        return [each for part in parts for each in part]
    return first
