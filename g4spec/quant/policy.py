"""Choose the type of each tensor as `llama-quantize` does, for every type and mix.

Source: llama.cpp `src/llama-quant.cpp`, the choice for Gemma 4 and its drafts.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Literal

from g4spec import quant
from g4spec.errors import UsageError, did_you_mean
from g4spec.quant import mixes
from g4spec.quant.format import Format
from g4spec.quant.mix import Mix, TensorPosition

Role = Literal["matrix", "embed", "output", "vector", "index"]

NEVER_QUANTIZED = ("ffn_gate_inp.weight", "per_layer_model_proj.weight", "_norm.weight")
"""Suffixes of tensors that are never quantized: they are small, and routing depends on them."""
ROUTER_WEIGHT = "ffn_gate_inp.weight"
OUTPUT = "output.weight"
VALUE_WEIGHTS = "attn_v.weight"
TABLES = ("token_embd.weight", "per_layer_token_embd.weight")


@cache
def _mixes() -> dict[str, Mix]:
    found = [
        importlib.import_module(f"{mixes.__name__}.{info.name}").MIX
        for info in pkgutil.iter_modules(mixes.__path__)
    ]
    plain = [Mix(f.name, f, f.file_type) for f in map(quant.get, quant.writable_names())]
    return {m.name: m for m in (*plain, *found)}


@cache
def _readable() -> dict[str, Mix]:
    """Return `_mixes` and, after them, mixes of one type that can only be read."""
    only_read = (f for f in quant.readable().values() if f.name not in _mixes())
    return _mixes() | {f.name: Mix(f.name, f, f.file_type) for f in only_read}


def names() -> list[str]:
    """Return all choices of `--type`: types, then mixes. A mix with the name of a type replaces it,
    because that is what the name means in llama.cpp."""
    return list(_mixes())


def parse_type(name: str, tensor_types: Iterable[str] = ()) -> Mix:
    """Return the type or mix with this name, in any case. Raises UsageError if it is unknown.

    Args:
        tensor_types: `PATTERN=TYPE` strings: a regular expression for tensor names and their type.
            The first match is used.
    """
    found = _mixes().get(name.lower())
    if found is None:
        raise UsageError(
            "`type`",
            expected=f"one of {', '.join(names())}",
            found=name,
            fix=did_you_mean(name, names()),
        )
    return replace(found, tensor_types=tuple(map(_tensor_type, tensor_types)))


def readable_mix(name: str, tensor_types: Iterable[str] = ()) -> Mix:
    """Return the type or mix with this name, as `parse_type` does, or a type that files have and
    that cannot be written."""
    found = _readable().get(name.lower()) or parse_type(name)
    return replace(found, tensor_types=tuple(map(_tensor_type, tensor_types)))


def _tensor_type(text: str) -> tuple[re.Pattern[str], Format]:
    pattern, _, name = text.rpartition("=")
    if not (pattern and name):
        raise UsageError(
            "`tensor_types`", expected="PATTERN=TYPE, such as ffn_down=q6_k", found=text
        )
    if name.lower() not in quant.writable_names():
        raise UsageError(
            f"`tensor_types` {text}: unknown type",
            expected=f"one of {', '.join(quant.writable_names())}",
            found=name,
            fix=did_you_mean(name, quant.writable_names()),
        )
    try:
        return re.compile(pattern), quant.get(name)
    except re.error as e:
        raise UsageError(f"`tensor_types` {text}: not a regular expression: {e}") from None


def from_file_type(number: int) -> Mix | None:
    """Return the mix with this `general.file_type`, or a mix of one type that can only be read."""
    return next((m for m in _readable().values() if m.file_type == number), None)


def expected_types(mix: Mix) -> set[str]:
    """Return the types that most matrices of such a file may have: those of the mix and their
    fallbacks."""
    formats = [mix.base, *(b.format for b in mix.overrides)]
    return {name for f in formats for name in (f.name, f.fallback or f.name)}


class Policy:
    """Chooser of the types of one file's tensors.

    Args:
        mix: the requested type or mix.
        shapes: name -> shape of all tensors of the file. The choice depends on the number of
            layers, on the layers that have value projections, on the number of query heads per key
            head, and on whether the output shares the token table.
        imatrix: an importance matrix is used.

    Raises UsageError for a `tensor_types` pattern that matches no tensor, or, unless its type is
    F32, none whose type can be chosen.
    """

    def __init__(
        self, mix: Mix, shapes: Mapping[str, Sequence[int]], imatrix: bool = False
    ) -> None:
        self.mix, self.imatrix = mix, imatrix
        self.tied = OUTPUT not in shapes
        self.n_layer = 1 + max(map(_layer, shapes), default=0)
        values = sorted((n for n in shapes if VALUE_WEIGHTS in n), key=_layer)
        self.values = {name: i for i, name in enumerate(values)}
        q, k = (shapes.get(f"blk.0.attn_{x}.weight") for x in "qk")
        self.gqa = q[0] // k[0] if q and k and k[0] else 1
        for pattern, form in mix.tensor_types:
            named = {n: s for n, s in shapes.items() if pattern.search(n)}
            if not named:
                raise UsageError(
                    f"`tensor_types` {pattern.pattern}: no tensor has such a name",
                    fix="`g4spec inspect FILE` lists them",
                )
            if form.name != "f32" and not any(_has_choice(n, s) for n, s in named.items()):
                raise UsageError(
                    f"`tensor_types` {pattern.pattern}: matches only tensors that are never "
                    "quantized",
                    found=", ".join(sorted(named)[:3]),
                )

    def choose(self, name: str, shape: Sequence[int], role: Role) -> tuple[Format, str]:
        """Return the type of a tensor and the reason, which is empty for the base type of the mix.

        Args:
            shape: PyTorch order.
            role: see `g4spec.models.spec.Role`.
        """
        base = self.mix.base
        if role == "index":
            return quant.get("i64"), "token ids"
        if role == "vector" or _is_vector(shape):
            return quant.get("f32"), "vectors stay F32" if base.name != "f32" else ""
        if name.endswith(ROUTER_WEIGHT):
            return quant.get("f32"), "routing depends on it" if base.name != "f32" else ""
        named = self._named(name)
        if not base.quantized and (named is None or never_quantized(name)):
            return base, ""
        if never_quantized(name):
            return quant.get("f32"), "never quantized"
        form, note = self._preferred(name, shape[-1]) if named is None else (named[1], "asked for")
        if shape[-1] % form.block:
            form, note = _fallback(form, shape[-1]), _why_not(form, shape[-1])
        return form, note

    def replaced(self, name: str, shape: Sequence[int], chosen: str) -> tuple[str, str] | None:
        """Return who asked for another type than `chosen`, a pattern of `tensor_types` or the mix,
        and which type was asked for and why it is not used; None if `chosen` is no fallback."""
        named = self._named(name)
        if not _has_choice(name, shape) or (named is None and not self.mix.base.quantized):
            return None
        asker, form = named or (self.mix.name, self._preferred(name, shape[-1])[0])
        if shape[-1] % form.block == 0 or _fallback(form, shape[-1]).name != chosen.lower():
            return None
        return asker, f"{form.name.upper()}: {_why_not(form, shape[-1])}"

    def _named(self, name: str) -> tuple[str, Format] | None:
        """Return the first pattern of `tensor_types` that matches and its type, or None."""
        return next(((p.pattern, f) for p, f in self.mix.tensor_types if p.search(name)), None)

    def _preferred(self, name: str, row: int) -> tuple[Format, str]:
        """Return type and reason under the assumption that rows divide into blocks."""
        base = self.mix.base
        if name == OUTPUT or (self.tied and name in TABLES):
            if base.name == "q8_0":
                return base, ""
            which = "the output" if name == OUTPUT else "the token table of a tied output"
            why = f"{which} gets more bits, as in llama.cpp"
            return quant.get("q8_0" if row % base.block else "q6_k"), why
        for override in self.mix.overrides:
            if override.name_part in name and override.where(self._position(name)):
                which = f", {override.which}" if override.which else ""
                return override.format, override.name_part.removesuffix(".weight") + which
        return base, ""

    def _position(self, name: str) -> TensorPosition:
        if name in self.values:
            return TensorPosition(self.values[name], len(self.values), self.gqa, self.imatrix)
        return TensorPosition(_layer(name), self.n_layer, self.gqa, self.imatrix)


def _fallback(form: Format, row: int) -> Format:
    """Return the type of a matrix whose rows, of `row` values, do not divide into blocks of
    `form`."""
    other = quant.get(form.fallback or "f16")
    return quant.get("f16") if row % other.block else other


def _why_not(form: Format, row: int) -> str:
    return f"rows of {row} do not divide into blocks of {form.block}"


def _is_vector(shape: Sequence[int]) -> bool:
    """Return True for one row of values, which llama.cpp never quantizes, even if it is stored with
    more dimensions, as confidence heads are."""
    return all(n == 1 for n in shape[:-1])


def _has_choice(name: str, shape: Sequence[int]) -> bool:
    """Return True if the type of a tensor can be chosen: it is a matrix, and not of a router."""
    return not _is_vector(shape) and not name.endswith(ROUTER_WEIGHT) and not never_quantized(name)


def never_quantized(name: str) -> bool:
    """True if a tensor is not quantized in quantized files."""
    return not name.endswith("weight") or name.endswith(NEVER_QUANTIZED)


def _layer(name: str) -> int:
    found = re.match(r"blk\.(\d+)\.", name)
    return int(found[1]) if found else -1
