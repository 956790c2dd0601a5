"""Reduced vocabularies: `d2t` maps a row of the draft's head to a token of the target.

Checkpoints store it as deltas (target = row + d2t[row]); GGUF stores target ids.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from g4spec.convert import derived, provenance
from g4spec.convert.tensors import StoredTensor
from g4spec.models.spec import GEMMA_STOP_IDS
from g4spec.validate.needs import Needs
from g4spec.validate.rule import ERROR, RECONVERT, TAPPED, WARNING, Finding, Findings, rule
from g4spec.validate.subject import Subject

FILE = Needs.FILE


DELTA_REPEATS = 0.05  # share of equal neighbours; 0.32 in RedHat's 31B map, 0 among real ids


def looks_like_deltas(d2t: NDArray[np.int64]) -> bool:
    """Deltas of ascending ids never decrease and often repeat; the ids themselves never repeat."""
    if len(d2t) < 2:
        return False
    steps = np.diff(d2t)
    return bool((steps >= 0).all() and (steps == 0).mean() > DELTA_REPEATS)


@rule("G4-D2T-001", ERROR, "d2t must be stored as I64", on=TAPPED, needs=FILE)
def is_i64(s: Subject) -> Findings:
    """Upstream loads an I32 d2t and aborts when the first graph runs."""
    found = s.type_name("d2t")
    if found not in (None, "I64"):
        yield Finding("d2t", "I64", found, RECONVERT)


@rule(
    "G4-D2T-002", ERROR, "d2t must have one entry for each row of the head", on=TAPPED, needs=FILE
)
def length(s: Subject) -> Findings:
    """A head and a map of different exports: the last rows have no token id."""
    head, d2t = s.shape("output.weight"), s.shape("d2t")
    if head and d2t is not None and d2t != head[:1]:
        yield Finding("d2t", list(head[:1]), list(d2t), RECONVERT)


@rule("G4-D2T-003", ERROR, "d2t must hold target ids, not deltas", on=TAPPED, needs=FILE)
def absolute(s: Subject) -> Findings:
    """Deltas read as ids: proposals are gibberish, almost none is accepted, and the text stays
    right, so nothing but the speed tells. RedHat's 31B map read that way names 21,639 tokens
    for 32,000 rows."""
    if s.d2t is not None and looks_like_deltas(s.d2t):
        yield Finding(
            "d2t",
            "ids that increase",
            f"{len(np.unique(s.d2t))} different values in {len(s.d2t)} rows, never decreasing",
            "add its row number to each entry",
        )


@rule("G4-D2T-004", ERROR, "d2t must stay inside the target's vocabulary", on=TAPPED, needs=FILE)
def in_range(s: Subject) -> Findings:
    """An id out of range aborts upstream inside a graph, or writes a logit outside its row."""
    if s.d2t is None or not len(s.d2t) or s.n_vocab is None:
        return
    bad = np.flatnonzero((s.d2t < 0) | (s.d2t >= s.n_vocab))
    if bad.size:
        yield Finding(f"d2t[{bad[0]}]", f"0 to {s.n_vocab - 1}", int(s.d2t[bad[0]]), RECONVERT)


@rule("G4-D2T-005", ERROR, "d2t must name each target id once", on=TAPPED, needs=FILE)
def unique(s: Subject) -> Findings:
    """Two rows for one token overwrite each other's logit; which one wins depends on the
    backend."""
    if s.d2t is None or looks_like_deltas(s.d2t):
        return
    values, counts = np.unique(s.d2t, return_counts=True)
    if (counts > 1).any():
        first = int(values[np.argmax(counts > 1)])
        yield Finding(
            "d2t", "different ids", f"{int((counts > 1).sum())} repeated, first {first}", RECONVERT
        )


@rule("G4-D2T-006", WARNING, "d2t should increase", on=TAPPED, needs=FILE)
def increasing(s: Subject) -> Findings:
    """Training tools select rows in ascending order; another order means that head and map were
    sorted apart from each other, or ids were added twice."""
    if s.d2t is None or len(s.d2t) < 2 or looks_like_deltas(s.d2t):
        return
    drop = np.flatnonzero(np.diff(s.d2t) < 0)
    if drop.size:
        i = int(drop[0])
        yield Finding(f"d2t[{i + 1}]", f"more than {s.d2t[i]}", int(s.d2t[i + 1]), RECONVERT)


@rule(
    "G4-D2T-007", ERROR, "a reduced vocabulary must come with its own head", on=TAPPED, needs=FILE
)
def own_head(s: Subject) -> Findings:
    """Converters whose tensor list has no output.weight dropped the reduced head and kept the
    map; loaders then gave the token table the head's shape and failed."""
    if s.shape("d2t") is not None and s.shape("output.weight") is None:
        yield Finding(
            "output.weight", f"[{(s.shape('d2t') or ('?',))[0]}, hidden]", "nothing", RECONVERT
        )


@rule("G4-D2T-008", ERROR, "a reduced head must come with its map", on=TAPPED, needs=FILE)
def own_map(s: Subject) -> Findings:
    """Without d2t, row numbers of the head are taken for token ids."""
    head = s.shape("output.weight")
    if head and s.shape("d2t") is None and s.n_vocab is not None and head[0] != s.n_vocab:
        yield Finding("d2t", f"{head[0]} target ids", "nothing", RECONVERT)


@rule("G4-D2T-009", ERROR, "d2t must not change after the conversion", on=TAPPED, needs=FILE)
def digest(s: Subject) -> Findings:
    """t2d is the inverse of d2t and is dropped at conversion; its digest is
    kept, so that a map exchanged or edited later is noticed."""
    recorded = s.text(provenance.T2D_SHA256)
    if recorded and s.d2t is not None and s.n_vocab is not None:
        mask = np.zeros(s.n_vocab, np.uint8)
        mask[s.d2t[(s.d2t >= 0) & (s.d2t < s.n_vocab)]] = 1
        found = derived.t2d_sha256(StoredTensor("t2d", mask.shape, "BOOL", None, mask))
        if found != recorded:
            yield Finding("d2t", f"t2d digest {recorded:.12}", f"{found:.12}", RECONVERT)


@rule(
    "G4-D2T-010",
    WARNING,
    "the draft should be able to propose every stop token",
    on=TAPPED,
    needs=FILE,
)
def stop_tokens(s: Subject) -> Findings:
    """A vocabulary cut to the 32,000 most frequent tokens lacks `<eos>`, `<turn|>` and
    `<|tool_response>`: the draft never ends a turn, and the last step of every answer drafts
    in vain. RedHat's 31B draft lacks all ids below 107."""
    if s.d2t is None or looks_like_deltas(s.d2t):
        return
    lacking = sorted(GEMMA_STOP_IDS - set(s.d2t.tolist()))
    if lacking:
        yield Finding(
            "d2t",
            f"rows for {sorted(GEMMA_STOP_IDS)}",
            f"none for {lacking}",
            "no fix but retraining; it costs one wasted draft at the end of each answer",
        )


@rule("G4-D2T-011", WARNING, "row numbers should be added to d2t only once", on=TAPPED, needs=FILE)
def added_twice(s: Subject) -> Findings:
    """Ids that go through a delta-to-absolute step again grow by their row: no two neighbours of
    the vocabulary are left, which no real selection of frequent tokens looks like."""
    if s.d2t is not None and len(s.d2t) >= 32 and (np.diff(s.d2t) >= 2).all():
        yield Finding(
            "d2t",
            "some neighbouring ids",
            "none: every step is 2 or more",
            "subtract its row number from each entry",
        )
