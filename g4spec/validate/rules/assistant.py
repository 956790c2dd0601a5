"""MTP assistants: they read the KV cache of their target, so their shapes must match."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from g4spec.models.assistant import CENTROIDS, ORDERING, TOP_K
from g4spec.models.spec import LayerSpec
from g4spec.validate.needs import Needs
from g4spec.validate.rule import ASSISTANT, ERROR, RECONVERT, WARNING, Finding, Findings, rule
from g4spec.validate.subject import Subject

FILE, TARGET = Needs.FILE, Needs.TARGET
OTHER = "use the target this assistant was made for"


@rule(
    "G4-DON-001",
    ERROR,
    "backbone width must be the target's hidden size",
    on=ASSISTANT,
    needs=TARGET,
)
def width(s: Subject) -> Findings:
    """An assistant for another size of target: engines multiply matrices of different widths
    and abort ("same reduction dim"), or share the wrong embedding."""
    target = s.target
    if target is not None and s.config.backbone != target.config.n_embd:
        yield Finding(
            "gemma4-assistant.embedding_length_out", target.config.n_embd, s.config.backbone, OTHER
        )


@rule(
    "G4-DON-002",
    ERROR,
    "KV heads and head size must be the donor layer's",
    on=ASSISTANT,
    needs=TARGET,
)
def geometry(s: Subject) -> Findings:
    """The donor is the target's *last* layer of the same kind: 58 for sliding, 59 for full
    layers of the 31B. A test that asked only for a number inside 0..59 passed with them
    reversed."""
    for spec, donor in _donors(s):
        mine, its = (spec.n_kv, spec.head_dim), (donor.n_kv, donor.head_dim)
        if mine != its:
            yield Finding(
                f"assistant layer {spec.index}",
                f"{its[0]} KV heads of {its[1]}, as target layer {donor.index}",
                f"{mine[0]} of {mine[1]}",
                OTHER,
            )


@rule("G4-DON-003", ERROR, "windows must be the donor layer's", on=ASSISTANT, needs=TARGET)
def windows(s: Subject) -> Findings:
    """A longer window than the donor's reads cache slots that were already reused."""
    for spec, donor in _donors(s):
        if spec.window != donor.window:
            yield Finding(
                f"assistant layer {spec.index}",
                f"window {donor.window}, as target layer {donor.index}",
                spec.window,
                OTHER,
            )


@rule("G4-DON-004", ERROR, "rotation must be the donor layer's", on=ASSISTANT, needs=TARGET)
def rotation(s: Subject) -> Findings:
    """Cached keys are already rotated: a query rotated with another base has the wrong
    angle to them, and nearly every draft is rejected."""
    for spec, donor in _donors(s):
        mine, its = (spec.rope_base, spec.rope_partial), (donor.rope_base, donor.rope_partial)
        if mine != its:
            yield Finding(
                f"assistant layer {spec.index}",
                f"base {its[0]:g}, rotated share {its[1]:g}",
                f"base {mine[0]:g}, rotated share {mine[1]:g}",
                OTHER,
            )


@rule(
    "G4-DON-005",
    ERROR,
    "nextn_predict_layers must be the number of layers",
    on=ASSISTANT,
    needs=FILE,
)
def nextn(s: Subject) -> Findings:
    """Upstream builds as many layers as this says; older files lack it and load with none."""
    n, found = s.integer(".block_count"), s.integer(".nextn_predict_layers")
    if n is not None and found is not None and n != found:
        yield Finding("gemma4-assistant.nextn_predict_layers", n, found, RECONVERT)


@rule(
    "G4-DON-006",
    ERROR,
    "backbone width must differ from the own hidden size",
    on=ASSISTANT,
    needs=FILE,
)
def two_widths(s: Subject) -> Findings:
    """Upstream refuses equal ones: `embedding_length_out` was filled from the wrong field."""
    own, out = s.integer(".embedding_length"), s.integer(".embedding_length_out")
    if own is not None and own == out:
        yield Finding(
            "gemma4-assistant.embedding_length_out", "the target's hidden size", out, RECONVERT
        )


@rule("G4-DON-007", WARNING, "all layers should share the target's cache", on=ASSISTANT, needs=FILE)
def shared(s: Subject) -> Findings:
    """Published configurations say 0 or nothing, loaders then allocated a cache that nothing
    fills, or, in one engine, wrote the draft's keys into the target's."""
    n, found = s.integer(".block_count"), s.integer(".attention.shared_kv_layers")
    if n is not None and found != n:
        yield Finding(
            "gemma4-assistant.attention.shared_kv_layers",
            n,
            "nothing" if found is None else found,
            RECONVERT,
        )


