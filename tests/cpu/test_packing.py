"""Packed weights contain every bit of the file's weights, where the kernels expect it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.resources import files

import numpy as np
import pytest
import torch

from g4spec import quant
from g4spec.errors import Unsupported
from g4spec.measure import synthetic
from g4spec.quant import codebook
from g4spec.quant.formats import mxfp4, nvfp4
from g4spec.runtime.cuda.build import nvrtc
from g4spec.runtime.cuda.step import gemm_tiles
from g4spec.runtime.cuda.weights import held, held_size, packing
from tests.support.quant_blocks import random_blocks

SHAPES = [(128, 256), (200, 768), (1, 256), (129, 64), (300, 192)]
CASES = [
    (name, n, k) for name in packing.PARTS for n, k in SHAPES if k % quant.get(name).block == 0
]


def random_bytes(name: str, n: int, k: int, seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.integers(0, 256, (n, held_size.row_bytes(name, k)), np.uint8))


@pytest.mark.parametrize(("name", "n", "k"), CASES)
def test_packing_and_unpacking_keep_all_bytes(name: str, n: int, k: int) -> None:
    raw = random_bytes(name, n, k)
    unit = packing.unit_of(name, k)
    packed = packing.pack(name, raw, unit)
    assert packed.shape == (-(-n // 128), k // unit, packing.unit_bytes(name, unit))
    assert packed.numel() == -(-n // 128) * 128 * raw.shape[1]
    assert torch.equal(packing.unpack(name, packed, unit, n), raw)


@pytest.mark.parametrize("name", packing.PARTS)
def test_packing_in_chunks_gives_the_same_bytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = random_bytes(name, 700, 512)
    whole = packing.pack(name, raw, 256)
    monkeypatch.setattr(packing, "CHUNK", 2 * 128 * 512)
    assert torch.equal(packing.pack(name, raw, 256), whole)
    assert torch.equal(packing.unpack(name, whole, 256, 700), raw)


@pytest.mark.parametrize("name", packing.PARTS)
def test_parts_are_aligned(name: str) -> None:
    for unit in packing.units_of(name):
        assert all(part.nbytes(unit) % 16 == 0 for part in packing.PARTS[name][1])


def test_types_and_shapes_without_a_packing_are_refused() -> None:
    with pytest.raises(Unsupported, match="F16"):
        packing.unit_of("f16", 256)
    with pytest.raises(Unsupported, match="96 columns"):
        packing.unit_of("q8_0", 96)


FIVES = (
    ((0, 0, 0), (0, 0, 1), (0, 1, 0)),
    ((1, 0, 0), (1, 0, 1), (1, 1, 0)),
    ((2, 0, 0), (2, 0, 1), (2, 1, 0)),
    ((3, 0, 0), (3, 0, 1), (3, 1, 1)),
    ((3, 1, 0), (0, 1, 1), (1, 1, 1)),
)
"""The codes of each of a lane's words of 5-bit codes; the upper bits are those of (2, 1, 1)."""


READ = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q6_k", "q4_k", "q5_k")
"""Types that `Unit` reads; `NumberUnit` reads those of `TABLES`."""


