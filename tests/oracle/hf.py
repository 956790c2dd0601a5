"""transformers' Gemma 4 models from tiny checkpoint folders, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Gemma4AssistantForCausalLM, Gemma4ForCausalLM
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()


def target(folder: Path) -> Any:
    """`Gemma4ForCausalLM`; the folder must hold a text-only checkpoint."""
    return Gemma4ForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def assistant(folder: Path) -> Any:
    """`Gemma4AssistantForCausalLM`."""
    return Gemma4AssistantForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
