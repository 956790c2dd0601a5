"""Checkpoints whose weights are quantized already: compressed-tensors, GPTQ and AutoRound, FP8.

Such a weight is stored as several tensors (codes, scales, zero points). They become one tensor:

- Integer codes with one scale per group of 32 values (or a multiple) are what Q4_0, Q4_1 and Q8_0
  hold. If every scale is exact in half precision, the codes and scales are copied into that type,
  whatever type was requested: nothing is lost, and a larger type could gain nothing.
- Everything else, mainly FP8, is dequantized to F32 and then stored in the requested type. The plan
  says so and reports the error.

Code widths and group sizes are derived from the shapes of the tensors, so checkpoints that mix them
can be read. Sizes in config.json count where they fit: the last group of a row may be shorter.

Sources: llama.cpp `conversion/base.py` (dequant_model), compressed-tensors `pack_quantized`,
AutoRound's `auto_gptq` packing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from g4spec.convert import quant_methods
from g4spec.convert.experts import stacked
from g4spec.convert.integer_codes import IntegerCodes, float_tensor
from g4spec.convert.tensors import StoredTensor
from g4spec.errors import InputError, Unsupported
from g4spec.quant import Format, Unrepresentable
from g4spec.quant.format import Bytes, Floats

SAMPLE = 16
"""Number of rows on which the error of a type is measured."""


def unpack(
    config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint with the parts of each quantized weight joined.

    Args:
        config: the parsed config.json of the checkpoint.

    Raises Unsupported for an unknown quantization method.
    """
    out = dict(tensors)
    # Who needs no weights, as a draft of its target, may have any quantization.
    settings = quant_methods.settings(config) if tensors else None
    if settings is not None:
        for name in tensors:
            for ending, make in READERS.items():
                if name.endswith(ending):
                    make(name.removesuffix(ending), out, settings)
    else:
        quant_methods.refuse_unnamed(tensors)
    return stacked(out)


