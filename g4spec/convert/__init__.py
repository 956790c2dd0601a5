"""Convert published checkpoints to GGUF, and requantize GGUF files."""

from g4spec.convert.cache import convert_cached
from g4spec.convert.output import Result
from g4spec.convert.pipeline import check_arguments, convert, quantize
from g4spec.convert.plan import Plan, PlannedTensor
from g4spec.convert.sources import CheckpointFolder, DetectedSource, conversion_command, detect

__all__ = [
    "CheckpointFolder",
    "DetectedSource",
    "Plan",
    "PlannedTensor",
    "Result",
    "check_arguments",
    "conversion_command",
    "convert",
    "convert_cached",
    "detect",
    "quantize",
]
