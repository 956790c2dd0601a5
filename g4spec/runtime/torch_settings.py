"""Settings of torch that a caller may have changed in the thread that runs the engine."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch


def own_settings(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context without the caller's autocast and default device.

    Args:
        device: the device of the engine.
    """
    mixed = torch.is_autocast_enabled(device.type)
    elsewhere = torch.empty(0).device.type != "cpu"  # get_default_device takes ten times as long
    if not (mixed or elsewhere):
        return nullcontext()
    stack = ExitStack()
    stack.enter_context(torch.autocast(device.type, enabled=False))
    stack.enter_context(torch.device("cpu"))
    return stack