class Unit:
    """A packed unit, read value by value as the layout is specified. It shares only the order of
    the parts with the code under test."""

    def __init__(self, name: str, unit: int, data: bytes) -> None:
        assert name in READ, f"add {name} to TABLES, or to READ and to what Unit reads"
        self.name, self.unit, self.data = name, unit, data
        self.sizes = {"q": 128 * unit if name == "q8_0" else 64 * unit}
        self.sizes["bits"] = {"5": 16, "6": 32}.get(name[1], 0) * unit
        self.head = self.sizes["q"] + self.sizes["bits"]

    def u32(self, at: int) -> int:
        return int.from_bytes(self.data[at : at + 4], "little")

    def half(self, at: int) -> np.float32:
        return np.frombuffer(self.data, "<f2", 1, at)[0].astype(np.float32)

    def code(self, row: int, k: int) -> int:
        tile, r = divmod(row, 16)
        k64, j, t, e = k // 64, k // 16 % 4, k // 4 % 4, k % 4
        lane, h, count = (r % 8) * 4 + t, r // 8, self.unit // 64
        if self.name == "q8_0":
            k32, k16 = k // 32, k // 16 % 2
            word = (((tile * (self.unit // 32) + k32) * 32 + lane) * 2 + k16) * 2 + e // 2
            return self.data[4 * word + 2 * h + e % 2] - 128
        if self.name[1] == "5":
            return self.five_bit_code(
                (tile * count + k64) * 32 + lane, (j, e // 2, h), 16 * (e % 2)
            )
        word = self.u32(4 * (((tile * count + k64) * 32 + lane) * 4 + j))
        low = word >> {0: 0, 1: 16, 2: 8, 3: 24}[e] + 4 * h & 15
        return low | self.upper((tile * count + k64) * 32 + lane, j, h, e) << 4

    def upper(self, at: int, j: int, h: int, e: int) -> int:
        high = 16 * (e % 2)
        if self.name == "q6_k":
            word = self.u32(self.sizes["q"] + 4 * (2 * at + j // 2))
            fields = {
                0: {(0, 0): 4, (0, 1): 12, (1, 0): 2, (1, 1): 10},
                1: {(0, 0): 6, (0, 1): 14, (1, 0): 0, (1, 1): 8},
            }
            return word >> fields[j % 2][h, e // 2] + high & 3
        return 0

    def five_bit_code(self, lane: int, code: tuple[int, int, int], half: int) -> int:
        """Return a code of a lane's five words. `code`: k16 step, pair of columns, half of the
        tile; `half`: first bit of its column's half of a word."""
        words = [self.u32(4 * (4 * lane + i)) for i in range(4)]
        words.append(self.u32(self.sizes["q"] + 4 * lane))
        if code == (2, 1, 1):
            return sum((word >> 15 + half & 1) << i for i, word in enumerate(words))
        for word, codes in zip(words, FIVES, strict=True):
            if code in codes:
                return word >> 5 * codes.index(code) + half & 31
        raise AssertionError(code)

    def plane(self, row: int, k: int, which: int = 0) -> np.float32:
        warp, q, g = row // 32, row // 8 % 4, row % 8
        at = self.head + which * self.unit // 32 * 256
        return self.half(at + 2 * (((k // 32 * 4 + warp) * 8 + g) * 4 + q))

    def six_bits(self, at: int, i: int, minimum: int) -> int:
        """Return number i of the scales or minima of Q4_K and Q5_K."""
        words, half = [self.u32(at + 4 * w) >> i % 2 * 16 for w in range(3)], i // 2
        if half < 3:
            return words[half] >> 6 * minimum & 63
        return words[minimum] >> 12 & 15 | (words[2] >> 12 + 2 * minimum & 3) << 4

    def value(self, row: int, k: int) -> np.float32:
        code = np.float32(self.code(row, k))
        if self.name == "q8_0":
            return code * self.plane(row, k)
        if self.name in ("q4_0", "q5_0"):
            return (code - np.float32({"4": 8, "5": 16}[self.name[1]])) * self.plane(row, k)
        if self.name in ("q4_1", "q5_1"):
            return code * self.plane(row, k) + self.plane(row, k, 1)
        if self.name == "q6_k":
            scale = np.frombuffer(self.data, np.int8, 1, self.head + 16 * row + k // 16)[0]
            d = self.half(self.head + 16 * 128 + 2 * row)
            return d * np.float32(scale) * (code - np.float32(32))
        at = self.head + 16 * row
        scale, least = (np.float32(self.six_bits(at + 4, k // 32, which)) for which in (0, 1))
        return self.half(at) * scale * code - self.half(at + 2) * least


class NumberUnit(Unit):
    """A packed unit of a type whose codes are indices of a table."""

    def __init__(self, name: str, unit: int, data: bytes) -> None:
        self.name, self.unit, self.data = name, unit, data
        self.bits, self.table, self.share = TABLES[name]
        self.head = 16 * self.bits * unit

    def code(self, row: int, k: int) -> int:
        tile, r = divmod(row, 16)
        k64, j, t, e = k // 64, k // 16 % 4, k // 4 % 4, k % 4
        lane, place = (tile * (self.unit // 64) + k64) * 32 + r % 8 * 4 + t, [0, 4, 16, 20][e]
        place += r // 8 * 8
        if self.name == "q3_k":
            return self.dense_code(lane, 2 * j + r // 8, e // 2, e % 2 * 16)
        if self.bits == 4:
            word = self.u32(4 * (4 * lane + j))
            if self.name == "iq3_s":
                return word >> e % 2 * 16 + e // 2 * 8 + r // 8 * 4 & 15
            code = word >> place & 15
            return code % 8 * 2 + code // 8 if self.name.startswith("iq4") else code
        low = self.u32(4 * (2 * lane + j // 2)) >> place + j % 2 * 2 & 3
        high = self.u32(32 * self.unit + 4 * lane) >> place + j & 1 if self.bits == 3 else 0
        return low | high << 2

    def dense_code(self, lane: int, i: int, e1: int, half: int) -> int:
        words = [self.u32(8 * lane), self.u32(8 * lane + 4), self.u32(32 * self.unit + 4 * lane)]
        if i + e1 == 0:
            return sum(word >> half & 1 << bit for bit, word in enumerate(words))
        word = words[(i - 1 if e1 == 0 else i + 1) % 3]
        return (word << 32 | word) >> half + i + 8 * e1 & 7

    def value(self, row: int, k: int) -> np.float32:
        code = np.float32(self.table[self.code(row, k)])
        at = self.head
        if self.name in ("iq4_nl", "tq1_0", "tq2_0"):
            return code * self.half(at + (k // quant.get(self.name).block * 128 + row) * 2)
        if self.name == "mxfp4":
            return code * mxfp4.power(np.uint8([self.data[at + k // 32 * 128 + row]]))[0]
        if self.name == "nvfp4":
            own = at + (k // 64 * 128 + row) * 8
            factor = np.frombuffer(self.data, np.float32, 1, own + 4)[0]
            return code * nvfp4.HALF_SCALES[self.data[own + k // 16 % 4]] * factor
        if self.name == "iq4_xs":
            first, second = self.u32(at + row * 8), self.u32(at + row * 8 + 4)
            scales = [*(second >> 6 * i for i in range(5)), first >> 16, first >> 22]
            scales.append(first >> 28 | second >> 30 << 4)
            scale = scales[k // 32] & 63
            return self.half(at + row * 8) * np.float32(scale - 32) * code
        if self.name == "q2_k":
            scale, d = self.data[at + row * 16 + k // 16], at + 2048 + row * 4
            least = self.half(d + 2) * np.float32(scale >> 4)
            return self.half(d) * np.float32(scale & 15) * code - least
        size = packing.PARTS[self.name][0]["scale"].itemsize
        if self.name == "iq3_s":
            scale = 2 * (self.u32(at + row * size) >> k // 32 % 2 * 16 + k // 64 * 4 & 15) + 1
        elif self.name == "iq3_xxs":
            scale = 2 * (self.data[at + row * size + k // 64] >> k // 32 % 2 * 4 & 15) + 1
        else:
            scale = np.int8(np.uint8(self.data[at + row * size + k * size // 256]))
        d = self.half(at + 128 * size + row * 2)
        return d * np.float32(scale) * code / np.float32(self.share)


_SIGNED = {
    name: [*kinds, *(-k for k in kinds)]
    for name, kinds in (
        ("iq3_xxs", codebook.GRIDS["iq3_xxs"][2]),
        ("iq2", (8, 25, 43, 0)),
    )
}
_IQ1 = [-7, 1, 9, 0, -9, -1, 7, 0]
TABLES: dict[str, tuple[int, Sequence[float], int]] = {
    "iq4_nl": (4, codebook.LINEAR_4.tolist(), 1),
    "iq4_xs": (4, codebook.LINEAR_4.tolist(), 1),
    "mxfp4": (4, codebook.E2M1.tolist(), 1),
    "nvfp4": (4, codebook.E2M1.tolist(), 1),
    "iq3_s": (4, [*range(-15, 16, 2)], 1),
    "iq3_xxs": (4, _SIGNED["iq3_xxs"], 4),
    "q3_k": (3, range(-4, 4), 1),
    "q2_k": (2, range(4), 1),
    "tq1_0": (2, range(-1, 3), 1),
    "tq2_0": (2, range(-1, 3), 1),
    **{name: (3, _SIGNED["iq2"], 8) for name in ("iq2_s", "iq2_xs", "iq2_xxs")},
    "iq1_m": (3, _IQ1, 8),
    "iq1_s": (3, _IQ1, 8),
}
"""Bits per code, table entries, and divisor of the scale."""


@pytest.mark.parametrize(
    ("name", "unit"), [(n, u) for n in packing.PARTS for u in packing.units_of(n)]
)
def test_values_are_where_the_layout_specifies(name: str, unit: int) -> None:
    rows, columns = 200, 3 * unit
    raw = random_blocks(name, rows, columns)
    expected = quant.get(name).dequantize(raw)
    factors = torch.tensor([0.375]) if name == "nvfp4" else None
    if factors is not None:
        expected *= 0.375
    packed = packing.pack(name, held.held(name, torch.from_numpy(raw), factors), unit).numpy()
    for group, u in ((0, 0), (0, 2), (1, 1)):
        kind = NumberUnit if name in TABLES else Unit
        read = kind(name, unit, packed[group, u].tobytes())
        for row in (*range(0, 17), 24, 40, 47, 64, 71):
            for k in range(unit):
                assert read.value(row, k) == expected[group * 128 + row, u * unit + k], (row, k)


def test_matrices_without_a_kernel_are_named() -> None:
    assert held_size.unpackable("q8_0", 128, 9, False) == ""
    assert held_size.unpackable("q8_0", 96, 9, True) == ""
    assert held_size.unpackable("q8_0", 96, 9, False) == "q8_0 matrices of 96 columns"
    assert held_size.unpackable("q8_0", 64, 1 << 20, False) == "q8_0 matrices of 1048576 rows"
    assert held_size.unpackable("q8_k", 256, 9, True) == "q8_k matrices"
    assert held_size.block_bytes("q8_k") == 4 * quant.get("q8_k").block
    with pytest.raises(Unsupported, match="Q8_K"):
        packing.unit_of("q8_k", 256)


def test_every_type_that_is_read_is_packed() -> None:
    quantized = {n for n, f in quant.readable().items() if f.quantized}
    assert quantized == set(packing.PARTS), "add it to PARTS of weights/packing.py"


@pytest.mark.parametrize("name", packing.PARTS)
def test_random_weights_of_synthetic_models_preserve_magnitudes(name: str) -> None:
    """A type without an entry in `_FACTORS` or `_BYTES` would have scales of random bits."""
    known = {*synthetic._FACTORS, *synthetic._BYTES}
    assert name in known, "add it to _FACTORS or _BYTES of measure/synthetic.py"
    torch.manual_seed(0)
    raw = synthetic.random_rows(quant.get(name), 16, 5120, torch.device("cpu"))
    rows = quant.get(name).dequantize(raw.numpy())
    assert 0.5 < np.sqrt(np.square(rows).sum(axis=1).mean()) < 2


@pytest.mark.parametrize("name", packing.PARTS)
def test_views_of_a_type_have_its_sizes(name: str) -> None:
    """The file of a type has its four views (formats.cuh), of blocks and units of the same size."""
    pytest.importorskip("cuda.bindings.nvrtc")
    header = f"{name}.cuh"
    kernel = "template <int... NUMBERS> __global__ void sizes() {}\n"
    sources = {"sizes.cu": f'#include "{header}"\n{kernel}'}
    path = str(files("g4spec.quant") / "formats" / header)
    sources |= {
        header if file == path else file: text for file, text in nvrtc.closure(path).items()
    }
    for unit in packing.units_of(name):
        struct, spelt = packing.format_name(name, unit), packing.spelt(name)
        form, block = quant.get(name), held_size.block_bytes(name)
        expected = {
            f"{struct}::UNIT": unit,
            f"{struct}::UNIT_BYTES": packing.unit_bytes(name, unit),
            f"{struct}::SCRATCH": gemm_tiles.scratch_of(name, unit),
            f"fragment::{struct}::UNIT": unit,
            f"fragment::{struct}::BYTES": packing.unit_bytes(name, unit),
            f"raw::{spelt}::VALUES": form.block,
            f"raw::{spelt}::BYTES": block,
            f"quad::{spelt}::BLOCK": form.block,
            f"quad::{spelt}::BYTES": block,
        }
        if name == "q6_k":
            expected["Q6KUpper::SCRATCH"] = gemm_tiles.scratch_of(name, unit, upper=True)
        built = nvrtc.compile(sources, f"sizes<{', '.join(expected)}>", "sm_80")
        found = map(int, re.findall(r"Li(\d+)E", built.symbol))
        assert dict(zip(expected, found, strict=True)) == expected, "or sizes in gemm_tiles.py"
