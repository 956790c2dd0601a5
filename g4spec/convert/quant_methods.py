"""Which quantized checkpoints are read. All others are refused by their configuration, before any
weights are read or downloaded.

Sources: compressed-tensors `transform/transform_args.py` (locations of transforms).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from g4spec.errors import Unsupported

METHODS = ("compressed-tensors", "gptq", "auto-round", "auto_round", "fp8", "fbgemm_fp8")
FORMATS = (
    "pack-quantized",
    "int-quantized",
    "naive-quantized",
    "float-quantized",
    "dense",
    "mixed-precision",
)
OFFLINE = ("weight_input", "weight_output")
"""Where compressed-tensors rotates weights; it rotates activations in all other places."""
FIX = "convert from the checkpoint that was not quantized"


def settings(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the quantization of a checkpoint according to its config.json, or None.

    Raises Unsupported for a quantization that cannot be read.
    """
    text = config.get("text_config")
    inner = text.get("quantization_config") if isinstance(text, dict) else None
    found = config.get("quantization_config") or inner
    if not isinstance(found, dict):
        return None
    method, form = found.get("quant_method"), found.get("format")
    packing = str(found.get("packing_format", "auto_gptq"))
    if method not in METHODS or (method == "compressed-tensors" and form not in FORMATS):
        raise Unsupported(
            "config.json: quantization_config",
            found=f"{method} {form or ''}",
            expected=f"one of {', '.join(METHODS)}",
            fix=FIX,
        )
    if not packing.endswith("gptq"):
        raise Unsupported("config.json: packing_format", expected="auto_gptq", found=packing)
    if online := sorted(set(_locations(found)) - {*OFFLINE}):
        raise Unsupported(
            "config.json: transform_config rotates activations, for which there is no code",
            found=", ".join(online),
            expected=f"only {' and '.join(OFFLINE)}, which the weights contain",
            fix=FIX,
        )
    return found


def _locations(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield where compressed-tensors applies transforms, such as rotations."""
    transforms = found.get("transform_config")
    groups = transforms.get("config_groups") if isinstance(transforms, dict) else None
    for group in groups.values() if isinstance(groups, dict) else ():
        applied = group.get("apply") if isinstance(group, dict) else None
        for entry in applied if isinstance(applied, list) else ():
            yield str(entry.get("location") if isinstance(entry, dict) else entry)
