"""The GGUF container: typed metadata, a lazy memory-mapped reader, an atomic streaming writer."""

from g4spec.gguf import regular
from g4spec.gguf.parts import inside
from g4spec.gguf.reader import GGUF, TensorInfo, is_gguf
from g4spec.gguf.replacing import check_place
from g4spec.gguf.values import KV, T, Value, array, boolean, f32, string, u32
from g4spec.gguf.writer import TensorData, write, write_split

__all__ = [
    "GGUF",
    "KV",
    "T",
    "TensorData",
    "TensorInfo",
    "Value",
    "array",
    "boolean",
    "check_place",
    "f32",
    "inside",
    "is_gguf",
    "regular",
    "string",
    "u32",
    "write",
    "write_split",
]
