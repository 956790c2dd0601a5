"""Kernels on the GPU; on a machine without one in the emulator, which is slow: there a few of each
test's cases run, or all with G4SPEC_EMULATE=all. With G4SPEC_EMULATE=checked races and accesses
outside of memory are looked for, which takes ten times as long. There memory that nobody wrote
holds NaN."""

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.emulator import kernels
from tests.gpu.device import EMULATED

CASES = 2
"""Of each test, the first and the last."""
LONG = {"test_engine.py", "test_odd_files.py", "test_portable_engine.py", "test_synthetic.py"}
SKIP = pytest.mark.skip(reason="takes long on a machine without a GPU (G4SPEC_EMULATE=all)")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # of pytest-xdist: as many processes as cores
        torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not EMULATED or os.environ.get("G4SPEC_EMULATE") == "all":
        return
    tests = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if Path(item.path).parent == Path(__file__).parent:
            tests[item.nodeid.split("[")[0]].append(item)
    for cases in tests.values():
        last = len(cases) - 1
        kept = {round(i * last / (CASES - 1)) for i in range(CASES)}
        for i, item in enumerate(cases):
            if i not in kept or Path(item.path).name in LONG:
                item.add_marker(SKIP)


@pytest.fixture(autouse=True, scope="module")
def _machine() -> Iterator[None]:
    """No longer than a file: a worker that ran these may go on with others."""
    if EMULATED:
        torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty is NaN
        with kernels.installed("sm_90a", checked=os.environ.get("G4SPEC_EMULATE") == "checked"):
            yield
        torch.use_deterministic_algorithms(False)
    else:
        yield
