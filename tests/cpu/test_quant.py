"""Quant types compared with ggml's C code and gguf-py: byte for byte, except where scales are
searched."""

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
from g4spec.quant import codebook, format, sizes
from tests.support.quant_blocks import (
    BLOCKS,
    GOLDEN,
    REFERENCE_ERROR,
    random_blocks,
    relative_rms,
    tensors,
)

UNKNOWN = {f.type for f in quant.readable().values()} - {*map(int, oracle.GGMLQuantizationType)}
assert not UNKNOWN, f"gguf, with which types are compared, has no types {UNKNOWN}: get a newer one"
TYPES = {name: oracle.GGMLQuantizationType(f.type) for name, f in quant.readable().items()}
BLOCKS_OF = [name for name, f in quant.readable().items() if f.quantized]
PLAIN = ["f32", "f16", "q8_0", "bf16"]
LEGACY = {"q4_0": 8, "q4_1": 15, "q5_0": 16, "q5_1": 31}
SEARCHED = list(REFERENCE_ERROR)
NARROW = st.floats(-60000, 60000, width=32)
ANY = st.floats(allow_nan=False, allow_infinity=False, width=32, min_value=-8e6, max_value=8e6)
EDGES = st.one_of(
    NARROW,
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 7.5, 2.0**-126, 2.0**-149, -(2.0**-149)]),
    st.floats(-(2.0**-125), 2.0**-125, width=32),
    st.integers(-16, 16).map(float),
)


def reference_bytes(x: np.ndarray, name: str) -> np.ndarray:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return np.ascontiguousarray(oracle.quants.quantize(x, TYPES[name])).view(np.uint8)


def in_c(x: np.ndarray, name: str) -> bytes:
    """Quantize a block of 32 as the C reference does: one value after the other, in single
    precision, with the conversions of x86-64."""
    f, top = np.float32, {"q4_0": 15, "q5_0": 31}.get(name, LEGACY[name])
    with np.errstate(all="ignore"):
        if name.endswith("0"):
            low, largest, add = f(0), f(0), f(LEGACY[name] + 0.5)
            for v in x:
                if abs(v) > abs(largest):
                    largest = v
            d = f(largest / f(-LEGACY[name]))
            head = np.array([d], "<f2").tobytes()
        else:
            low, high, add = x[0], x[0], f(0.5)
            for v in x:
                low, high = v if v < low else low, v if v > high else high
            d = f(f(high - low) / f(top))
            head = np.array([d, low], "<f2").tobytes()
        inverse = f(1) / d if d else f(0)
        scaled = [f(f(f(v - low) * inverse) + add) for v in x]
        codes = [min(top, int(v)) if np.isfinite(v) else 0 for v in scaled]
    if top == 31:
        head += sum((c >> 4) << j for j, c in enumerate(codes)).to_bytes(4, "little")
    return head + bytes(a & 15 | (b & 15) << 4 for a, b in zip(codes[:16], codes[16:], strict=True))


def test_type_numbers_and_names_are_unique() -> None:
    """A type that can be decoded is no longer listed in `sizes`."""
    formats = [*quant.readable().values(), *sizes.FORMATS]
    assert len({f.type for f in formats}) == len({f.name for f in formats}) == len(formats)


def test_discovery() -> None:
    types = {
        "f32": 0,
        "f16": 1,
        "q4_0": 2,
        "q4_1": 3,
        "q5_0": 8,
        "q5_1": 9,
        "q8_0": 7,
        "q2_k": 10,
        "q3_k": 11,
        "q4_k": None,
        "q5_k": 16,
        "q6_k": 18,
        "iq2_xxs": 19,
        "iq2_xs": 20,
        "iq3_xxs": 23,
        "iq1_s": 24,
        "iq4_nl": 25,
        "iq3_s": 26,
        "iq2_s": 28,
        "iq4_xs": 30,
        "iq1_m": 31,
        "bf16": 32,
        "tq1_0": 36,
        "tq2_0": 37,
        "mxfp4": None,
        "nvfp4": 39,
    }
    found = {n: f.file_type for n, f in quant.readable().items()}
    assert found == types, "add the type and its file type above"
    only_read = {
        "iq2_xxs",
        "iq2_xs",
        "iq3_xxs",
        "iq1_s",
        "iq3_s",
        "iq2_s",
        "iq1_m",
        "tq1_0",
        "tq2_0",
        "mxfp4",
        "nvfp4",
    }
    assert quant.writable_names() == [n for n in types if n not in only_read], "add to only_read"
    assert quant.get("Q8_0") is quant.get("q8_0") is quant.by_type(8)


