"""Run kernel tests on the GPU, or in the emulator if there is none.

The emulator is slow: it runs the last case of each test, or all with G4SPEC_EMULATE=all. Without
that, LONG files are skipped; without G4SPEC_EMULATE, SLOW files are left to `make test-all`.
G4SPEC_EMULATE=checked also detects races and accesses out of bounds, and takes ten times as long.
Uninitialized memory contains NaN there. G4SPEC_EMULATE=all,checked does both.
"""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.emulator import kernels
from tests.gpu.device import EMULATE, EMULATED, GPU

LONG = {"test_engine.py", "test_odd_files.py", "test_portable_engine.py", "test_synthetic.py"}
SLOW = {
    "test_attention.py",
    "test_attention_window.py",
    "test_experts.py",
    "test_linear_wide.py",
    "test_prefill.py",
    "test_rows.py",
    "test_runner_models.py",
    "test_selftest.py",
}
SKIP = pytest.mark.skip(reason="takes long on a machine without a GPU (G4SPEC_EMULATE=all)")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # of pytest-xdist: as many processes as cores
        torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)  # before tests are deselected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not EMULATED or "all" in EMULATE:
        return
    tests = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if Path(item.path).parent == Path(__file__).parent:
            tests[item.nodeid.split("[")[0]].append(item)
    for cases in tests.values():
        file = Path(cases[0].path).name
        kept = [] if file in LONG else cases[-1:]
        for item in cases:
            if item not in kept:
                item.add_marker(SKIP)
            elif file in SLOW and not any(EMULATE):
                item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True, scope="module")
def _machine() -> Iterator[None]:
    """Install the emulator for one file only, because a pytest worker may go on with other
    tests."""
    if EMULATED:
        torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty is NaN
        with kernels.installed("sm_90a", checked="checked" in EMULATE):
            yield
        torch.use_deterministic_algorithms(False)
    else:
        with torch.cuda.device(GPU):
            yield


@pytest.fixture
def free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the emulated GPU have 8 GiB of free memory."""
    if EMULATED:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (1 << 33, 1 << 33))
