"""The accept kernel: committed tokens of each sequence, and where its next step begins."""

from __future__ import annotations

import pytest
import torch

from g4spec.runtime.cuda.step.cycle_state import CycleState, SequenceState
from tests.gpu.device import DEVICE

pytestmark = pytest.mark.gpu

ROOM, WIDTH = 8, 20
SPARE = SequenceState(6, 1, 0, 0)


def make_state(stands: list[SequenceState], turn: int = 0) -> CycleState:
    state = CycleState(ROOM, DEVICE, width=WIDTH, turns=2)
    state.set(stands, SPARE, turn)
    return state


def stepped(state: CycleState, rows: int, right: list[int], *, forced: int | None = None) -> None:
    """Run a step in which sequence i matches the draft for `right[i]` tokens and then chooses token
    7."""
    n = len(right)
    state.place(n, rows, WIDTH)
    ids = 100 * torch.arange(1, n + 1)[:, None] + torch.arange(rows)
    state.step(n, rows).ids.view(n, rows).copy_(ids)
    chosen = ids + 1
    for s, count in enumerate(right):
        if count < rows:
            chosen[s, count] = 7
    into = state.chosen(n, rows)
    into.ids.copy_(chosen.flatten())
    into.values.copy_(0.5 * torch.arange(n * rows))
    into.bad.zero_()
    lengths = None if forced is None else torch.tensor([forced], device=DEVICE)
    state.accept(n, rows, drafted=True, forced=lengths)


@pytest.mark.parametrize("rows", [1, 2, 7, 16])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_rejections(rows: int, n: int) -> None:
    """Every acceptance count of one sequence, in a batch with others."""
    stands = [SequenceState(5 - s, 50 + 20 * s, 9, rows) for s in range(n)]
    state = make_state(stands, turn=1)
    at = [s.position for s in stands]
    for turn in range(rows):
        right = [(turn + 3 * s) % rows for s in range(n)]
        stepped(state, rows, right)
        torch.cuda.synchronize()
        results = state.results((1 + turn) % 2, n)
        at = [p + held + 1 for p, held in zip(at, right, strict=True)]
        assert state.accepted(n).tolist() == right
        assert state.slots(n).tolist() == [s.slot for s in stands]
        for s, seen in enumerate(results):
            assert seen[:4] == (at[s], 7, right[s], (1 + turn) % 2)
            assert seen.ids[:rows] == [100 * (s + 1) + i for i in range(rows)]
            assert seen.chosen[: right[s] + 1] == [*seen.ids[1 : right[s] + 1], 7]
            assert seen.logits[:rows] == [0.5 * (s * rows + i) for i in range(rows)]
        assert state.values[:, n:].tolist() == make_state(stands, 1).values[:, n:].tolist()


def test_ignored_rows_and_padding_sequences() -> None:
    state = make_state(
        [SequenceState(0, 10, 5, 3), SequenceState(1, 20, 6, 1), SequenceState(2, 30, 8, 8)]
    )
    stepped(state, 8, [8, 8, 8, 8])  # everything matches: all requested tokens are accepted
    assert state.values[:4].tolist() == [
        [13, 21, 38, 1, 1, 1, 1, 1],
        [103, 201, 308, 0, 0, 0, 0, 0],
        [2, 0, 7, 0, 0, 0, 0, 0],
        [3, 1, 8, 0, 0, 0, 0, 0],
    ]
    state.set_rows([1, 4, 2])
    stepped(state, 8, [8, 8, 8, 8])
    assert state.values[0].tolist() == [14, 25, 40, 1, 1, 1, 1, 1]
    assert state.values[5, :4].tolist() == [0] * 4  # each sequence has its own count


@pytest.mark.parametrize("forced,want", [(0, 0), (5, 5), (7, 7), (12, 7)])
def test_forced_lengths(forced: int, want: int) -> None:
    state = make_state([SequenceState(0, 0, 5, 16), SequenceState(1, 0, 5, 3)])
    stepped(state, 8, [0, 0], forced=forced)
    assert state.accepted(2).tolist() == [want, min(want, 2)]


@pytest.mark.parametrize("n,rows", [(1, 4), (1, 16), (2, 1), (5, 4)])
def test_positions_of_the_next_step_and_proposal(n: int, rows: int) -> None:
    """Padding sequences use the spare slot."""
    stands = [SequenceState(5 - s, 50 + 20 * s, 9 + s, rows) for s in range(n - (n > 1))]
    state = make_state(stands)
    state.place(n, rows, WIDTH, mask=3)
    every = [*stands, *[SPARE] * (n - len(stands))]
    for batch, width in ((state.step(n, rows), rows), (state.draft(n, WIDTH), WIDTH)):
        assert batch.sizes == (width,) * n
        assert batch.ids.tolist() == [t for s in every for t in (s.anchor, *[3] * (width - 1))]
        assert batch.slots.tolist() == [s.slot for s in every for _ in range(width)]
        assert batch.positions.tolist() == [s.position + i for s in every for i in range(width)]
        assert all(x.is_contiguous() for x in (batch.ids, batch.positions, batch.slots))
    if n == 1:  # a token that is drafted is one of the step
        assert state.step(1, rows).ids.data_ptr() == state.draft(1, WIDTH).ids.data_ptr()


def test_non_finite_logits_are_reported() -> None:
    state = make_state([SequenceState(0, 10, 5, 4), SequenceState(1, 20, 6, 2)])
    state.unfit[[2, WIDTH, WIDTH + 15]] = 1
    state.place(2, 4, WIDTH)
    into = state.chosen(2, 4)
    into.bad.zero_()
    into.bad[[3, 4]] = 1
    state.accept(2, 4, drafted=True)
    torch.cuda.synchronize()
    assert [(s.bad, s.unfit) for s in state.results(0, 2)] == [(8, 4), (1, 1 | 1 << 15)]
    state.place(2, 4)
    state.accept(2, 4, drafted=False)
    torch.cuda.synchronize()
    assert [s.unfit for s in state.results(1, 2)] == [0, 0]
