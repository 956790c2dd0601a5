"""Checks which quantized checkpoints are read. Others are refused by their configuration, before
any weights are read or downloaded.

Sources: compressed-tensors `transform/transform_args.py` (locations of transforms).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from g4spec.convert import safetensors
from g4spec.errors import Unsupported

METHODS = (
    "compressed-tensors",
    "gptq",
    "auto-round",
    "auto_round",
    "fp8",
    "fbgemm_fp8",
    "modelopt FP8",
)
FORMATS = (
    "pack-quantized",
    "int-quantized",
    "naive-quantized",
    "float-quantized",
    "dense",
    "mixed-precision",
)
MARKS = {
    ".qweight": "GPTQ or AWQ",
    ".absmax": "bitsandbytes",
    ".SCB": "bitsandbytes",
    ".biases": "MLX",
    ".weight_scale_2": "NVFP4 by ModelOpt",
    ".weight_packed": "compressed-tensors",
    ".weight_scale": "FP8",
    ".weight_scale_inv": "FP8",
}
"""Ending of a tensor's name that only quantized weights have -> what wrote it."""
OFFLINE = ("weight_input", "weight_output")
"""Where compressed-tensors rotates weights; it rotates activations in all other places."""
OWN_FILE = "hf_quant_config.json"
"""File next to config.json that has the quantization in older exports of ModelOpt."""
FIX = "convert from the checkpoint that was not quantized"


def with_own_file(folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a configuration with the quantization that is in a file of its own, if it is."""
    path = folder / OWN_FILE
    if config.get("quantization_config") or not path.exists():
        return config
    found = safetensors.load_json(path).get("quantization")
    if not isinstance(found, dict) or not found.get("quant_algo"):
        return config
    return {**config, "quantization_config": {"quant_method": "modelopt", **found}}


def settings(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the quantization of a checkpoint according to its config.json, or None.

    Raises Unsupported for a quantization that cannot be read.
    """
    text = config.get("text_config")
    inner = text.get("quantization_config") if isinstance(text, dict) else None
    found = config.get("quantization_config") or inner or config.get("quantization")
    if not isinstance(found, dict):
        return None
    packing = str(found.get("packing_format", "auto_gptq"))
    if not _is_readable(found):
        raise Unsupported(
            "config.json: quantization_config",
            found=_title(found),
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


def refuse_unnamed(names: Iterable[str]) -> None:
    """Raise Unsupported for tensors of quantized weights if config.json names no quantization."""
    for name in names:
        for ending, method in MARKS.items():
            if name.endswith(ending):
                raise Unsupported(
                    "config.json: quantization_config is missing, but weights are quantized",
                    found=f"{method}, by tensor {name}",
                    fix=FIX,
                )


def _is_readable(found: Mapping[str, Any]) -> bool:
    method = found.get("quant_method")
    if method == "compressed-tensors":
        return found.get("format") in FORMATS
    return (f"modelopt {found.get('quant_algo')}" if method == "modelopt" else method) in METHODS


def _title(found: Mapping[str, Any]) -> str:
    """Return what wrote the weights. MLX names no method."""
    if "quant_method" not in found and {"group_size", "bits"} <= found.keys():
        return f"MLX with {found['bits']} bits"
    keys = ("quant_method", "format", "quant_algo")
    return " ".join(str(found[key]) for key in keys if found.get(key)) or "nothing"


def _locations(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield where compressed-tensors applies transforms, such as rotations."""
    transforms = found.get("transform_config")
    groups = transforms.get("config_groups") if isinstance(transforms, dict) else None
    for group in groups.values() if isinstance(groups, dict) else ():
        applied = group.get("apply") if isinstance(group, dict) else None
        for entry in applied if isinstance(applied, list) else ():
            yield str(entry.get("location") if isinstance(entry, dict) else entry)
