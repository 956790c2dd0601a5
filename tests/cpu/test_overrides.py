"""Every operation that the GPU backend overrides has a parity case, and no other operation has
one."""

from __future__ import annotations

from g4spec.ops.reference import Ops
from g4spec.runtime.cuda.ops import CudaOps
from tests.gpu.parity import CASES


def replaced() -> set[str]:
    return {
        n
        for n in dir(Ops)
        if n[0] != "_" and callable(getattr(Ops, n)) and getattr(CudaOps, n) is not getattr(Ops, n)
    }


def test_every_override_has_a_parity_case() -> None:
    assert replaced() == CASES.keys()


def test_a_backend_has_only_operations_of_the_reference() -> None:
    """Models only use operations of the reference."""
    own = {n for n in vars(CudaOps) if n[0] != "_" and callable(getattr(CudaOps, n))}
    assert own <= set(dir(Ops))
