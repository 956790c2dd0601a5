"""Tensors that differ from those of the same name and shape in other layers."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Iterator

import numpy as np

from g4spec import quant
from g4spec.validate.needs import Needs
from g4spec.validate.rule import COMPARE, DRAFTS, WARNING, Finding, Findings, rule
from g4spec.validate.rules.tables import both_tables
from g4spec.validate.scan import BLOCKS, FLOATS
from g4spec.validate.subject import Subject

FILE, TARGET = Needs.FILE, Needs.TARGET
SAMPLE = 64  # rows that are sampled of a matrix
# Maximum spread of log2(RMS) of the other layers: for each of them, and in all.
SPREAD, WIDEST = 0.15, 0.45
OFF = 0.6  # difference of log2(RMS) from the nearest other layer
LAYER = re.compile(r"blk\.(\d+)\.(.*)")

Like = dict[tuple[str, tuple[int, ...]], list[str]]


@rule("G4-VAL-011", WARNING, "weights should be as large as those of other layers", needs=FILE)
def scaled(s: Subject) -> Findings:
    """A scale that was applied twice, or not at all, in one layer. Checked only if the other layers
    agree: their root mean squares differ by at most a third, and this one differs from the nearest
    by more than a factor of 1.5."""
    for names in like(s).values():
        sizes = {name: x for name in names if (x := _size(s, name)) is not None}
        ranked, total = sorted(sizes.values()), sum(sizes.values())
        for name, mine in sizes.items():
            at, n = bisect_left(ranked, mine), len(ranked) - 1
            nearest = [*ranked[max(at - 1, 0) : at], *ranked[at + 1 : at + 2]]
            off = min((abs(mine - x) for x in nearest), default=0.0)
            spread = ranked[n - (at == n)] - ranked[at == 0] if n > 1 else math.inf  # of others
            if off > OFF and spread <= min(SPREAD * (n - 1), WIDEST):
                times = 2.0 ** (mine - (total - mine) / n)
                yield Finding(
                    name,
                    "weights as large as in other layers",
                    f"{times:.2f} times as large",
                    COMPARE,
                )


@rule("G4-VAL-012", WARNING, "two norms should not be identical", needs=FILE)
def repeated(s: Subject) -> Findings:
    """A loop over layers that reads layer 0 each time. Norms show it even if matrices are
    quantized. Norms that were never trained, all ones, are ignored."""
    for names in _same_shape(s):
        seen: dict[bytes, str] = {}
        for name in names:
            raw = s.open_file.raw(name)
            first = seen.setdefault(raw.tobytes(), name)
            if first != name and len(np.unique(raw.view("<u4"))) > 2:
                yield Finding(name, "a norm of its own", f"a copy of {first}", COMPARE)
                break


@rule("G4-VAL-013", WARNING, "norms should be positive", needs=FILE)
def positive(s: Subject) -> Findings:
    """Trained norms are hardly ever negative. A norm with its sign inverted, or stored minus one,
    inverts the input of its layer; the text shows little of it if it is a single layer."""
    below = {name: float((s.open_file.array(name) < 0).mean()) for name in _norms(s)}
    inverted = {
        name: x for name, x in below.items() if x > 0.25 and (s.shape(name) or (1,))[-1] > 1
    }
    if 4 * len(inverted) < len(below):  # else G4-VAL-009 reports it once
        for name, x in inverted.items():
            yield Finding(name, "weights above 0", f"{x:.0%} below", COMPARE)


@rule(
    "G4-PAIR-020",
    WARNING,
    "rows of both token tables should be equally long",
    on=DRAFTS,
    needs=TARGET,
)
def lengths(s: Subject) -> Findings:
    """A draft's own copy of the target's table, scaled once too often or stored in a type that was
    read with the wrong scale."""
    pair = both_tables(s)
    if pair is None:
        return
    own, target = (float(np.sqrt(np.square(x, dtype=np.float64).mean())) for x in pair)
    if target > 0 and own > 0 and abs(math.log2(own / target)) > OFF:
        yield Finding(
            "token_embd.weight",
            "rows as long as the target's",
            f"{own / target:.3g} times as long",
            COMPARE,
        )


def like(s: Subject) -> Like:
    """Return names of layer tensors, grouped by the name after `blk.N.` and the shape."""
    out: Like = {}
    for name, info in s.open_file.tensors.items():
        match = LAYER.fullmatch(name)
        if match is not None and int(np.prod(info.shape)) > 16:
            out.setdefault((match[2], info.shape), []).append(name)
    return out


def _size(s: Subject, name: str) -> float | None:
    """Return log2 of the RMS of a sample of a tensor's rows."""
    info = s.open_file.tensors[name]
    if info.format.name.upper() not in {**FLOATS, **BLOCKS} or info.format.integer:
        return None
    rows = int(np.prod(info.shape[:-1]))
    raw = s.open_file.raw(name).reshape(rows, -1)
    picked = np.unique(np.linspace(0, rows - 1, min(SAMPLE, rows)).astype(np.int64))
    x = quant.get(info.format.name).dequantize(raw[picked]).astype(np.float64)
    power = float(np.square(x).mean()) if np.isfinite(x).all() else 0.0
    return math.log2(power) / 2 if power > 0 else None


def _norms(s: Subject) -> Iterator[str]:
    for name in s.open_file.tensors:
        if name.endswith("norm.weight") and s.type_name(name) == "F32":
            yield name


def _same_shape(s: Subject) -> Iterator[list[str]]:
    groups: dict[tuple[int, ...], list[str]] = {}
    for name in _norms(s):
        groups.setdefault(s.shape(name) or (), []).append(name)
    yield from groups.values()
