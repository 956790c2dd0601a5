"""Checkpoints whose weights are quantized already: compressed-tensors, GPTQ and AutoRound, FP8.

Such a weight lies in several tensors (codes, scales, zero points). Here it becomes one again:

- Integer codes with a scale for groups of 32 values (or multiples) are what Q4_0, Q4_1 and Q8_0
  hold. If every scale is a half-precision number the weight is moved there bit by bit, whatever
  type was asked for: nothing is lost, and nothing could be gained.
- Everything else, FP8 above all, is multiplied out to F32 and then stored in the type asked for.
  The plan says so, and how large the error is.

Widths and groups follow from the shapes of the tensors, not from the configuration, so that
checkpoints that mix them are read as well.

Sources: llama.cpp `conversion/base.py` (dequant_model), compressed-tensors `pack_quantized`,
AutoRound's `auto_gptq` packing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from g4spec import quant
from g4spec.convert.experts import stacked
from g4spec.convert.tensors import BLOCK_VALUES, LazyTensor, RowReader, StoredTensor
from g4spec.errors import InputError, Unsupported
from g4spec.quant import Format, Unrepresentable
from g4spec.quant.format import Bytes, Floats

METHODS = ("compressed-tensors", "gptq", "auto-round", "auto_round", "fp8", "fbgemm_fp8")
FORMATS = (
    "pack-quantized",
    "int-quantized",
    "naive-quantized",
    "float-quantized",
    "dense",
    "mixed-precision",
)
BLOCK = 32
SAMPLE = 16
"""RowReader from which the error of a type is told."""


def unpack(
    config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint with quantized ones put together.

    Args:
        config: its config.json.

    Raises Unsupported for a way of quantizing that is not known.
    """
    text = config.get("text_config")
    inner = text.get("quantization_config") if isinstance(text, dict) else None
    settings = config.get("quantization_config") or inner
    out = dict(tensors)
    if isinstance(settings, dict):
        _check_method(settings)
        for name in tensors:
            for ending, make in READERS.items():
                if name.endswith(ending):
                    make(name.removesuffix(ending), out, settings)
    return stacked(out)


def _check_method(settings: Mapping[str, Any]) -> None:
    method, form = settings.get("quant_method"), settings.get("format")
    packing = str(settings.get("packing_format", "auto_gptq"))
    if method not in METHODS or (method == "compressed-tensors" and form not in FORMATS):
        raise Unsupported(
            "config.json: quantization_config",
            found=f"{method} {form or ''}",
            expected=f"one of {', '.join(METHODS)}",
            fix="convert from the checkpoint that was not quantized",
        )
    if not packing.endswith("gptq"):
        raise Unsupported("config.json: packing_format", expected="auto_gptq", found=packing)