def loss_note(tensor: StoredTensor, form: Format) -> str:
    """Return the plan's note about a tensor that is quantized in its source and stored as `form`.

    It includes the relative error, measured on a few rows, if storing loses precision. Empty for
    tensors that are not quantized in their source.
    """
    settings = tensor.format
    if not tensor.note or settings is form or settings is None or form.name == "f32":
        return tensor.note
    rows = prod(tensor.shape[:-1])
    raw = np.concatenate([tensor.rows(i, i + 1) for i in range(0, rows, max(1, rows // SAMPLE))])
    want = settings.dequantize(raw)
    try:
        lost = form.dequantize(form.quantize(want)) - want
    except Unrepresentable:
        return tensor.note  # writing the tensor raises an error with the position
    error = np.sqrt(np.square(lost, dtype=np.float64).sum() / max(np.square(want).sum(), 1e-30))
    return f"{tensor.note}; relative error as {form.name.upper()} {error:.2%}"


def _plain_values(tensor: StoredTensor, where: Any) -> NDArray[Any]:
    """Return a slice of an unquantized tensor; floats as float32, 8-bit types as raw bytes."""
    kinds = {
        "BF16": "<u2",
        "F16": "<f2",
        "F32": "<f4",
        "F64": "<f8",
        "I32": "<i4",
        "I64": "<i8",
        "I8": "u1",
        "U8": "u1",
        "F8_E4M3": "u1",
        "F8_E5M2": "u1",
    }
    if tensor.dtype not in kinds:
        raise InputError(f"{tensor.name}: type {tensor.dtype} is not expected there")
    kind = kinds[tensor.dtype]
    if isinstance(where, slice) and len(tensor.shape) == 2:
        first, last, _ = where.indices(tensor.shape[0])
        x: NDArray[Any] = tensor.rows(first, max(first, last)).view(kind)
    else:
        x = tensor.raw.view(kind).reshape(tensor.shape)[where]
    if tensor.dtype == "BF16":
        return (x.astype("<u4") << 16).view("<f4")
    return x.astype(np.float32) if tensor.dtype in ("F16", "F32", "F64") else x


def _pop_parts(out: dict[str, StoredTensor], base: str, *endings: str) -> list[StoredTensor]:
    """Remove these tensors of a weight from `out` and return them; InputError if one is missing."""
    missing = [base + e for e in endings if base + e not in out]
    if missing:
        raise InputError(f"{base}: parts of the quantized weight are missing", found=missing)
    return [out.pop(base + e) for e in endings]


def _unpacked(words: NDArray[np.int32], bits: int, axis: int, plus: int = 0) -> NDArray[np.uint8]:
    """Unpack codes from 32-bit words [n, m] along `axis`, lowest bits first. `plus`: added to each
    word before, modulo 2^32."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    unsigned = words.astype(np.uint32) + np.uint32(plus)
    if axis == 1:
        return (
            (unsigned[:, :, None] >> shifts & (1 << bits) - 1)
            .astype(np.uint8)
            .reshape(len(words), -1)
        )
    return (
        (unsigned[:, None, :] >> shifts[:, None] & (1 << bits) - 1)
        .astype(np.uint8)
        .reshape(-1, words.shape[1])
    )


def _check(name: str, what: str, expected: Any, found: Any) -> None:
    if expected != found:
        raise InputError(f"{name}: {what}", expected=expected, found=found)


def _compressed(base: str, out: dict[str, StoredTensor], settings: Mapping[str, Any]) -> None:
    """Read compressed-tensors' "pack-quantized": codes packed along rows, zero points along
    columns."""
    size = sum(out[n].nbytes for n in (base + ".weight_packed", base + ".weight_scale") if n in out)
    words, scale, shape = _pop_parts(out, base, ".weight_packed", ".weight_scale", ".weight_shape")
    zero, index = out.pop(base + ".weight_zero_point", None), out.pop(base + ".weight_g_idx", None)
    _matrices(words, scale)
    n, k = words.shape[0], 0
    if prod(shape.shape):
        k = int(_plain_values(shape, ...).reshape(-1)[-1])
    bits = _width(base, 32 * words.shape[1], k)
    groups = scale.shape[1]
    _check(base, "rows of the scales", n, scale.shape[0])
    if zero is not None:
        _check(base, "shape of the zero points", (-(-n * bits // 32), groups), zero.shape)
    middle = np.float32(1 << (bits - 1))

    def zeros(a: int, b: int) -> Floats:
        if zero is None:
            return np.full((b - a, groups), middle, np.float32)
        per = 32 // bits
        rows = _unpacked(_plain_values(zero, slice(a // per, -(-b // per))), bits, 0)
        return rows[a % per : a % per + b - a].astype(np.float32)

    group, order = _groups(base, index, k, groups, settings)
    label = f"INT{bits} in groups of {group}"
    out[base + ".weight"] = IntegerCodes(
        (n, k),
        bits,
        group,
        label,
        lambda a, b: _unpacked(_plain_values(words, slice(a, b)), bits, 1)[:, :k],
        lambda a, b: _plain_values(scale, slice(a, b)),
        zeros,
        order,
    ).to_tensor(base + ".weight", size)


def _width(base: str, bits: int, values: int) -> int:
    """Return the width of a code, given that `values` codes take `bits` bits, padded to a word."""
    found = next((w for w in (4, 8) if -(-values // (32 // w)) * 32 == bits), None)
    if found is None:
        raise Unsupported(
            f"{base}: width of the codes",
            expected="4 or 8 bits",
            found=f"{bits} bits for {values} values",
        )
    return found


def _matrices(*tensors: StoredTensor) -> None:
    for t in tensors:
        if len(t.shape) != 2 or not prod(t.shape):
            raise InputError(f"{t.name}: shape", expected="rows and columns", found=list(t.shape))


def _groups(
    base: str, index: StoredTensor | None, k: int, count: int, settings: Mapping[str, Any]
) -> tuple[int, NDArray[np.int64] | None]:
    """Return the number of columns of a group, and the group of each of `k` columns, or None if the
    columns of a group are consecutive."""
    order = None if index is None else _plain_values(index, ...).astype(np.int64)
    if index is None or order is None or (order.shape == (k,) and (order < 0).all()):
        # compressed-tensors marks an unused index by negative numbers
        return _span(base, k, count, {wide for _, wide in _sizes(settings)}), None
    if order.shape != (k,) or order.min() < 0 or order.max() >= count:
        raise InputError(
            f"{index.name}: group of each column",
            expected=f"{k} numbers below {count}",
            found=list(order.shape),
        )
    group = max(int((order == 0).sum()), 1)
    return group, None if (order == np.arange(k) // group).all() else order


def _sizes(settings: Mapping[str, Any]) -> set[tuple[int, int]]:
    """Return the sizes of groups that the configuration names, as rows and columns."""
    groups, layers = (settings.get(key) for key in ("config_groups", "extra_config"))
    found = [settings, *(layers.values() if isinstance(layers, dict) else ())]
    for group in groups.values() if isinstance(groups, dict) else ():
        found.append(group.get("weights") if isinstance(group, dict) else None)
    out = set()
    for entry in (e for e in found if isinstance(e, dict)):
        block = entry.get("block_structure")
        if isinstance(block, str) and re.fullmatch("[0-9]{1,6}x[0-9]{1,6}", block):
            block = [int(x) for x in block.split("x")]
        for pair in ([1, entry.get("group_size")], block):
            match pair:
                case [int(rows), int(columns)] if rows > 0 and columns > 0:
                    out.add((rows, columns))
    return out


def _span(base: str, size: int, count: int, named: set[int]) -> int:
    """Return how many of `size` rows or columns share one of `count` scales.

    The last group may be shorter: 704 columns have 6 groups of 128. So the sizes `named` in the
    configuration precede an even division. Raises Unsupported if neither fits."""
    fitting = {x for x in named if -(-size // x) == count}
    if size % count == 0 and (not fitting or size // count in fitting):
        return size // count
    if len(fitting) != 1:
        raise Unsupported(
            f"{base}: size of its groups",
            expected="one that quantization_config names",
            found=f"{count} groups of {size} values",
        )
    return fitting.pop()


def _gptq(base: str, out: dict[str, StoredTensor], settings: Mapping[str, Any]) -> None:
    """Read GPTQ and AutoRound: all parts are transposed, zero points are stored minus one."""
    size = sum(out[n].nbytes for n in (base + ".qweight", base + ".scales") if n in out)
    words, zero, scale = _pop_parts(out, base, ".qweight", ".qzeros", ".scales")
    index = out.pop(base + ".g_idx", None)
    _matrices(words, zero, scale)
    groups, n = scale.shape
    bits = _width(base, 32 * zero.shape[1], n)
    k = words.shape[0] * 32 // bits
    _check(
        base,
        "columns of qweight and groups of qzeros",
        (n, groups),
        (words.shape[1], zero.shape[0]),
    )
    # GPTQModel subtracts 1 from each zero point of a word with borrow, so that 0 is not lost.
    one = sum(1 << i for i in range(0, 32, bits))
    less = 0 if settings.get("checkpoint_format") == "gptq_v2" else one

    def zeros(a: int, b: int) -> Floats:
        per = 32 // bits
        packed = _plain_values(zero, (slice(None), slice(a // per, -(-b // per))))
        columns = _unpacked(packed, bits, 1, plus=less)
        out: Floats = columns[:, a % per : a % per + b - a].T.astype(np.float32)
        return out

    group, order = _groups(base, index, k, groups, settings)
    out[base + ".weight"] = IntegerCodes(
        (n, k),
        bits,
        group,
        f"INT{bits} in groups of {group}",
        lambda a, b: _unpacked(_plain_values(words, (slice(None), slice(a, b))), bits, 0).T,
        lambda a, b: _plain_values(scale, (slice(None), slice(a, b))).T,
        zeros,
        order,
    ).to_tensor(base + ".weight", size)


def _scaled(ending: str) -> Callable[[str, dict[str, StoredTensor], Mapping[str, Any]], None]:
    """Return a reader of 8-bit weights with a separate scale: FP8, or INT8 (lossless in Q8_0)."""

    def make(base: str, out: dict[str, StoredTensor], settings: Mapping[str, Any]) -> None:
        if base + ".weight" not in out or base + ending not in out:
            return  # another layout, read by another function
        weight, scale = out[base + ".weight"], out.pop(base + ending)
        shape, size = weight.shape, weight.nbytes + scale.nbytes
        name, tall, wide = base + ".weight", *_block(base, shape, scale, settings)
        scales = _plain_values(scale, ...).reshape(-(-shape[0] // tall), -1)

        def rows(a: int, b: int) -> Floats:
            out: Floats = scales[np.arange(a, b) // tall]
            return out

        if weight.dtype == "I8":
            signed = IntegerCodes(
                (shape[0], shape[1]),
                8,
                wide,
                "INT8",
                lambda a, b: _plain_values(weight, slice(a, b)) ^ 0x80,
                rows,
                lambda a, b: np.full((b - a, scales.shape[1]), 128, np.float32),
            )
            out[name] = signed.to_tensor(name, size)
            return
        table = TABLES.get(weight.dtype)
        if table is None:
            raise Unsupported(f"{name}: {weight.dtype} with a scale", expected="F8_E4M3 or I8")

        def values(a: int, b: int) -> Floats:
            spread = np.repeat(rows(a, b), wide, axis=1)[:, : shape[1]]
            codes: Bytes = _plain_values(weight, slice(a, b))
            out: Floats = table[codes] * spread
            return out

        out[name] = float_tensor(name, shape, "FP8", values, "FP8 with scales, dequantized", size)

    return make


def _block(
    base: str, shape: tuple[int, ...], scale: StoredTensor, settings: Mapping[str, Any]
) -> tuple[int, int]:
    """Return the number of rows and of columns that share a scale."""
    if len(shape) != 2 or not prod(shape):
        raise Unsupported(f"{base}.weight: scale for a tensor of shape {list(shape)}")
    count, (n, k) = prod(scale.shape), shape
    if count == 1:
        return n, k
    if scale.shape in ((n,), (n, 1)):  # blocks of k values have as many scales as rows, too
        return 1, k
    _matrices(scale)
    sizes = settings.get("weight_block_size")
    if isinstance(sizes, list) and len(sizes) == 2 and all(type(x) is int for x in sizes):
        tall, wide = (max(x, 1) for x in sizes)
    else:
        named = _sizes(settings)
        tall = _span(base, n, scale.shape[0], {rows for rows, _ in named})
        wide = _span(base, k, scale.shape[1], {columns for _, columns in named})
    _check(base, "shape of the scales", [-(-n // tall), -(-k // wide)], list(scale.shape))
    return tall, wide


def _e4m3() -> Floats:
    code = np.arange(256)
    exponent, fraction = code >> 3 & 15, code & 7
    value = np.where(
        exponent == 0, fraction / 8 * 2.0**-6, (1 + fraction / 8) * 2.0 ** (exponent - 7.0)
    )
    value[code & 127 == 127] = np.nan
    return np.where(code >= 128, -value, value).astype(np.float32)


TABLES = {
    "F8_E4M3": _e4m3(),
    "F8_E5M2": (np.arange(256, dtype="<u2") << 8).view("<f2").astype(np.float32),
}
"""Value of each FP8 code."""
READERS: dict[str, Callable[[str, dict[str, StoredTensor], Mapping[str, Any]], None]] = {
    ".weight_packed": _compressed,
    ".qweight": _gptq,
    ".weight_scale": _scaled(".weight_scale"),
    ".weight_scale_inv": _scaled(".weight_scale_inv"),
}
"""Suffix of a tensor name that marks a quantized weight -> function that joins its parts."""
