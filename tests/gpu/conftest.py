"""Kernels on the GPU; on a machine without one, those tests that are quick enough emulated."""

from collections.abc import Iterator

import pytest

from tests.emulator import kernels
from tests.gpu.device import EMULATED


@pytest.fixture(autouse=True, scope="session")
def _machine() -> Iterator[None]:
    if EMULATED:
        with kernels.installed("sm_90a"):
            yield
    else:
        yield