@dataclass(frozen=True, slots=True)
class IntegerCodes:
    """Integer codes: a value is scale * (code - zero).

    Attributes:
        shape: [N, K]. `bits`: of a code. `label`: what it is, for people.
        group: values of a row with one scale, neighbours unless `order` says otherwise.
        codes: codes of rows, [n, K] uint8. `scales`, `zeros`: float32 [n, groups].
        order: group of each column, [K], where they are not neighbours.
    """

    shape: tuple[int, int]
    bits: int
    group: int
    label: str
    codes: RowReader
    scales: RowReader
    zeros: RowReader
    order: NDArray[np.int64] | None = None

    def values(self, a: int, b: int) -> Floats:
        """RowReader a .. b - 1 as float32."""
        spread = (
            (lambda x: x[:, self.order])
            if self.order is not None
            else (lambda x: np.repeat(x, self.group, axis=1)[:, : self.shape[1]])
        )
        out: Floats = spread(self.scales(a, b)) * (self.codes(a, b) - spread(self.zeros(a, b)))
        return out

    def lossless_type(self) -> Format | None:
        """The type that holds all of it exactly, or None."""
        if self.group % BLOCK or self.shape[1] % BLOCK or self.order is not None:
            return None
        middle, halves = 1 << (self.bits - 1), True
        for a, b in _row_blocks(self.shape):
            scales, zeros = self.scales(a, b), self.zeros(a, b)
            if not _half(scales):
                return None
            if not (zeros == middle).all():
                halves = False
                if self.bits != 4 or not _half(-zeros * scales):
                    return None
        return quant.get("q8_0" if self.bits == 8 else "q4_0" if halves else "q4_1")

    def blocks(self, form: Format, a: int, b: int) -> Bytes:
        """RowReader a .. b - 1 as blocks of `form`, which holds them exactly."""
        n, count = b - a, self.shape[1] // BLOCK
        scales = np.repeat(self.scales(a, b), self.group // BLOCK, axis=1)
        codes = self.codes(a, b).reshape(n, count, BLOCK)
        heads = [scales]
        if form.name == "q4_1":
            heads.append(np.repeat(-self.zeros(a, b), self.group // BLOCK, axis=1) * scales)
        if form.name == "q8_0":
            body = (codes ^ 0x80).astype(np.uint8)
        else:
            body = codes[..., : BLOCK // 2] | codes[..., BLOCK // 2 :] << 4
        head = [h[..., None].astype("<f2").view(np.uint8) for h in heads]
        out: Bytes = np.concatenate([*head, body], axis=-1).reshape(n, -1)
        return out

    def packed(self, name: str, size: int) -> LazyTensor:
        """As a tensor, exact if a type holds it."""
        form = self.lossless_type()
        if form is None:
            note = f"{self.label}: no type holds them exactly, multiplied out"
            return _floats(name, self.shape, self.label, self.values, note, size)
        return LazyTensor(
            name,
            self.shape,
            self.label,
            form,
            lambda a, b: self.blocks(form, a, b),
            f"{self.label}, exact",
            size,
        )


def _half(x: Floats) -> bool:
    """Whether half precision holds all of these numbers."""
    with np.errstate(over="ignore"):
        return bool((x.astype(np.float16).astype(np.float32) == x).all())


def _floats(
    name: str, shape: tuple[int, ...], label: str, values: RowReader, note: str, size: int
) -> LazyTensor:
    def read(a: int, b: int) -> Bytes:
        out: Bytes = np.ascontiguousarray(values(a, b), np.float32).view(np.uint8)
        return out

    return LazyTensor(name, shape, label, quant.get("f32"), read, note, size)


def loss_note(tensor: StoredTensor, form: Format) -> str:
    """What the plan says about a tensor that was quantized in its source, now stored as `form`;
    where it loses something, how much, measured on a few rows. Empty for other tensors."""
    settings = tensor.format
    if not tensor.note or settings is form or settings is None or form.name == "f32":
        return tensor.note
    rows = prod(tensor.shape[:-1])
    raw = np.concatenate([tensor.rows(i, i + 1) for i in range(0, rows, max(1, rows // SAMPLE))])
    want = settings.dequantize(raw)
    try:
        lost = form.dequantize(form.quantize(want)) - want
    except Unrepresentable:
        return tensor.note  # writing it says where and what
    error = np.sqrt(np.square(lost, dtype=np.float64).sum() / max(np.square(want).sum(), 1e-30))
    return f"{tensor.note}; relative error as {form.name.upper()} {error:.2%}"


def _row_blocks(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    rows, step = prod(shape[:-1]), max(1, BLOCK_VALUES // max(shape[-1], 1))
    return ((a, min(a + step, rows)) for a in range(0, rows, step))


def _plain_values(tensor: StoredTensor, where: Any) -> NDArray[Any]:
    """Part of a tensor of plain numbers; floats as float32."""
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
    """These parts of a weight, which are then gone; InputError if one is missing."""
    missing = [base + e for e in endings if base + e not in out]
    if missing:
        raise InputError(f"{base}: parts of the quantized weight are missing", found=missing)
    return [out.pop(base + e) for e in endings]


def _unpacked(words: NDArray[np.int32], bits: int, axis: int) -> NDArray[np.uint8]:
    """Codes out of 32-bit words, lowest bits first, along `axis` of [n, m]."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    words = words.astype(np.uint32)
    if axis == 1:
        return (
            (words[:, :, None] >> shifts & (1 << bits) - 1).astype(np.uint8).reshape(len(words), -1)
        )
    return (
        (words[:, None, :] >> shifts[:, None] & (1 << bits) - 1)
        .astype(np.uint8)
        .reshape(-1, words.shape[1])
    )


def _check(name: str, what: str, expected: Any, found: Any) -> None:
    if expected != found:
        raise InputError(f"{name}: {what}", expected=expected, found=found)


def _compressed(base: str, out: dict[str, StoredTensor], settings: Mapping[str, Any]) -> None:
    """compressed-tensors' "pack-quantized": codes along the row, zero points down the column."""
    size = sum(out[n].nbytes for n in (base + ".weight_packed", base + ".weight_scale") if n in out)
    words, scale, shape = _pop_parts(out, base, ".weight_packed", ".weight_scale", ".weight_shape")
    zero, index = out.pop(base + ".weight_zero_point", None), out.pop(base + ".weight_g_idx", None)
    _matrices(words, scale)
    n, k = (
        words.shape[0],
        int(_plain_values(shape, ...).reshape(-1)[-1]) if prod(shape.shape) else 0,
    )
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

    group = -(-k // groups)
    label = f"INT{bits} in groups of {group}"
    out[base + ".weight"] = IntegerCodes(
        (n, k),
        bits,
        group,
        label,
        lambda a, b: _unpacked(_plain_values(words, slice(a, b)), bits, 1)[:, :k],
        lambda a, b: _plain_values(scale, slice(a, b)),
        zeros,
        _order(index, k, groups),
    ).packed(base + ".weight", size)


def _width(base: str, bits: int, values: int) -> int:
    """Bits of a code, when `values` of them take `bits` with the last word filled up."""
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


def _order(index: StoredTensor | None, k: int, groups: int) -> NDArray[np.int64] | None:
    """The group of each of `k` columns, None if neighbours share one."""
    if index is None:
        return None
    order = _plain_values(index, ...).astype(np.int64)
    if order.shape == (k,) and (order < 0).all():
        return None  # compressed-tensors' mark for "not used"
    if order.shape != (k,) or order.min() < 0 or order.max() >= groups:
        raise InputError(
            f"{index.name}: group of each column",
            expected=f"{k} numbers below {groups}",
            found=list(order.shape),
        )
    return None if (order == np.arange(k) // -(-k // groups)).all() else order


def _gptq(base: str, out: dict[str, StoredTensor], settings: Mapping[str, Any]) -> None:
    """GPTQ and AutoRound: everything stands transposed, and zero points are stored minus one."""
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
    one = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1

    def zeros(a: int, b: int) -> Floats:
        per = 32 // bits
        columns = _unpacked(
            _plain_values(zero, (slice(None), slice(a // per, -(-b // per)))), bits, 1
        )
        out: Floats = columns[:, a % per : a % per + b - a].T.astype(np.float32)
        return np.add(out, one, dtype=np.float32)

    group = -(-k // groups)
    out[base + ".weight"] = IntegerCodes(
        (n, k),
        bits,
        group,
        f"INT{bits} in groups of {group}",
        lambda a, b: _unpacked(_plain_values(words, (slice(None), slice(a, b))), bits, 0).T,
        lambda a, b: _plain_values(scale, (slice(None), slice(a, b))).T,
        zeros,
        _order(index, k, groups),
    ).packed(base + ".weight", size)


def _scaled(ending: str) -> Callable[[str, dict[str, StoredTensor], Mapping[str, Any]], None]:
    """Whole-byte weights beside a scale: FP8, or INT8 (which is what Q8_0 holds)."""

    def make(base: str, out: dict[str, StoredTensor], settings: Mapping[str, Any]) -> None:
        if base + ".weight" not in out or base + ending not in out:
            return  # packed in another way
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
            out[name] = signed.packed(name, size)
            return
        table = TABLES.get(weight.dtype)
        if table is None:
            raise Unsupported(f"{name}: {weight.dtype} with a scale", expected="F8_E4M3 or I8")

        def values(a: int, b: int) -> Floats:
            spread = np.repeat(rows(a, b), wide, axis=1)[:, : shape[1]]
            codes: Bytes = _plain_values(weight, slice(a, b))
            out: Floats = table[codes] * spread
            return out

        out[name] = _floats(name, shape, "FP8", values, "FP8 with scales, multiplied out", size)

    return make


def _block(
    base: str, shape: tuple[int, ...], scale: StoredTensor, settings: Mapping[str, Any]
) -> tuple[int, int]:
    """RowReader and columns that share a scale."""
    if len(shape) != 2 or not prod(shape):
        raise Unsupported(f"{base}.weight: a scale beside a tensor of shape {list(shape)}")
    count, (n, k) = prod(scale.shape), shape
    if count == 1:
        return n, k
    if count == n:
        return 1, k
    _matrices(scale)
    sizes = settings.get("weight_block_size")
    if isinstance(sizes, list) and len(sizes) == 2 and all(type(x) is int for x in sizes):
        tall, wide = (max(x, 1) for x in sizes)
    else:
        tall, wide = (-(-size // max(m, 1)) for size, m in zip(shape, scale.shape, strict=True))
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
"""Ending of the tensor that gives a quantized weight away -> how its parts become one."""
