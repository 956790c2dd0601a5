"""Errors for operations that fail while a CUDA graph is captured: those that read values of GPU
tensors on the host, and copies of host memory to the GPU; and for packing of weights, which must be
done before."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from g4spec.runtime.cuda.weights import matrix

REFUSED = {
    "_local_scalar_dense": "a number is read back (item, int, float, bool)",
    "is_nonzero": "a number is read back (bool)",
    "equal": "a comparison is read back",
    "nonzero": "the shape depends on values",
    "masked_select": "the shape depends on values",
    "_unique2": "the shape depends on values",
    "unique_dim": "the shape depends on values",
    "unique_consecutive": "the shape depends on values",
    "lift_fresh": "host memory is copied to the GPU (torch.tensor)",
}
INDEXED = ("index", "index_put_", "index_put", "_index_put_impl_")
READS = ("tolist", "numpy", "cpu")

_active: list[bool] = []
"""Not empty while a capture is emulated."""


class NotCapturable(AssertionError):
    """An operation that fails during the capture of a CUDA graph."""


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if name in REFUSED:
            raise NotCapturable(f"{name}: {REFUSED[name]}")
        if name in INDEXED and any(i is not None and i.dtype is torch.bool for i in args[1]):
            raise NotCapturable(f"{name}: the shape depends on the values of a mask")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Raise NotCapturable for operations that a stream capture would refuse."""

    def refuse(name: str, why: str = "values are read back") -> Any:
        def call(*args: Any, **more: Any) -> Any:
            raise NotCapturable(f"{name}: {why}")

        return call

    with pytest.MonkeyPatch.context() as patch, _Mode():
        for name in READS:
            patch.setattr(torch.Tensor, name, refuse(name))
        refused = refuse("_pack", "weights are packed, which a capture does not run")
        patch.setattr(matrix, "_pack", refused)
        _active.append(True)
        try:
            yield
        finally:
            _active.pop()


def is_active() -> bool:
    """Return whether a capture is emulated now."""
    return bool(_active)
