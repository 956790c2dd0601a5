"""A matrix is stored once, whatever its packing, and twice while it is being packed."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import pytest
import torch

from g4spec import quant
from g4spec.runtime.cuda.weights import matrix as matrix_module
from g4spec.runtime.cuda.weights import packing
from g4spec.runtime.cuda.weights.matrix import (
    GateUpPairs,
    Matrix,
    concat_rows,
    interleave_experts,
    join,
)

ROWS, COLUMNS = 256, 512
Pack = Callable[[Sequence[Matrix]], object]


@pytest.fixture(autouse=True, scope="module")
def _others() -> Iterator[None]:
    """Leave the objects of earlier tests out of `live`, which takes long with many of them."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def live() -> int:
    """Return the bytes of all live tensors."""
    gc.collect()
    found = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    return sum({s.data_ptr(): s.nbytes() for s in (x.untyped_storage() for x in found)}.values())


def matrix(type: str, matrices: int = 1) -> Matrix:
    size = quant.get(type).row_bytes(COLUMNS)
    raw = torch.randint(0, 256, (matrices * ROWS, size), dtype=torch.uint8)
    return Matrix(type, raw, ROWS, COLUMNS, matrices)


CASES: dict[str, tuple[int, int, Pack]] = {
    "alone": (1, 1, lambda m: m[0].weight),
    "joined": (3, 1, lambda m: (join(m), concat_rows(m))),
    "a pair": (2, 1, lambda m: GateUpPairs()(m[0], m[1])),
    "experts": (1, 4, lambda m: interleave_experts(m[0], None)),
    "experts, gates and ups apart": (2, 4, lambda m: interleave_experts(m[0], m[1])),
}


def made(case: str) -> list[Matrix]:
    """Return the matrices of a case, the same each time."""
    torch.manual_seed(1)
    count, matrices, _ = CASES[case]
    return [matrix("q4_k", matrices) for _ in range(count)]


@pytest.mark.parametrize("type", ["q4_k", "q8_0"])
@pytest.mark.parametrize("case", CASES)
def test_no_matrix_is_stored_twice(case: str, type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    count, matrices, pack = CASES[case]
    before = live()
    all_of = [matrix(type, matrices) for _ in range(count)]
    size = count * matrices * ROWS * quant.get(type).row_bytes(COLUMNS)
    assert live() - before == size
    inside: list[int] = []
    plain = packing.pack

    def watched(name: str, raw: torch.Tensor, unit: int) -> torch.Tensor:
        inside.append(live() - before)
        return plain(name, raw, unit)

    monkeypatch.setattr(packing, "pack", watched)
    packed = pack(all_of)
    assert inside == [size], "what is packed, and nothing beside it"
    assert live() - before == size, "the file's bytes are gone"
    del packed


@pytest.mark.parametrize("problem", [torch.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("step", ["cat", "stack", "pack"])
@pytest.mark.parametrize("case", CASES)
def test_packing_that_fails_can_be_repeated(
    case: str, step: str, problem: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request fails that memory ends in, or that Ctrl-C ends; the engine and its weights live
    on."""
    pack = CASES[case][2]

    def full(*args: object, **more: object) -> None:
        raise problem

    all_of, packed = made(case), None
    with monkeypatch.context() as patch:
        patch.setattr(packing if step == "pack" else torch, step, full)
        with contextlib.suppress(problem):  # not all of them concatenate and stack
            packed = pack(all_of)
    assert weights(packed or pack(all_of)) == weights(pack(made(case)))


@pytest.mark.parametrize("case", ["a pair", "experts", "experts, gates and ups apart"])
def test_ctrl_c_at_any_line_loses_no_weights(case: str) -> None:
    """Keep those of a pair, lost between the last line that could give them back and the next."""
    pairs = GateUpPairs()

    def pack(of: list[Matrix]) -> Any:
        return pairs(*of) if case == "a pair" else interleave_experts(of[0], (*of, None)[1])

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename != matrix_module.__file__:
            return None
        left -= event == "line"
        if event == "line" and left < 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    want, lines, before = weights(pack(made(case))), 0, sys.gettrace()
    while True:
        all_of, left = made(case), lines
        try:
            sys.settrace(trace)
            pack(all_of)
            break
        except KeyboardInterrupt:
            assert weights(pack(all_of)) == want, lines
        finally:
            sys.settrace(before)
        lines += 1
    assert lines > 20


def weights(packed: Any) -> list[list[int]]:
    """Return the bytes of what a `Pack` returns."""
    if isinstance(packed, tuple):  # of `join` and `concat_rows`
        packed = packed[1]
    return [w.data.flatten().tolist() for w in (packed if isinstance(packed, list) else [packed])]


def test_a_matrix_of_a_pair_cannot_be_read_by_itself() -> None:
    gate, up = matrix("q4_k"), matrix("q4_k")
    GateUpPairs()(gate, up)
    with pytest.raises(AssertionError, match="part of a pair"):
        _ = gate.weight