def test_every_type_that_is_written_is_compared_with_the_c_code() -> None:
    written = {name for name in quant.writable_names() if quant.get(name).quantized}
    compared = {*GOLDEN, *REFERENCE_ERROR}
    assert written == compared, "add it to GOLDEN or REFERENCE_ERROR of support/quant_blocks.py"


@pytest.mark.parametrize("name", PLAIN)
@settings(max_examples=60, deadline=None)
@given(x=arrays(np.float32, (3, 64), elements=NARROW))
def test_bytes_equal_gguf_py(name: str, x: np.ndarray) -> None:
    ours = quant.get(name).quantize(x)
    assert np.array_equal(ours, reference_bytes(x, name))
    kind = {"f32": "<f4", "f16": "<f2"}.get(name, "u1")
    expected = oracle.quants.dequantize(np.ascontiguousarray(ours).view(kind), TYPES[name])
    assert np.array_equal(quant.get(name).dequantize(ours), expected)


@settings(max_examples=100, deadline=None)
@given(x=arrays(np.float32, (2, 32), elements=ANY))
def test_q8_0_bytes_over_the_whole_range(x: np.ndarray) -> None:
    assert np.array_equal(quant.get("q8_0").quantize(x), reference_bytes(x, "q8_0"))


@pytest.mark.parametrize("name", list(GOLDEN))
def test_bytes_equal_the_c_reference(name: str) -> None:
    """Blocks one at a time, and all of them together."""
    x = np.stack(list(BLOCKS.values()))
    expected = [bytes.fromhex(text) for text in GOLDEN[name]]
    for block, (what, want) in zip(x, zip(BLOCKS, expected, strict=True), strict=True):
        assert quant.get(name).quantize(block).tobytes() == want, what
        if name in LEGACY:
            assert in_c(block, name) == want, what
    assert quant.get(name).quantize(x).tobytes() == b"".join(expected)


@pytest.mark.parametrize("name", list(LEGACY))
@settings(max_examples=100, deadline=None)
@given(x=arrays(np.float32, (3, 32), elements=EDGES))
def test_legacy_bytes_equal_c_for_edge_values(name: str, x: np.ndarray) -> None:
    got = quant.get(name).quantize(x)
    assert [row.tobytes() for row in got] == [in_c(row, name) for row in x]


@pytest.mark.parametrize("name", BLOCKS_OF)
def test_dequantization_equals_gguf_pys_to_the_last_bit(name: str) -> None:
    """Over all bit patterns, except scales that are infinite or NaN."""
    form = quant.get(name)
    raw = np.random.default_rng(5).integers(0, 256, (2048, form.block_bytes), np.uint8)
    with np.errstate(all="ignore"):
        expected = np.asarray(oracle.quants.dequantize(raw, TYPES[name]), np.float32)
        got = form.dequantize(raw)
    good = np.isfinite(expected)
    assert good.mean() > 0.9
    assert np.array_equal(got[good].view(np.uint32), expected[good].view(np.uint32))
    assert np.array_equal(np.isfinite(got), good)


@pytest.mark.parametrize("name", BLOCKS_OF)
def test_blocks_are_judged_by_their_factors(name: str) -> None:
    """A type without factors would not be scanned. No value of a block may exceed the bound from
    its factors, and no block with finite factors may contain a non-finite value."""
    form = quant.get(name)
    assert form.factors is not None
    raw = np.random.default_rng(6).integers(0, 256, (4096, form.block_bytes), np.uint8)
    with np.errstate(all="ignore"):
        factors = np.abs(form.factors.read(raw))
        values = np.abs(form.dequantize(raw)).reshape(len(raw), -1).max(axis=1)
        total = factors.sum(axis=0).astype(float)
    good = np.isfinite(factors).all(axis=0)
    assert good.mean() > 0.9 and np.isfinite(values[good]).all()
    # Types with a minimum subtract it, too, and Q8_0 files of other programs may contain -128.
    allowed = total[good] * form.factors.max_multiplier
    assert (values[good] <= 1.01 * allowed).all()
    assert (values[good] >= 0.5 * allowed / len(factors)).mean() > 0.02
    if form.factors.zero_codes is not None:
        block = bytes(2) + form.factors.zero_codes
        assert not form.dequantize(np.frombuffer(block, np.uint8)).any()


