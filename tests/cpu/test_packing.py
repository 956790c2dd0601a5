"""Packed weights hold every bit of the file's, where the kernels look for it."""

from __future__ import annotations

from importlib.resources import files

import numpy as np
import pytest
import torch

from g4spec import quant
from g4spec.errors import Unsupported
from g4spec.runtime.cuda.build import nvrtc
from g4spec.runtime.cuda.weights import packing
from tests.quant_blocks import random_blocks

SHAPES = [(128, 256), (200, 768), (1, 256), (129, 64), (300, 192)]
CASES = [
    (name, n, k) for name in packing.PARTS for n, k in SHAPES if k % quant.get(name).block == 0
]


def random_bytes(name: str, n: int, k: int, seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.integers(0, 256, (n, quant.get(name).row_bytes(k)), np.uint8))


@pytest.mark.parametrize(("name", "n", "k"), CASES)
def test_any_bytes_come_back(name: str, n: int, k: int) -> None:
    raw = random_bytes(name, n, k)
    unit = packing.unit_of(name, k)
    packed = packing.pack(name, raw, unit)
    assert packed.shape == (-(-n // 128), k // unit, packing.unit_bytes(name, unit))
    assert packed.numel() == -(-n // 128) * 128 * raw.shape[1]
    assert torch.equal(packing.unpack(name, packed, unit, n), raw)


@pytest.mark.parametrize("name", packing.PARTS)
def test_chunks_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = random_bytes(name, 700, 512)
    whole = packing.pack(name, raw, 256)
    monkeypatch.setattr(packing, "CHUNK", 2 * 128 * 512)
    assert torch.equal(packing.pack(name, raw, 256), whole)
    assert torch.equal(packing.unpack(name, whole, 256, 700), raw)


@pytest.mark.parametrize("name", packing.PARTS)
def test_parts_are_aligned(name: str) -> None:
    for unit in (64, 256):
        if unit % quant.get(name).block == 0:
            assert all(part.nbytes(unit) % 16 == 0 for part in packing.PARTS[name][1])


def test_types_and_shapes_without_a_packing_are_refused() -> None:
    with pytest.raises(Unsupported, match="F16"):
        packing.unit_of("f16", 256)
    with pytest.raises(Unsupported, match="96 columns"):
        packing.unit_of("q8_0", 96)


class Unit:
    """One packed unit, read value by value as the layout is specified; nothing is shared with the
    code under test but the order of the parts."""

    def __init__(self, name: str, unit: int, data: bytes) -> None:
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
        word = self.u32(4 * (((tile * count + k64) * 32 + lane) * 4 + j))
        low = word >> {0: 0, 1: 16, 2: 8, 3: 24}[e] + 4 * h & 15
        return low | self.upper((tile * count + k64) * 32 + lane, j, h, e) << 4

    def upper(self, at: int, j: int, h: int, e: int) -> int:
        high = 16 * (e % 2)
        if self.name[1] == "5":
            word = self.u32(self.sizes["q"] + 4 * at)
            first = {(0, 0): 4, (1, 0): 8, (0, 1): 0, (1, 1): 12}[h, e // 2]
            return word >> first + j + high & 1
        if self.name == "q6_k":
            word = self.u32(self.sizes["q"] + 4 * (2 * at + j // 2))
            fields = {0: {(0, 0): 4, (0, 1): 12, (1, 0): 2, (1, 1): 10},
                      1: {(0, 0): 6, (0, 1): 14, (1, 0): 0, (1, 1): 8}}  # fmt: skip
            return word >> fields[j % 2][h, e // 2] + high & 3
        return 0

    def plane(self, row: int, k: int, which: int = 0) -> np.float32:
        warp, q, g = row // 32, row // 8 % 4, row % 8
        at = self.head + which * self.unit // 32 * 256
        return self.half(at + 2 * (((k // 32 * 4 + warp) * 8 + g) * 4 + q))

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
        both = self.u32(at + 12)
        scales = self.u32(at + 4) | (both & 0xFFFF) << 32
        minima = self.u32(at + 8) | both >> 16 << 32
        scale, least = (np.float32(s >> 6 * (k // 32) & 63) for s in (scales, minima))
        return self.half(at) * scale * code - self.half(at + 2) * least


@pytest.mark.parametrize(("name", "unit"), [(n, 256) for n in packing.PARTS] +
                         [(n, 64) for n in packing.PARTS if not n.endswith("k")])  # fmt: skip
def test_values_lie_where_the_layout_says(name: str, unit: int) -> None:
    rows, columns = 200, 3 * unit
    raw = random_blocks(name, rows, columns)
    expected = quant.get(name).dequantize(raw)
    packed = packing.pack(name, torch.from_numpy(raw), unit).numpy()
    for group, u in ((0, 0), (0, 2), (1, 1)):
        read = Unit(name, unit, packed[group, u].tobytes())
        for row in (*range(0, 17), 24, 40, 47, 64, 71):
            for k in range(unit):
                assert read.value(row, k) == expected[group * 128 + row, u * unit + k], (row, k)


def test_matrices_that_no_kernel_takes_are_named() -> None:
    assert packing.unpackable("q8_0", 128, 9, False) == ""
    assert packing.unpackable("q8_0", 96, 9, True) == ""
    assert packing.unpackable("q8_0", 96, 9, False) == "q8_0 matrices of 96 columns"
    assert packing.unpackable("q8_0", 64, 1 << 20, False) == "q8_0 matrices of 1048576 rows"
    others = [n for n, f in quant.readable().items() if f.quantized and n not in packing.PARTS]
    for name in others:
        assert packing.unpackable(name, 256, 9, True) == f"{name} matrices"
        with pytest.raises(Unsupported, match=name.upper()):
            packing.unit_of(name, 256)


@pytest.mark.parametrize("name", packing.PARTS)
def test_kernels_take_units_of_the_same_size(name: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    header = f"{name}.cuh"
    sources = {"sizes.cu": f'#include "{header}"\n'
               "template <int UNIT, int BYTES> __global__ void sizes() {}\n"}  # fmt: skip
    path = str(files("g4spec.quant") / "formats" / header)
    sources |= {
        header if file == path else file: text for file, text in nvrtc.closure(path).items()
    }
    kind = name.upper().replace("_", "")
    for unit in (256,) if name.endswith("k") else (64, 256):
        struct = kind if name.endswith("k") else f"{kind}<{unit}>"
        built = nvrtc.compile(sources, f"sizes<{struct}::UNIT, {struct}::UNIT_BYTES>", "sm_80")
        assert f"Li{unit}ELi{packing.unit_bytes(name, unit)}E" in built.symbol
