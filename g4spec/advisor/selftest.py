"""`doctor --self-test`: checks g4spec's own runtime on this machine.

Only a child process imports torch, so that a broken installation is reported as a failed check.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

TIMEOUT = 300

MARK = "RESULT "
CHILD = (
    "import json; from g4spec.runtime.selftest import checks; "
    f"print({MARK!r} + json.dumps(list(checks())))"
)


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of one check. `ok`: None for information, as a measured bandwidth."""

    ok: bool | None
    text: str


def run() -> list[CheckResult]:
    """Run all checks."""
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
    return [CheckResult(ok, text) for ok, text in json.loads(line.removeprefix(MARK))]
