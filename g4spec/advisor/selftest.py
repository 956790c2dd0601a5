"""`doctor --self-test`: checks g4spec's own runtime on this machine.

Only a child process imports torch, so that a broken installation is reported as a failed check.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

from g4spec.advisor import measured
from g4spec.advisor.machine_probe import driver_version

TIMEOUT = 300

MARK = "RESULT "
CHILD = (
    "import json; from g4spec.runtime.selftest import bandwidths, checks; "
    f"print({MARK!r} + json.dumps([list(bandwidths()), list(checks())]))"
)


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of one check. `ok`: None for information, as a measured bandwidth."""

    ok: bool | None
    text: str


def run() -> list[CheckResult]:
    """Run all checks, and store the bandwidth of each GPU for later estimates."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", CHILD],
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [CheckResult(False, f"no answer within {TIMEOUT} s")]
    line = next((s for s in done.stdout.splitlines() if s.startswith(MARK)), None)
    if done.returncode or line is None:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        if last == "ModuleNotFoundError: No module named 'torch'":
            last = "no torch here, which running a model needs: pip install 'g4spec[run]'"
        return [CheckResult(False, f"failed in a child process: {last}")]
    read, checks = json.loads(line.removeprefix(MARK))
    driver = driver_version() if read else None
    stored = [_store(name, uuid, driver, speed) for name, uuid, speed in read]
    return [CheckResult(ok, text) for ok, text in checks] + stored


def _store(name: str, uuid: str, driver: str | None, read: float | None) -> CheckResult:
    """Store the bandwidth of a GPU, in GB/s, and report it. The check does not fail if it cannot
    be stored."""
    if read is None:
        return CheckResult(None, f"read bandwidth not measured: too little memory is free ({name})")
    why = measured.store(name, uuid, driver, read)
    text = f"read bandwidth measured here: {read:.0f} GB/s ({name})"
    return CheckResult(None, f"{text}, not stored: {why}" if why else text)
