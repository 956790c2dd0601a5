"""The GGUF container: typed metadata, lazy memory-mapped reader, streaming writer with atomic
replacement."""

from g4spec.gguf import regular_files
from g4spec.gguf.atomic import check_writable
from g4spec.gguf.header import TensorInfo
from g4spec.gguf.parts import folder_hint
from g4spec.gguf.reader import GGUF, is_gguf
from g4spec.gguf.values import KV, Value, ValueType, array, boolean, f32, string, u32
from g4spec.gguf.writer import TensorData, planned_sizes, write, write_split

__all__ = [
    "GGUF",
    "KV",
    "TensorData",
    "TensorInfo",
    "Value",
    "ValueType",
    "array",
    "boolean",
    "check_writable",
    "f32",
    "folder_hint",
    "is_gguf",
    "planned_sizes",
    "regular_files",
    "string",
    "u32",
    "write",
    "write_split",
]
