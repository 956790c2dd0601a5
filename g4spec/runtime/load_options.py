"""Checks of the options of `Engine.load` that need no file and no device.

This module does not import torch, so that a wrong option is reported at once.
"""

from __future__ import annotations

import re
from numbers import Real

from g4spec import ranges
from g4spec.errors import UsageError, did_you_mean
from g4spec.models.fields import MAX_SIZE
from g4spec.runtime.cuda.cache.cache_types import KINDS


def check_cache_type(cache_type: str | None) -> None:
    """Raise UsageError for an unknown KV cache type."""
    if cache_type not in (None, *KINDS):
        raise UsageError(
            "`cache_type`",
            expected=" or ".join(KINDS),
            found=cache_type,
            fix=did_you_mean(cache_type, KINDS),
        )


def parse_device(device: str) -> tuple[int, bool] | None:
    """Return the number of the GPU, and whether to use only portable kernels; None for "cpu" and
    "auto". Raise UsageError for anything else."""
    if device in ("cpu", "auto"):
        return None
    text = device if isinstance(device, str) else repr(device)
    found = re.fullmatch(r"cuda(?::(\d{1,4}))?(:portable)?", text)
    if found is None:
        raise UsageError(
            "`device`",
            expected="cpu, cuda, cuda:1, cuda:portable or auto",
            found=text,
            fix="use cuda for the first GPU" if "gpu" in text.lower() else None,
        )
    return int(found[1] or 0), found[2] is not None


def check_draft(p_min: float | None, window: int | None, has_file: bool) -> None:
    """Raise UsageError if `draft_p_min` or `draft_window` is out of range or given without a draft
    file."""
    if window is not None:
        ranges.check_type("draft_window", window, f"1 to {MAX_SIZE}")
        if not 1 <= window <= MAX_SIZE:
            raise UsageError("`draft_window`", expected=f"1 to {MAX_SIZE}", found=window)
    if window is not None and not has_file:
        raise UsageError("`draft_window` needs a draft with a cache", fix="pass one with `draft`")
    if p_min is not None:
        ranges.check_type("draft_p_min", p_min, "0 to 1", Real)
        if not 0 <= p_min <= 1:
            raise UsageError("`draft_p_min`", expected="0 to 1", found=p_min)
    if p_min and not has_file:
        raise UsageError(
            "`draft_p_min` needs a draft that has a confidence head",
            fix="pass a DSpark draft with `draft`",
        )
