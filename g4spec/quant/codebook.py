"""Codebooks of the IQ types: entries of 4 or 8 values in `grids.bin`, and signs.

`grids.bin` holds the codebooks in the order of `GRIDS`. Each value is an index into the codebook's
list of values, in 2 bits (4 bits if the list has more than 4), lowest bits first.
Source: the tables `iq2xxs_grid` to `iq1s_grid` of ggml `ggml-common.h`, taken from gguf-py.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from g4spec.quant.format import Bytes, Floats

GRIDS: dict[str, tuple[int, int, tuple[int, ...]]] = {
    "iq2_xxs": (256, 8, (8, 25, 43)),
    "iq2_xs": (512, 8, (8, 25, 43)),
    "iq2_s": (1024, 8, (8, 25, 43)),
    "iq3_xxs": (256, 4, (4, 12, 20, 28, 36, 44, 52, 62)),
    "iq3_s": (512, 4, (1, 3, 5, 7, 9, 11, 13, 15)),
    "iq1": (2048, 8, (-1, 0, 1)),
}
"""Name -> (number of entries, values per entry, list of values)."""
FILE = Path(__file__).with_name("grids.bin")
LINEAR_4 = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)
"""Values of the 4-bit codes of IQ4_NL and IQ4_XS. Source: ggml `kvalues_iq4nl`."""
E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
"""Twice the values of the 4-bit floats of MXFP4 and NVFP4. Source: ggml `kvalues_mxfp4`."""
DELTA = np.float32(0.125)
"""Offset that IQ1 types add to or subtract from their values."""


@cache
def _grids() -> dict[str, Floats]:
    raw, found, at = np.fromfile(FILE, np.uint8), {}, 0
    for name, (entries, size, values) in GRIDS.items():
        bits = 2 if len(values) <= 4 else 4
        n = entries * size * bits // 8
        codes = raw[at : at + n, None] >> np.arange(0, 8, bits, dtype=np.uint8) & (1 << bits) - 1
        found[name] = np.array(values, np.float32)[codes].reshape(entries, size)
        at += n
    assert at == len(raw), f"{FILE}: {len(raw)} bytes, not {at}"
    return found


def grid(name: str) -> Floats:
    """Return a codebook of `GRIDS`, float32 [entries, values per entry]."""
    return _grids()[name]


@cache
def _signs() -> Floats:
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    out: Floats = np.where(bits == 1, np.float32(-1), np.float32(1))
    return out


def signs(byte: Bytes) -> Floats:
    """Return the factors 1 and -1 for the bits of each byte, [..., 8]; a set bit gives -1."""
    out: Floats = _signs()[byte]
    return out


def even_signs(index: NDArray[np.integer]) -> Floats:
    """Return the factors of 7-bit sign indices, [..., 8]: the eighth sign makes the number of minus
    signs even.

    Source: ggml `ksigns_iq2xs`.
    """
    byte: NDArray[Any] = index.astype(np.uint8)
    odd = byte ^ byte >> 4
    odd ^= odd >> 2
    odd ^= odd >> 1
    byte |= (odd & np.uint8(1)) << np.uint8(7)
    return signs(byte)


def nibbles(q: Bytes) -> Bytes:
    """Unpack 4-bit codes from bytes [..., m] to [..., 2 * m]: all lower halves, then all upper."""
    return np.concatenate((q & 15, q >> 4), axis=-1)


def scale_values(scale: Floats, values: Floats, factors: Floats | None = None) -> Floats:
    """Return scale [n, ...] * values [n, ..., m] * factors, flat. Overwrites `values`."""
    out = values
    out *= scale.reshape(*scale.shape, *[1] * (values.ndim - scale.ndim))
    if factors is not None:
        out *= factors
    return out.reshape(-1)
