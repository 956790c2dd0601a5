"""Token tables: a sample of rows compared with the target's, and with the clusters."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from g4spec import quant
from g4spec.models.assistant import CENTROIDS, ORDERING
from g4spec.validate.needs import Needs
from g4spec.validate.rule import ASSISTANT, TAPPED, WARNING, Finding, Findings, rule
from g4spec.validate.scan import BLOCKS, FLOATS
from g4spec.validate.subject import Subject

TARGET, FILE = Needs.TARGET, Needs.FILE
TABLE = "token_embd.weight"
SAMPLE = 256  # rows that stand for a table
CLUSTERS = 32  # clusters that stand for all of them
MEMBERS = 16  # tokens that stand for a cluster

Rows = NDArray[np.float32]


@rule(
    "G4-BLK-014",
    WARNING,
    "the draft's own token table should not be scaled already",
    on=TAPPED,
    needs=TARGET,
)
def scaled_table(s: Subject) -> Findings:
    """Gemma multiplies its embedding by the root of the hidden size. An export that saved the
    product instead of the table gives rows 73 times too large, squared where a loader scales
    again."""
    pair = both_tables(s)
    if pair is None:
        return
    mine, its = (float(np.sqrt((x.astype(np.float64) ** 2).mean())) for x in pair)
    root = math.sqrt(pair[0].shape[1])
    if its > 0 and 0.8 * root < mine / its < 1.25 * root:
        yield Finding(
            TABLE,
            "rows as long as the target's",
            f"{mine / its:.1f} times as long, sqrt({pair[0].shape[1]}) = {root:.1f}",
            "divide the table by it, or take it from the checkpoint",
        )


@rule(
    "G4-PAIR-014",
    WARNING,
    "the draft's own token table should be the target's",
    on=TAPPED,
    needs=TARGET,
)
def same_table(s: Subject) -> Findings:
    """Trainers copy the target's table into the draft and freeze it. Rows that point elsewhere
    come from another revision of the target, another size, or another order of tokens."""
    pair = both_tables(s)
    if pair is None:
        return
    a, b = pair
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    cosine = np.median((a * b).sum(1)[norms > 0] / norms[norms > 0]) if norms.any() else 1.0
    if cosine < 0.9:
        yield Finding(
            TABLE,
            "rows that point where the target's do",
            f"a median cosine of {cosine:.2f}",
            "use the target this draft was trained for",
        )


@rule("G4-CEN-008", WARNING, "tokens of a cluster should be similar", on=ASSISTANT, needs=FILE)
def alike(s: Subject) -> Findings:
    """The inverse of an ordering, token to slot, is a permutation too and passes every count. Read
    as an ordering its clusters are tokens at random, and the right one is rarely among them."""
    order, length, hidden = s.numbers(ORDERING), s.count(CENTROIDS), s.integer(".embedding_length")
    if order is None or not length or not hidden or length % hidden or order.dtype.kind not in "iu":
        return
    n = length // hidden
    shape = s.shape(TABLE)
    whole = len(order) > 0 and np.array_equal(np.sort(order), np.arange(len(order)))
    if not whole or len(order) % n or shape is None or shape[0] != len(order):
        return
    inverse = np.argsort(order)
    stored, other = (_likeness(s, x.reshape(n, -1)) for x in (order, inverse))
    if stored is not None and other is not None and other > 0.05 and other > 3 * stored:
        yield Finding(
            ORDERING,
            "tokens of a cluster side by side",
            f"token -> slot: likeness {stored:.2f}, that of the inverse {other:.2f}",
            "store the ordering of the checkpoint, slot -> token",
        )


def _likeness(s: Subject, clusters: NDArray[np.integer]) -> float | None:
    """Return the mean cosine between tokens of one cluster, less that between any tokens."""
    step = max(1, len(clusters) // CLUSTERS)
    picked = clusters[::step][:CLUSTERS, :: max(1, clusters.shape[1] // MEMBERS)][:, :MEMBERS]
    found = rows(s, picked.reshape(-1))
    if found is None or picked.shape[1] < 2 or picked.shape[0] < 2:
        return None
    unit = found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-30)
    m = picked.shape[1]
    sums = unit.reshape(*picked.shape, -1).sum(1)
    inside = ((sums * sums).sum(1) - m).mean() / (m * (m - 1))
    total = unit.sum(0)
    anywhere = (float(total @ total) - len(unit)) / (len(unit) * (len(unit) - 1))
    return float(inside) - anywhere


def both_tables(s: Subject) -> tuple[Rows, Rows] | None:
    """Return the same rows of the draft's and the target's table, or None if shapes differ."""
    target = s.target
    assert target is not None
    mine, its = s.shape(TABLE), target.shape(TABLE)
    if mine is None or mine != its or len(mine) != 2:
        return None
    picked = np.linspace(0, mine[0] - 1, min(SAMPLE, mine[0])).astype(np.int64)
    a, b = rows(s, picked), rows(target, picked)
    return (a, b) if a is not None and b is not None else None


def rows(s: Subject, picked: NDArray[np.integer]) -> Rows | None:
    """Return rows `picked` of the token table; None if it is unreadable or not finite."""
    shape, name = s.shape(TABLE), s.type_name(TABLE) or ""
    if shape is None or len(shape) != 2 or name not in {**FLOATS, **BLOCKS}:
        return None
    raw = s.open_file.raw(TABLE).reshape(shape[0], -1)
    found = quant.get(name).dequantize(raw[picked]).astype(np.float32)
    return found if np.isfinite(found).all() else None
