"""`Recorded` without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from g4spec.core import Batch
from g4spec.runtime.cuda.step import graphs
from g4spec.runtime.cuda.step.recorded import EAGER_USES, Recorded
from tests.emulator import runtime


def test_runs_that_fail_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape is recorded after EAGER_USES runs that returned something."""
    monkeypatch.setattr(graphs, "Capture", runtime.Capture)
    failures = [torch.OutOfMemoryError("tried to allocate 2 GiB")] * (EAGER_USES + 1)

    def run(batch: Batch) -> tuple[Any, ...]:
        if failures:
            raise failures.pop()
        return (batch.ids[:, None] * 2.0,)

    recorded = Recorded(run, 4, torch.device("cpu"), None)
    for _ in range(EAGER_USES + 1):
        with pytest.raises(torch.OutOfMemoryError):
            recorded([(0, 5, [1, 2])])
    for i in range(EAGER_USES + 2):
        _, (found,) = recorded([(0, 5, [i, 2])])
        assert found.flatten().tolist() == [2.0 * i, 4.0]
