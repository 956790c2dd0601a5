"""Captured cycles of every kind of draft give the same texts as eager ones.

Models compute with the reference ops; row placement, sampling and acceptance use the kernels. A
replay runs the captured function again.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from g4spec.ops.sampling import Sampler
from g4spec.runtime.cuda.step import graphs
from g4spec.runtime.cuda.step.graph_runner import GraphRunner
from g4spec.runtime.engine import Engine
from g4spec.runtime.request import Options
from tests.emulator import kernels
from tests.gpu import family
from tests.gpu.device import EMULATED
from tests.oracle import build
from tests.support import kinds

pytestmark = pytest.mark.skipif(not EMULATED, reason="the emulator replaces a missing GPU")

SLOTS, VOCAB, WINDOW, CTX = 3, 512, kinds.CYCLE_WINDOW, 160
SHAPE: dict[str, Any] = {"vocab": VOCAB, "layers": 2, "period": 2, "window": WINDOW}
SAMPLERS = [Sampler(), Sampler(temperature=1.0, seed=3), Sampler(temperature=0.8, top_k=20, seed=4)]


class ReplayReadsValues:
    """`graphs.Capture` whose replay may read values of tensors (reference ops do)."""

    def __init__(self, run: Any, pool: Any, overlap: bool = True) -> None:
        self._run, self.outputs = run, ()

    def replay(self) -> None:
        self.outputs = self._run()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family.pairs(tmp_path_factory.mktemp("runner"), SHAPE, kinds.CYCLES, "f32")


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with kernels.installed("sm_90a"):
        monkeypatch.setattr(graphs, "Capture", ReplayReadsValues)
        yield


def load(folder: Path, draft: str) -> Engine:
    """Return an engine with one slot that no request uses."""
    path = folder / f"{draft}.gguf"
    engine = Engine.load(folder / "target.gguf", path, n_ctx=CTX, parallel=SLOTS + 1)
    engine.target.space.n_slots = SLOTS
    engine.pool.free_slots.remove(SLOTS)
    return engine


RequestResult = tuple[list[int], list[tuple[list[int], int]], list[float]]
"""Result of a request: its tokens, (drafted tokens, number accepted) per cycle, and logits."""


def texts(engine: Engine, counts: tuple[int, ...]) -> list[RequestResult]:
    """Run more requests than slots, each with its own sampler and draft length."""
    requests = [
        engine.submit(
            build.prompt(5 + 9 * i, VOCAB, i),
            Options(7 + 2 * i, SAMPLERS[i % 3], count, ignore_eos=True),
        )
        for i, count in enumerate(counts)
    ]
    out = []
    for request in requests:
        cycles = list(request)
        did = [(c.drafted, c.accepted) for c in cycles]
        out.append((request.ids, did, [x for c in cycles for x in c.logits]))
    return out


def help_out(draft: Any, plain: list[RequestResult]) -> None:
    """Make proposals begin with some correct tokens, looked up by position and anchor."""
    known = {}
    for i, (ids, _, _) in enumerate(plain):
        for at in range(len(ids)):
            known[5 + 9 * i + at, ids[at]] = ids[at + 1 :]
    propose = draft.propose

    def helped(batch: Any, count: int, pick: Any) -> torch.Tensor:
        own: torch.Tensor = propose(batch, count, pick)
        for row, first in zip(own, batch.starts, strict=True):
            position = int(batch.positions[first])
            right = known.get((position, int(batch.ids[first])), [])[: position % 4]
            n = min(len(right), count)
            row[:n] = torch.tensor(right[:n])
        return own

    draft.propose = helped


@pytest.mark.parametrize("draft", kinds.CYCLES)
def test_every_kind_in_the_engine(folder: Path, draft: str) -> None:
    """Requests of different lengths, one of which never drafts."""
    plain, found = texts(load(folder, draft), (0,) * 4), []
    for recorded in (False, True):
        engine = load(folder, draft)
        help_out(engine.draft, plain)
        if recorded:
            engine.scheduler.cycles.runners = [GraphRunner(engine.target, engine.draft)]
        found.append(texts(engine, (3, 0, 5, 2)))
    for eager, graph, (ids, _, _) in zip(*found, plain, strict=True):
        assert graph[:2] == eager[:2] and graph[0] == ids
        assert torch.allclose(torch.tensor(graph[2]), torch.tensor(eager[2]), atol=1e-4)
    assert all(len(set(ids)) > 3 for ids, _, _ in plain[1:3])
    accepted, drafted = zip(*((a, len(d)) for _, did, _ in found[1] for d, a in did), strict=True)
    assert 5 < sum(accepted) < sum(drafted)