def test_codebooks_equal_gguf_pys() -> None:
    classes = {
        "iq2_xxs": "IQ2_XXS",
        "iq2_xs": "IQ2_XS",
        "iq2_s": "IQ2_S",
        "iq3_xxs": "IQ3_XXS",
        "iq3_s": "IQ3_S",
        "iq1": "IQ1_S",
    }
    assert classes.keys() == codebook.GRIDS.keys()
    for name, other in classes.items():
        theirs = getattr(oracle.quants, other)
        theirs.init_grid()
        assert np.array_equal(codebook.grid(name), theirs.grid.reshape(theirs.grid_shape)), name
    signs = np.frombuffer(oracle.quants.IQ2_XXS.ksigns, np.uint8)
    assert np.array_equal(codebook.even_signs(np.arange(128)), codebook.signs(signs))


def test_long_tensors_are_dequantized_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = random_blocks("iq3_s", 7, 512)
    whole = quant.get("iq3_s").dequantize(raw)
    monkeypatch.setattr(format, "DECODE_BATCH", 1024)
    assert np.array_equal(quant.get("iq3_s").dequantize(raw), whole)


@pytest.mark.parametrize("name", SEARCHED)
def test_searched_scales_are_as_good_as_the_c_references(name: str) -> None:
    form = quant.get(name)
    for what, x in tensors().items():
        got = relative_rms(x, form.dequantize(form.quantize(x)))
        assert got <= REFERENCE_ERROR[name][what], what


@pytest.mark.parametrize("name", SEARCHED)
@settings(max_examples=60, deadline=None)
@given(few=arrays(np.float32, 24, elements=EDGES), seed=st.integers(0, 99))
def test_searched_scales_of_edge_values(name: str, few: np.ndarray, seed: int) -> None:
    """For all values, the error stays within the type's bound, and blocks do not depend on each
    other."""
    form = quant.get(name)
    x = np.random.default_rng(seed).choice(few, (2, 256))
    raw = form.quantize(x)
    assert form.bound is not None
    allowed = form.bound(x.reshape(-1)).reshape(x.shape)
    assert (np.abs(form.dequantize(raw) - x) <= allowed).all()
    assert np.array_equal(raw[0], form.quantize(x[:1])[0])


@pytest.mark.parametrize("name", SEARCHED)
@pytest.mark.parametrize("size", [1e-3, 0.0371, 1.0, 300.0])
@pytest.mark.parametrize("spread", [1e-6, 1e-4, 5e-4, 2e-3, 1e-2])
def test_nearly_constant_groups(name: str, size: float, spread: float) -> None:
    """The sums of such a group are mostly rounding errors, which must not determine the scale."""
    form, noise = quant.get(name), np.random.default_rng(7).standard_normal((64, 256))
    x = (size * (1 + spread * noise)).astype(np.float32)
    assert form.bound is not None
    error = np.abs(form.dequantize(form.quantize(x)) - x)
    assert (error <= form.bound(x.reshape(-1)).reshape(x.shape)).all()


@pytest.mark.parametrize("name", SEARCHED)
def test_constants(name: str) -> None:
    form = quant.get(name)
    for value in (0.0, -0.0, 1.0, -1.0, 1e-3, -1e-3, 1e-30, 1e5, -1e5):
        x = np.full((1, 256), value, np.float32)
        got = form.dequantize(form.quantize(x))
        assert np.abs(got - x).max() <= abs(value) * 0.002 + 3e-5, value
    sizes = np.repeat(np.float32([1e-38, 1e-30, 1e-20, 1e-10, 1e-5, 1, 1e3, 0]), 32)[None]
    assert np.isfinite(form.dequantize(form.quantize(sizes))).all()


def test_q8_0_rounds_halves_away_from_zero_by_the_unrounded_scale() -> None:
    x = np.zeros(32, np.float32)
    x[:6] = 127, 0.5, -0.5, 2.5, np.nextafter(np.float32(0.5), np.float32(0)), -126.5
    got = quant.get("q8_0").quantize(x).view(np.int8)[2:]
    assert got[:6].tolist() == [127, 1, -1, 3, 0, -127]
    # Half precision rounds amax / 127 to a scale with which 63 steps would become 64.
    x = np.float32(0.9999) * np.arange(32, dtype=np.float32)
    c = [int(np.floor(abs(v) + 0.5)) for v in x * (np.float32(1) / (x.max() / np.float32(127)))]
    assert quant.get("q8_0").quantize(x).view(np.int8)[2:].tolist() == c


