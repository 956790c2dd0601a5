"""transformers' Gemma 4 models from tiny checkpoint folders, in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()


def model(folder: Path) -> Any:
    """The model that a folder's configuration names; a target must be a text-only checkpoint."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    made = getattr(transformers, config["architectures"][0]).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return made.eval()


target = assistant = model
