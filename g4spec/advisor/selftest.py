"""`doctor --self-test`: checks g4spec's own runtime on this machine.

Only a child process imports torch, so that a broken installation is reported as a failed check.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

TIMEOUT = 300

CHILD = r"""
import json, time
import torch
from g4spec.ops.reference import Ops

out = []
ops, seed = Ops(), torch.Generator().manual_seed(1)
x = torch.randn(16, 512, generator=seed)
w = torch.randn(768, 512, generator=seed)
whole = ops.linear(x, w)
same = all(torch.equal(ops.linear(x[:n], w), whole[:n]) for n in range(1, 17))
out.append([same, "reference runtime: a row has the same bits in batches of 1 to 16 rows"])
exact = (x.double() @ w.double().T - whole.double()).abs().max().item()
out.append([exact < 1e-3, f"reference runtime: largest error against 64-bit floats {exact:.1e}"])
out.append([None, f"torch {torch.__version__}, CUDA {'available' if torch.cuda.is_available() else 'not available'}"])
if torch.cuda.is_available():
    n = min(torch.cuda.mem_get_info()[0] // 2, 4 << 30) // 4
    data = torch.zeros(n, device="cuda")
    data.sum().item()
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(5):
        data.sum()
    stop.record()
    torch.cuda.synchronize()
    rate = 5 * n * 4 / (start.elapsed_time(stop) / 1e3) / 1e9
    out.append([None, f"read bandwidth measured here: {rate:.0f} GB/s ({torch.cuda.get_device_name()})"])
try:
    from g4spec.errors import EnvironmentProblem
    from g4spec.runtime import devices

    gpu = devices.select("cuda")[0]
    from g4spec.runtime.cuda import kernel_selftest as selftest

    out += selftest.checks(gpu)
except EnvironmentProblem as missing:
    out.append([None, f"CUDA kernels: not checked: {missing.what.removeprefix('`device` cuda: ')}"])
print("RESULT " + json.dumps(out))
"""  # noqa: E501


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
    line = next((s for s in done.stdout.splitlines() if s.startswith("RESULT ")), None)
    if done.returncode or line is None:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        if last == "ModuleNotFoundError: No module named 'torch'":
            last = "no torch here, which running a model needs: pip install 'g4spec[run]'"
        return [CheckResult(False, f"failed in a child process: {last}")]
    return [CheckResult(ok, text) for ok, text in json.loads(line.removeprefix("RESULT "))]
