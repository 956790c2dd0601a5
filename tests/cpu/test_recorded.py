"""`Recorded` without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from g4spec.core import Batch
from g4spec.runtime.cuda.step import graphs
from g4spec.runtime.cuda.step.recorded import RUNS_BEFORE_RECORDING, Recorded
from tests.emulator import runtime


def test_without_memory_for_a_graph_it_runs_op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is recorded once more after memory was freed, but not again with each batch."""
    tried: list[bool] = []

    def no_memory(run: Any, pool: Any, overlap: bool) -> None:
        tried.append(overlap)
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    monkeypatch.setattr(graphs, "Capture", no_memory)
    recorded = Recorded(lambda b: (b.ids[:, None] * 2.0,), 4, torch.device("cpu"), None)
    for i in range(RUNS_BEFORE_RECORDING + 3):
        _, (found,) = recorded([(0, 5, [i, 2])])
        assert found.flatten().tolist() == [2.0 * i, 4.0]
    assert tried == [True, True]


def test_runs_that_fail_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape is recorded after RUNS_BEFORE_RECORDING runs that returned something."""
    monkeypatch.setattr(graphs, "Capture", runtime.Capture)
    failures = [torch.OutOfMemoryError("tried to allocate 2 GiB")] * (RUNS_BEFORE_RECORDING + 1)

    def run(batch: Batch) -> tuple[Any, ...]:
        if failures:
            raise failures.pop()
        return (batch.ids[:, None] * 2.0,)

    recorded = Recorded(run, 4, torch.device("cpu"), None)
    for _ in range(RUNS_BEFORE_RECORDING + 1):
        with pytest.raises(torch.OutOfMemoryError):
            recorded([(0, 5, [1, 2])])
    for i in range(RUNS_BEFORE_RECORDING + 2):
        _, (found,) = recorded([(0, 5, [i, 2])])
        assert found.flatten().tolist() == [2.0 * i, 4.0]
