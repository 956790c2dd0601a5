"""Selection of the device that an engine runs on."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from g4spec.backend import Backend
from g4spec.errors import EnvironmentProblem, UsageError
from g4spec.runtime import load_options
from g4spec.runtime.backend import TorchBackend

EXTRA = "install g4spec[cuda]"


class NoGpu(EnvironmentProblem):
    """No GPU can be used.

    Args:
        reason: why.
        fix: what the user can do about it.
    """

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(f"`device` cuda: {reason}", fix=fix)
        self.reason = reason


def select(device: str, cache_type: str | None = None) -> Backend:
    """Open a device.

    Args:
        device: "cpu", "cuda", "cuda:1" and so on, or "auto": the first GPU if it is usable.
            "cuda:portable" or "cuda:1:portable": with the kernels for GPUs before sm_80, which run
            on all GPUs.
        cache_type: one of `cache_types.KINDS`; None: F16 on a GPU, unrounded F32 on the CPU.

    Raises:
        UsageError: there is no such device or cache type.
        NoGpu: the device is a GPU, and none can be used.
    """
    found = check(device, cache_type)
    if found is None:
        return TorchBackend(cache_type)
    from g4spec.runtime.cuda.backend import CudaBackend

    chosen: Any = cache_type or "f16"
    return CudaBackend(found[0], chosen, found[1])


def check(device: str, cache_type: str | None = None) -> tuple[int, bool] | None:
    """Raise the errors of `select` without opening the device. Return the number of the GPU and
    whether to use only portable kernels; None for the CPU."""
    load_options.check_cache_type(cache_type)
    gpu = load_options.parse_device(device)
    if device == "auto" and _why_no_gpu() is None:
        gpu = 0, False
    if gpu is None:
        return None
    index, portable = gpu
    if (missing := _why_no_gpu()) is not None:
        raise missing
    if index >= torch.cuda.device_count():
        raise UsageError(
            "`device`", expected=f"at most cuda:{torch.cuda.device_count() - 1}", found=device
        )
    return index, portable


def unused_gpu_reason() -> str | None:
    """Return why a GPU that torch sees is not used; None if there is none, or it is used."""
    found = _why_no_gpu() if torch.cuda.is_available() else None
    return None if found is None else str(found)


def _why_no_gpu() -> NoGpu | None:
    """Return why no GPU can be used, or None."""
    if not torch.cuda.is_available():
        return NoGpu(
            "torch finds no CUDA device here", fix="use `device` cpu, or see `g4spec doctor`"
        )
    found = importlib.util.find_spec("cuda")
    if found is None or importlib.util.find_spec("cuda.core") is None:
        return NoGpu("the package cuda-core is missing", fix=EXTRA)
    return None
