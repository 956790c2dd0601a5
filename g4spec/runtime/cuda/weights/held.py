"""Quantized matrices as GPU memory holds them before they are packed.

Most types keep the blocks of the file. If codes are indices of a codebook's entries, or the bits of
scales are spread, blocks are rewritten once, on the device, so that kernels read one code per value
and one number per scale. No value changes. Such a block of 256 values has

- `q` [8, 16]: codes of 4 bits in the order of IQ4_NL, for up to 8 magnitudes and a sign (IQ3_S: for
  its 16 values in order); or
- `low` [2, 32] and `high` [32]: codes of 3 bits in the order of Q3_K, for fewer magnitudes;
- `scale`: a signed byte for each 32 or 16 values, or beside `q` 4 bits for each 32, which stand for
  2 scale + 1; `d`: the file's factor.

TQ1_0, whose bytes have five digits of base 3, is rewritten to blocks of TQ2_0. A block of NVFP4
gets the factor of its matrix (`d`, float32), which files have in a tensor of its own: kernels know
only blocks.

docs/opens.md lists the bits per weight in the file and in memory.

Without rewriting, kernels would look entries up in shared memory, once for four values. Its banks
do not allow that at the rate at which memory delivers the codes, so fewer bytes would not save
time. `include/codebook.cuh` converts codes to values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import torch

from g4spec import quant
from g4spec.quant import codebook
from g4spec.runtime.cuda.weights.held_size import BLOCKS

STEP = 1 << 24
"""Values rewritten at a time; temporaries need up to 16 bytes for each."""


Fields = Callable[..., torch.Tensor]


def held(name: str, raw: torch.Tensor, factors: torch.Tensor | None = None) -> torch.Tensor:
    """Return the file's bytes, uint8 [N, bytes of a row], as memory holds them, on the same
    device.

    Args:
        factors: float32 [M], of NVFP4: by what the values of each of M matrices of N / M rows are
            multiplied. None: 1.
    """
    if name not in BLOCKS or not raw.numel():
        return raw
    size = quant.get(name).block_bytes
    blocks = raw.view(-1, size)
    out = raw.new_empty(len(blocks), BLOCKS[name].itemsize)
    for at in range(0, len(blocks), STEP // 256):
        part = blocks[at : at + STEP // 256]
        out[at : at + len(part)] = _rewritten(name, part)
    if factors is not None:
        place = out.view(len(factors), -1, out.shape[1])[..., 4:8]
        place.copy_(factors.view(torch.uint8).view(-1, 1, 4).expand_as(place))
    return out.view(len(raw), -1)


def _rewritten(name: str, blocks: torch.Tensor) -> torch.Tensor:
    """Rewrite blocks, uint8 [n, bytes], from the file's layout to that of memory."""
    dtype = quant.block_dtype(name)

    def field(key: str) -> torch.Tensor:
        assert dtype.fields is not None
        of, start = dtype.fields[key][:2]
        return blocks[:, start : start + of.itemsize]

    return torch.cat(
        [x.reshape(len(blocks), -1).view(torch.uint8) for x in _OF[name](field)], dim=1
    )


def _words(x: torch.Tensor, size: int) -> torch.Tensor:
    """Return little-endian words of `size` bytes [n, words], unsigned, as int64."""
    x = x.reshape(len(x), -1, size).long()
    return sum((x[..., i] << 8 * i for i in range(1, size)), start=x[..., 0])


def _bits(x: torch.Tensor, count: int, width: int = 1) -> torch.Tensor:
    """Return the lowest `count` fields of `width` bits of each number: [...] -> [..., count]."""
    places = torch.arange(0, count * width, width, device=x.device)
    if x.dtype is torch.uint8:
        places = places.to(torch.uint8)
    return x[..., None] >> places & (1 << width) - 1


@cache
def _entries(grid: str, device: torch.device) -> torch.Tensor:
    """Return the entries of a codebook [entries, values], each value as its index among the
    magnitudes."""
    magnitudes = np.array(codebook.GRIDS[grid][2], np.float32)
    indices = np.searchsorted(magnitudes, codebook.grid(grid)).astype(np.uint8)
    return torch.from_numpy(indices).to(device)


def _codes(grid: str, index: torch.Tensor, minus: torch.Tensor, inverted: int) -> torch.Tensor:
    """Return codes of 256 values: magnitudes by `index` [n, entries], with the bits of `inverted`
    inverted where `minus` [n, 256]."""
    numbers = _entries(grid, index.device)[index].view(len(index), 256)
    return numbers ^ minus.to(torch.uint8).view(len(index), 256) * inverted


def _signs7(word: torch.Tensor) -> torch.Tensor:
    """Return the signs of 32 values from four indices of 7 bits in each word: [n, 8] -> [n,
    256]."""
    return _even(_bits(word, 4, 7))


def _even(index: torch.Tensor) -> torch.Tensor:
    """Return the signs of 8 values from indices of 7 bits: the eighth makes the number of minuses
    even."""
    seven = _bits(index, 7)
    return torch.cat([seven, seven.sum(-1, keepdim=True) & 1], dim=-1).flatten(1)


