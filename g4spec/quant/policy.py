"""Which tensor gets which type: what `llama-quantize` chooses, for every type and mix.

Source: llama.cpp `src/llama-quant.cpp`, the choice for Gemma 4 and its drafts.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from g4spec import quant
from g4spec.errors import UsageError
from g4spec.quant import mixes
from g4spec.quant.format import Format

Role = Literal["matrix", "embed", "output", "vector", "index"]

KEPT = ("ffn_gate_inp.weight", "per_layer_model_proj.weight", "_norm.weight")
"""Ends of names that are never quantized: small, and routing depends on them."""
ROUTER = "ffn_gate_inp.weight"
OUTPUT = "output.weight"
TABLES = ("token_embd.weight", "per_layer_token_embd.weight")


@dataclass(frozen=True, slots=True)
class Mix:
    """What can be asked for: a type, or a type with a better one in some places.

    Attributes:
        name: as people type it. `base`: of most matrices.
        file_type: `general.file_type` of such a file, or None.
        better: of the matrices that suffer most, or None.
    """

    name: str
    base: Format
    file_type: int | None
    better: Format | None = None


@cache
def _mixes() -> dict[str, Mix]:
    found = [importlib.import_module(f"{mixes.__name__}.{info.name}").MIX
             for info in pkgutil.iter_modules(mixes.__path__)]  # fmt: skip
    plain = [Mix(f.name, f, f.file_type) for f in map(quant.get, quant.names())]
    return {m.name: m for m in (*plain, *found)}


def names() -> list[str]:
    """Everything that can be asked for as `--type`: types, then mixes."""
    return list(_mixes())


def asked(name: str) -> Mix:
    """A type or mix by name, in any case. UsageError if there is none of that name."""
    found = _mixes().get(name.lower())
    if found is None:
        raise UsageError("unknown type", expected=f"one of {', '.join(names())}", found=name)
    return found


def of_file_type(number: int) -> Mix | None:
    """What `general.file_type` of this number means: a mix, or a type that is only read."""
    only_read = (Mix(f.name, f, f.file_type) for f in quant.readable().values())
    return next((m for m in (*_mixes().values(), *only_read) if m.file_type == number), None)


def types(mix: Mix) -> set[str]:
    """The types that most of a file of this kind may have: its own, or the fallback."""
    return {mix.base.name, mix.base.fallback or mix.base.name}


class Policy:
    """The types of one file's tensors.

    Args:
        asked: what the user asked for.
        names: all tensors of the file; the choice depends on how many layers there are, which of
            them have values of their own, and whether the output is tied to the token table.
    """

    def __init__(self, asked: Mix, names: Iterable[str]) -> None:
        self.asked = asked
        all_names = list(names)
        self.tied = OUTPUT not in all_names
        self.n_layer = 1 + max((_layer(n) for n in all_names), default=0)
        values = sorted((n for n in all_names if "attn_v.weight" in n), key=_layer)
        self.values = {name: i for i, name in enumerate(values)}

    def choose(self, name: str, shape: Sequence[int], role: Role) -> tuple[Format, str]:
        """The type of a tensor, and why it is that one: empty when it is simply what was asked.

        Args:
            shape: PyTorch order.
            role: see `g4spec.models.spec.Role`.
        """
        base = self.asked.base
        if role == "index":
            return quant.get("i64"), "token ids"
        if role == "vector" or len(shape) <= 1:
            return quant.get("f32"), "vectors stay F32" if base.name != "f32" else ""
        if name.endswith(ROUTER):
            return quant.get("f32"), "routing depends on it" if base.name != "f32" else ""
        if not base.quantized:
            return base, ""
        if never_quantized(name):
            return quant.get("f32"), "never quantized"
        form, note = self._wanted(name, shape[-1])
        if shape[-1] % form.block:
            note = f"rows of {shape[-1]} do not divide into blocks of {form.block}"
            form = quant.get(form.fallback or "f16")
            if shape[-1] % form.block:
                form = quant.get("f16")
        return form, note

    def _wanted(self, name: str, row: int) -> tuple[Format, str]:
        """The type if rows divide."""
        base, better = self.asked.base, self.asked.better
        if name == OUTPUT or (self.tied and name in TABLES):
            if base.name == "q8_0":
                return base, ""
            why = "output" if name == OUTPUT else "token table of a tied output"
            return quant.get("q8_0" if row % base.block else "q6_k"), why
        if better is not None:
            if name in self.values and more_bits(self.values[name], len(self.values)):
                return better, "values, more bits in some layers"
            if "ffn_down" in name and more_bits(_layer(name), self.n_layer):
                return better, "ffn_down, more bits in some layers"
        return base, ""


def never_quantized(name: str) -> bool:
    """Whether a tensor stays as it is in quantized files."""
    return not name.endswith("weight") or name.endswith(KEPT)


def more_bits(i: int, n: int) -> bool:
    """Whether layer `i` of `n` gets the better type of a mix: the first and the last eighth, and
    every third in between."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


def _layer(name: str) -> int:
    found = re.match(r"blk\.(\d+)\.", name)
    return int(found[1]) if found else -1