def test_q8_0_of_the_smallest_numbers() -> None:
    for scale in (0.0, 1e-30, 1e-40, 1e-45):
        x = (np.linspace(-1, 1, 32) * scale).astype(np.float32)
        assert np.array_equal(quant.get("q8_0").quantize(x), reference_bytes(x[None], "q8_0")[0])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("name", [*GOLDEN, *SEARCHED])
def test_unrepresentable_values_are_refused(name: str, bad: float) -> None:
    """The value is far beyond the first batch, to check that the index counts from the start."""
    x = np.ones((1100, 256), np.float32)
    x[1080, 40] = bad
    with pytest.raises(quant.Unrepresentable) as e:
        quant.get(name).quantize(x)
    assert e.value.index == 1080 * 256 + 40


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
def test_plain_types_refuse_non_finite_values(name: str, bad: float) -> None:
    x = np.ones((3, 5), np.float32)
    x[2, 1] = bad
    with pytest.raises(quant.Unrepresentable) as e:
        quant.get(name).quantize(x)
    assert e.value.index == 11


def test_f16_refuses_to_overflow() -> None:
    with pytest.raises(quant.Unrepresentable) as e:
        quant.get("f16").quantize(np.array([1, 65504, 65520], np.float32))
    assert e.value.index == 2


@pytest.mark.parametrize("name", quant.readable())
def test_non_finite_values_are_found_in_bytes(name: str) -> None:
    form = quant.get(name)
    if form.quantized:
        raw = np.random.default_rng(8).integers(0, 256, (3000, form.block_bytes), np.uint8)
        raw = raw.reshape(-1)
    else:
        raw = np.random.default_rng(8).integers(0, 256, 3000 * form.block_bytes, np.uint8)
    with np.errstate(all="ignore"):
        bad = np.flatnonzero(~np.isfinite(form.dequantize(raw)))
    found = form.first_not_finite(raw)
    if not len(bad):  # e.g. a scale of all possible bytes is finite
        assert found is None
        return
    assert found is not None and found.index == bad[0]
    good = raw[: bad[0] // form.block * form.block_bytes]
    assert form.first_not_finite(good) is None


def test_bf16_of_nan_and_infinity() -> None:
    bits = np.array(
        [0x7F800001, 0xFFFFFFFF, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x3F808000, 0x3F818000],
        np.uint32,
    )
    encode = quant.get("bf16").encode
    assert encode is not None
    got = encode(bits.view(np.float32)).view("<u2")
    assert [hex(v) for v in got] == [
        "0x7fc0",
        "0xffff",
        "0x7f80",
        "0xff80",
        "0x7f80",
        "0x3f80",
        "0x3f82",
    ]


@pytest.mark.parametrize("name", quant.writable_names())
def test_row_blocks_give_the_bytes_of_the_whole(name: str) -> None:
    form = quant.get(name)
    x = np.random.default_rng(0).standard_normal((37, 3 * form.block)).astype(np.float32)
    parts = [form.quantize(x[i : i + 5]) for i in range(0, 37, 5)]
    assert np.array_equal(np.concatenate(parts), form.quantize(x))
    assert form.dequantize(form.quantize(x[:0])).shape == (0, 3 * form.block)


def test_sizes_equal_gguf_pys_table() -> None:
    # gguf 0.19.0 is older than the C code: it has another size for these types, or none.
    differs = {"q8_1", "q2_0"}
    for number, (block, size) in oracle.GGML_QUANT_SIZES.items():
        form = quant.by_type(int(number))
        assert form.name == number.name.lower()
        if form.name not in differs:
            assert (form.block, form.block_bytes) == (block, size), form.name


def test_errors_name_the_tensor_and_the_type(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"blk.0.w.*multiple of 32.*48"):
        quant.get("q8_0").nbytes((2, 48), "blk.0.w")
    with pytest.raises(Unsupported, match=r"blk.0.w.*45.*forks"):
        quant.by_type(45, "blk.0.w")
    monkeypatch.setattr(quant, "_by_type", dict)  # as if all types were newer than this package
    with pytest.raises(Unsupported, match=r"type number 8.*Update g4spec.*Q8_0"):
        quant.by_type(8)
    with pytest.raises(UsageError, match="q9"):
        quant.get("q9")
    with pytest.raises(Unsupported, match="IQ2_XS"):
        quant.get("iq2_xs").quantize(np.zeros((1, 256), np.float32))
    with pytest.raises(InputError, match="multiple of 256"):
        quant.get("q4_k").quantize(np.zeros((1, 96), np.float32))