@rule("G4-CEN-001", ERROR, "a centroid head must be complete", on=ASSISTANT, needs=FILE)
def complete(s: Subject) -> Findings:
    """Loaders that place only parameters left out the ordering, which is a buffer."""
    keys = (CENTROIDS, ORDERING, TOP_K)
    if any(s.has(k) for k in keys):
        for key in keys:
            if not s.has(key):
                yield Finding(key, "a value", "nothing", RECONVERT)


@rule("G4-CEN-002", ERROR, "clusters must divide the vocabulary", on=ASSISTANT, needs=FILE)
def divides(s: Subject) -> Findings:
    """Engines divide without asking: the rest of the vocabulary has no cluster, and the index
    of the last one runs over."""
    length, hidden, n = s.count(CENTROIDS), s.integer(".embedding_length"), s.n_vocab
    if length is None or not hidden or n is None:
        return
    if length == 0 or length % hidden:
        yield Finding(CENTROIDS, f"a multiple of {hidden} numbers", length, RECONVERT)
    elif n % (length // hidden):
        yield Finding(CENTROIDS, f"a divisor of {n} clusters", length // hidden, RECONVERT)


@rule("G4-CEN-003", ERROR, "the ordering must name every token", on=ASSISTANT, needs=FILE)
def covers(s: Subject) -> Findings:
    """An ordering of another vocabulary, or one cut short."""
    found, n = s.count(ORDERING), s.n_vocab
    if found is not None and n is not None and found != n:
        yield Finding(ORDERING, f"{n} entries", found, RECONVERT)


@rule("G4-CEN-004", ERROR, "the ordering must lead from slot to token", on=ASSISTANT, needs=FILE)
def direction(s: Subject) -> Findings:
    """One fork stores the inverse under a similar name: the cluster of each token. Read as an
    ordering it names the first few tokens over and over."""
    order = s.numbers(ORDERING)
    if order is not None and _is_inverse(order):
        yield Finding(
            ORDERING,
            "a permutation of token ids",
            f"only {int(order.max()) + 1} values, each repeated",
            RECONVERT,
        )


@rule("G4-CEN-005", ERROR, "the ordering must be a permutation", on=ASSISTANT, needs=FILE)
def permutation(s: Subject) -> Findings:
    """A repeated token takes the place of one that can then never be drafted."""
    order = s.numbers(ORDERING)
    if order is None or _is_inverse(order):
        return
    if not np.array_equal(np.sort(order), np.arange(len(order))):
        lost = len(order) - len(np.unique(order[(order >= 0) & (order < len(order))]))
        yield Finding(ORDERING, "each token once", f"{lost} tokens missing", RECONVERT)


@rule("G4-CEN-006", ERROR, "centroids must be finite", on=ASSISTANT, needs=FILE)
def finite(s: Subject) -> Findings:
    """NaN never wins a comparison, so its cluster is never chosen, and no one notices."""
    found = s.numbers(CENTROIDS)
    if found is not None and found.dtype.kind == "f" and not np.isfinite(found).all():
        yield Finding(
            CENTROIDS,
            "finite numbers",
            f"{int((~np.isfinite(found)).sum())} that are not",
            RECONVERT,
        )


@rule(
    "G4-CEN-007",
    ERROR,
    "the number of chosen clusters must not exceed the number of clusters",
    on=ASSISTANT,
    needs=FILE,
)
def top_k(s: Subject) -> Findings:
    """A top-k beyond the number of clusters reads beyond the scores."""
    length, hidden, k = s.count(CENTROIDS), s.integer(".embedding_length"), s.integer(TOP_K)
    if length is not None and hidden and k is not None and not 1 <= k <= length // hidden:
        yield Finding(TOP_K, f"1 to {length // hidden}", k, RECONVERT)


def _is_inverse(order: NDArray[Any]) -> bool:
    """Token -> cluster: few values, each as often as the others."""
    if order.dtype.kind not in "iu" or len(order) < 2 or order.min() < 0:
        return False
    n = int(order.max()) + 1
    if n >= len(order) or len(order) % n:
        return False
    return bool((np.bincount(order, minlength=n) == len(order) // n).all())


def _donors(s: Subject) -> list[tuple[LayerSpec, LayerSpec]]:
    """Return each layer with the target layer whose KV cache it reads."""
    target = s.target
    assert target is not None
    kinds = {spec.window is not None for spec in target.config.layers}
    return [
        (spec, target.config.layers[target.config.kv_source(spec.window is not None)])
        for spec in s.config.layers
        if (spec.window is not None) in kinds
    ]
