"""transformers' Gemma 4 models from tiny checkpoint folders, in float32 or float64."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch


def model(folder: Path) -> Any:
    """Return the model that a folder's configuration names; a target must be a text-only
    checkpoint."""
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    made = getattr(transformers, config["architectures"][0]).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return made.eval().to(torch.get_default_dtype())


target = assistant = model


@contextlib.contextmanager
def in_double() -> Iterator[None]:
    """Make models created and run inside compute in float64, even where their code asks for
    float32."""
    float_, softmax = torch.Tensor.float, torch.nn.functional.softmax
    try:
        torch.set_default_dtype(torch.float64)
        torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
        torch.nn.functional.softmax = lambda x, dim, dtype=None: softmax(x, dim)  # type: ignore
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.Tensor.float = float_  # type: ignore[method-assign]
        torch.nn.functional.softmax = softmax
