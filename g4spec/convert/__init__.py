"""From published checkpoints to GGUF, and from GGUF to GGUF in another type."""

from g4spec.convert.cache import cached
from g4spec.convert.plan import Plan, Row
from g4spec.convert.run import Result, checked, convert, quantize
from g4spec.convert.sources import Folder, Found, detect

__all__ = [
    "Folder",
    "Found",
    "Plan",
    "Result",
    "Row",
    "cached",
    "checked",
    "convert",
    "detect",
    "quantize",
]
