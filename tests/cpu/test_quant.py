"""Quant types hold to gguf-py's, which holds to the C reference; the policy to its words."""

from __future__ import annotations

import warnings

import gguf as oracle
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from g4spec import quant
from g4spec.errors import InputError, Unsupported, UsageError
from g4spec.quant import policy

TYPES = {name: oracle.GGMLQuantizationType(quant.get(name).type) for name in quant.names()}
NARROW = st.floats(-60000, 60000, width=32)
ANY = st.floats(allow_nan=False, allow_infinity=False, width=32, min_value=-8e6, max_value=8e6)


def theirs(x: np.ndarray, name: str) -> np.ndarray:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return np.ascontiguousarray(oracle.quants.quantize(x, TYPES[name])).view(np.uint8)


def test_discovery() -> None:
    assert quant.names() == ["f32", "f16", "q8_0", "bf16"]
    assert [quant.get(n).file_type for n in quant.names()] == [0, 1, 7, 32]
    assert quant.get("Q8_0") is quant.get("q8_0") is quant.by_type(8)


@pytest.mark.parametrize("name", quant.names())
@settings(max_examples=60, deadline=None)
@given(x=arrays(np.float32, (3, 64), elements=NARROW))
def test_bytes_equal_gguf_py(name: str, x: np.ndarray) -> None:
    ours = quant.get(name).quantize(x)
    assert np.array_equal(ours, theirs(x, name))
    kind = {"f32": "<f4", "f16": "<f2"}.get(name, "u1")
    expected = oracle.quants.dequantize(np.ascontiguousarray(ours).view(kind), TYPES[name])
    assert np.array_equal(quant.get(name).dequantize(ours), expected)


@settings(max_examples=100, deadline=None)
@given(x=arrays(np.float32, (2, 32), elements=ANY))
def test_q8_0_bytes_over_the_whole_range(x: np.ndarray) -> None:
    assert np.array_equal(quant.get("q8_0").quantize(x), theirs(x, "q8_0"))


def test_q8_0_rounds_halves_away_from_zero_by_the_unrounded_scale() -> None:
    x = np.zeros(32, np.float32)
    x[:6] = 127, 0.5, -0.5, 2.5, np.nextafter(np.float32(0.5), np.float32(0)), -126.5
    got = quant.get("q8_0").quantize(x).view(np.int8)[2:]
    assert got[:6].tolist() == [127, 1, -1, 3, 0, -127]
    # amax / 127 rounds in half precision to a scale that would turn 63 steps into 64.
    x = np.float32(0.9999) * np.arange(32, dtype=np.float32)
    c = [int(np.floor(abs(v) + 0.5)) for v in x * (np.float32(1) / (x.max() / np.float32(127)))]
    assert quant.get("q8_0").quantize(x).view(np.int8)[2:].tolist() == c


def test_q8_0_of_the_smallest_numbers() -> None:
    for scale in (0.0, 1e-30, 1e-40, 1e-45):
        x = (np.linspace(-1, 1, 32) * scale).astype(np.float32)
        assert np.array_equal(quant.get("q8_0").quantize(x), theirs(x[None], "q8_0")[0])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_q8_0_refuses_what_it_cannot_hold(bad: float) -> None:
    x = np.ones((4, 64), np.float32)
    x[2, 40] = bad
    with pytest.raises(quant.Unrepresentable) as e:
        quant.get("q8_0").quantize(x)
    assert e.value.index == 2 * 64 + 40


def test_f16_refuses_to_overflow_but_keeps_what_was_infinite() -> None:
    x = np.array([1, np.inf, np.nan, 65504, 65520], np.float32)
    with pytest.raises(quant.Unrepresentable) as e:
        quant.get("f16").quantize(x)
    assert e.value.index == 4
    got = quant.get("f16").dequantize(quant.get("f16").quantize(x[:4]))
    assert np.array_equal(got, x[:4], equal_nan=True)


def test_bf16_of_nan_and_infinity() -> None:
    bits = np.array([0x7F800001, 0xFFFFFFFF, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x3F808000,
                     0x3F818000], np.uint32)  # fmt: skip
    got = quant.get("bf16").quantize(bits.view(np.float32)).view("<u2")
    assert [hex(v) for v in got] == ["0x7fc0", "0xffff", "0x7f80", "0xff80", "0x7f80", "0x3f80",
                                     "0x3f82"]  # fmt: skip


def test_row_blocks_give_the_bytes_of_the_whole() -> None:
    x = np.random.default_rng(0).standard_normal((37, 96)).astype(np.float32)
    for name in quant.names():
        form = quant.get(name)
        parts = [form.quantize(x[i : i + 5]) for i in range(0, 37, 5)]
        assert np.array_equal(np.concatenate(parts), form.quantize(x))


def test_sizes_equal_gguf_pys_table() -> None:
    # Known there with another size, or not at all (gguf 0.19.0 is older than the C code).
    differs = {"q8_1", "q2_0"}
    for number, (block, size) in oracle.GGML_QUANT_SIZES.items():
        form = quant.by_type(int(number))
        assert form.name == number.name.lower()
        if form.name not in differs:
            assert (form.block, form.block_bytes) == (block, size), form.name


def test_errors_name_the_tensor_and_the_type() -> None:
    with pytest.raises(InputError, match=r"blk.0.w.*multiple of 32.*48"):
        quant.get("q8_0").nbytes((2, 48), "blk.0.w")
    with pytest.raises(Unsupported, match=r"blk.0.w.*45.*forks"):
        quant.by_type(45, "blk.0.w")
    with pytest.raises(UsageError, match="q9"):
        quant.get("q9")
    with pytest.raises(Unsupported, match="Q4_K"):
        quant.get("q4_k").quantize(np.zeros((1, 256), np.float32))


@pytest.mark.parametrize(
    ("shape", "role", "expected", "why"),
    [
        ((64, 64), "matrix", "q8_0", ""),
        ((64,), "vector", "f32", "stay F32"),
        ((64,), "matrix", "f32", "stay F32"),
        ((64, 48), "matrix", "f16", "48"),
        ((64,), "index", "i64", "ids"),
        ((512, 64), "embed", "q8_0", ""),
    ],
)
def test_policy(shape: tuple[int, ...], role: policy.Role, expected: str, why: str) -> None:
    form, reason = policy.choose("blk.0.x.weight", shape, role, quant.get("q8_0"))
    assert form.name == expected and why in reason and bool(reason) == bool(why)