def _four(codes: torch.Tensor) -> torch.Tensor:
    """Return codes [n, 256] in the layout of `q`."""
    groups = codes.view(-1, 8, 2, 16)
    return groups[:, :, 0] | groups[:, :, 1] << 4


def _three(codes: torch.Tensor) -> list[torch.Tensor]:
    """Return codes [n, 256] in the layouts of `low` and `high`."""
    low = (codes & 3).view(-1, 2, 4, 32).unbind(2)
    high = (codes >> 2).view(-1, 8, 32).unbind(1)
    out = low[0] | low[1] << 2 | low[2] << 4 | low[3] << 6, high[0]
    for i in range(1, 8):
        out = out[0], out[1] | high[i] << i
    return list(out)


def _odd(scale: torch.Tensor) -> torch.Tensor:
    """Return 2 * scale + 1 as bytes."""
    return (2 * scale + 1).to(torch.uint8)


def _q3_k(f: Fields) -> list[torch.Tensor]:
    packed = f("scales")
    low, high = packed[:, :8], _bits(packed[:, 8:], 4, 2).transpose(1, 2).reshape(-1, 16)
    scale = torch.cat([low & 15, low >> 4], dim=1) | high << 4
    return [f("low"), f("high"), scale - 32, f("d")]  # bytes wrap around, as signed ones


def _iq3_s(f: Fields) -> list[torch.Tensor]:
    index = f("q").long() | _bits(f("high"), 8).flatten(1).long() << 8
    codes = _codes("iq3_s", index, _bits(f("signs"), 8), 15) ^ 8  # in the order of the values
    return [_four(codes), f("scales"), f("d")]


def _iq3_xxs(f: Fields) -> list[torch.Tensor]:
    word = _words(f("word"), 4)
    codes = _codes("iq3_xxs", f("q").long(), _signs7(word), 8)
    scale = (word >> 28).to(torch.uint8)
    return [_four(codes), scale[:, ::2] | scale[:, 1::2] << 4, f("d")]


def _iq2_s(f: Fields) -> list[torch.Tensor]:
    index = f("q").long() | _bits(f("high"), 4, 2).flatten(1).long() << 8
    codes = _codes("iq2_s", index, _bits(f("signs"), 8), 4)
    return [*_three(codes), _odd(_bits(f("scales"), 2, 4)), f("d")]


def _iq2_xs(f: Fields) -> list[torch.Tensor]:
    word = _words(f("q"), 2)
    codes = _codes("iq2_xs", word & 511, _even(word >> 9), 4)
    return [*_three(codes), _odd(_bits(f("scales"), 2, 4)), f("d")]


def _iq2_xxs(f: Fields) -> list[torch.Tensor]:
    groups = f("groups").reshape(-1, 8, 8)
    word = _words(groups[..., 4:].flatten(1), 4)
    codes = _codes("iq2_xxs", groups[..., :4].flatten(1).long(), _signs7(word), 4)
    return [*_three(codes), _odd(word >> 28), f("d")]


def _iq1_s(f: Fields) -> list[torch.Tensor]:
    word = _words(f("high"), 2)
    index = f("q").long() | _bits(word, 4, 3).flatten(1) << 8
    codes = _codes("iq1", index, (word >> 15).repeat_interleave(32, dim=1), 4)
    return [*_three(codes), _odd(word >> 12 & 7), f("d")]


def _iq1_m(f: Fields) -> list[torch.Tensor]:
    word, high = _words(f("scales"), 2), _bits(f("high"), 2, 4).flatten(1)
    index = f("q").long() | (high & 7).long() << 8
    codes = _codes("iq1", index, (high >> 3).repeat_interleave(8, dim=1), 4)
    quarters = [(word[:, i] >> 12) << 4 * i for i in range(4)]
    d = quarters[0] | quarters[1] | quarters[2] | quarters[3]
    bits = torch.stack([d & 255, d >> 8], dim=1).to(torch.uint8)
    return [*_three(codes), _odd(_bits(word, 4, 3)), bits]


def _nvfp4(f: Fields) -> list[torch.Tensor]:
    one = torch.ones(len(f("scale")), 1, dtype=torch.float32, device=f("scale").device)
    return [f("scale"), one, f("q")]


def _tq1_0(f: Fields) -> list[torch.Tensor]:
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8, device=f("q").device)
    parts = [f("q")[:, None] * powers[:, None], f("rest")[:, None] * powers[:, None]]
    parts.append(f("high")[:, None] * powers[:4, None])
    digits = torch.cat([x.flatten(1).short() * 3 >> 8 for x in parts], dim=1).to(torch.uint8)
    places = torch.arange(0, 8, 2, dtype=torch.uint8, device=digits.device)[:, None]
    return [(digits.view(-1, 2, 4, 32) << places).sum(2, dtype=torch.uint8), f("d")]


_OF: dict[str, Callable[[Fields], list[torch.Tensor]]] = {
    "q3_k": _q3_k,
    "iq3_s": _iq3_s,
    "iq3_xxs": _iq3_xxs,
    "iq2_s": _iq2_s,
    "iq2_xs": _iq2_xs,
    "iq2_xxs": _iq2_xxs,
    "iq1_s": _iq1_s,
    "iq1_m": _iq1_m,
    "tq1_0": _tq1_0,
    "nvfp4": _nvfp4,
}
