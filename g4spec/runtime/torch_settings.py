"""Settings of torch in the thread that runs the engine, which its caller may use for other work."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch


def own_settings(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context without the caller's autocast and default device, in which a GPU is the
    current one, as kernels, graphs and events need, and its default stream. A step may leave a
    cycle that runs, and another thread, with another current stream, may run the next step.

    Args:
        device: the device of the engine.
    """
    mixed = torch.is_autocast_enabled(device.type)
    # `get_default_device` takes ten times as long.
    elsewhere = torch.empty(0, dtype=torch.bool).device.type != "cpu"
    other = device.type == "cuda" and torch.cuda.current_device() != device.index
    default = torch.cuda.default_stream(device) if device.type == "cuda" else None
    aside = default is not None and torch.cuda.current_stream(device) != default
    if not (mixed or elsewhere or other or aside):
        return nullcontext()
    stack = ExitStack()
    if other:
        stack.enter_context(torch.cuda.device(device))
    if aside:
        stack.enter_context(torch.cuda.stream(default))
    stack.enter_context(torch.autocast(device.type, enabled=False))
    stack.enter_context(torch.device("cpu"))
    return stack


def rounding_notes() -> list[str]:
    """Return a remark if the program lets torch round float32 products, which holds for the whole
    process, so that an engine cannot set it aside."""
    try:
        exact = torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # set for one backend
        exact = False
    if exact:
        return []
    return [
        "float32 products are rounded (`torch.set_float32_matmul_precision`, `allow_tf32`): "
        "texts may differ from those of other processes"
    ]
