"""Layer ids: the target layers whose inputs a draft reads.

The most common silent failure of DFlash and EAGLE-3 drafts: an id that is off by one gives
features of the neighbouring layer, correct text and poor acceptance. GGUF holds the index of the
layer whose *input* is read. z-lab's configuration counts outputs (one less), speculators' inputs.
"""

from __future__ import annotations

from typing import NamedTuple

from g4spec.validate.needs import Needs
from g4spec.validate.rule import ERROR, TAPPED, WARNING, Finding, Findings, rule
from g4spec.validate.subject import Subject

KEY = ".target_layers"
FILE = Needs.FILE


class Published(NamedTuple):
    """Layer inputs that a published draft reads, and the target's layer count."""

    n_layer: int
    ids: tuple[int, ...]
    who: str


PUBLISHED = (
    Published(30, (2, 7, 12, 18, 23, 28), "z-lab, 26B-A4B"),
    Published(48, (2, 11, 20, 28, 37, 46), "z-lab, 12B"),
    Published(48, (6, 18, 30, 42, 47), "DeepSpec, 12B"),
    Published(60, (2, 13, 24, 36, 47, 58), "z-lab, 31B"),
    Published(60, (1, 17, 29, 47, 58), "speculators, 31B"),
    Published(60, (2, 30, 57), "speculators EAGLE-3, 31B"),
    Published(30, (2, 15, 27), "speculators EAGLE-3, 26B-A4B"),
)


def ids(s: Subject) -> list[int]:
    found = s.numbers(".target_layers")
    return [] if found is None else [int(i) for i in found]


@rule("G4-TAP-001", ERROR, "fc must have one input block for each layer id", on=TAPPED, needs=FILE)
def width(s: Subject) -> Findings:
    """A loader that took the target's depth (60) for the number of layer ids (6) sized fc for
    another model; an empty list divided by zero."""
    shape, hidden, n = s.shape("fc.weight"), s.integer(".embedding_length"), len(ids(s))
    its = s.integer(".target_hidden_size") or hidden
    if shape and hidden and its and (n == 0 or shape != (hidden, n * its)):
        yield Finding(
            "fc.weight",
            f"[{hidden}, {n} x {its} = {n * its}]",
            list(shape),
            f"{s.name(KEY)} must name {shape[-1] / its:g} layers",
        )


@rule("G4-TAP-002", ERROR, "layer ids must be unique", on=TAPPED, needs=FILE)
def unique(s: Subject) -> Findings:
    """Upstream accepts a repeated id silently; one block of fc then reads the wrong layer."""
    found = ids(s)
    if len(set(found)) != len(found):
        yield Finding(s.name(KEY), "different layers", found, "take the ids from the checkpoint")


@rule("G4-TAP-003", WARNING, "layer ids should increase", on=TAPPED, needs=FILE)
def increasing(s: Subject) -> Findings:
    """The order of the ids is the order of fc's blocks. Every published draft counts upwards; a
    set that went through a Python `set` does not."""
    found = ids(s)
    if found != sorted(found):
        yield Finding(
            s.name(KEY), sorted(found), found, "keep the order of the checkpoint's configuration"
        )


@rule("G4-TAP-004", ERROR, "layer ids must be inputs of target layers", on=TAPPED, needs=FILE)
def in_range(s: Subject) -> Findings:
    """0 is the embedding and no trained draft reads it: it is an id that was never shifted. An
    id equal to the layer count is the last layer's output, which upstream cannot read and
    transformers returns with the final norm applied."""
    n = s.n_target_layers
    for i in ids(s):
        if i < 1 or (n is not None and i >= n):
            top = f"1 to {n - 1}" if n is not None else "1 or more"
            yield Finding(
                s.name(KEY),
                top,
                i,
                "count layer inputs: a z-lab id plus one, a "
                "speculators id as it is, and use the target this draft was trained "
                "for",
            )


@rule("G4-TAP-005", ERROR, "layer ids must not be off by one", on=TAPPED, needs=FILE)
def off_by_one(s: Subject) -> Findings:
    """z-lab ids taken as they are (several engines and forks), or speculators ids shifted once
    more (some forks): drafts load, text stays right, acceptance collapses."""
    found = tuple(ids(s))
    if any(found == p.ids for p in PUBLISHED):
        return
    for p in PUBLISHED:
        if found == tuple(i - 1 for i in p.ids):
            why = "these count layer outputs, as z-lab's configuration and lucebox do: add 1"
        elif found == tuple(i + 1 for i in p.ids):
            why = "these were shifted once too often: subtract 1"
        else:
            continue
        yield Finding(s.name(KEY), f"{list(p.ids)} ({p.who})", list(found), why)


@rule(
    "G4-TAP-006", WARNING, "layer ids should be those of a published draft", on=TAPPED, needs=FILE
)
def published(s: Subject) -> Findings:
    """A set that no trainer is known to use was usually typed, or cut from another one. The draft
    is then mostly rejected, and the text stays right."""
    found, n = tuple(ids(s)), s.n_target_layers
    sets = [p for p in PUBLISHED if p.n_layer == n]
    if sets and found and not _trained(found, n or 0) and _computed(found, n or 0) is None:
        known = "; ".join(f"{list(p.ids)} ({p.who})" for p in sets)
        yield Finding(
            s.name(KEY),
            known,
            list(found),
            "compare with the checkpoint's configuration; ignore this if the draft was "
            "trained with these ids",
        )


@rule("G4-TAP-007", ERROR, "layer ids must be for a target of this depth", on=TAPPED, needs=FILE)
def other_depth(s: Subject) -> Findings:
    """A draft of the 26B-A4B beside the 31B: all ids exist there, halfway down the model."""
    found, n = tuple(ids(s)), s.n_target_layers
    its = [p for p in _near(found) if p.n_layer != n]
    if n is not None and its and len(its) == len(_near(found)):
        yield Finding(
            s.name(KEY),
            f"ids for {n} layers",
            f"{list(found)}, for {its[0].n_layer} ({its[0].who})",
            "use the target this draft was trained for",
        )


@rule(
    "G4-TAP-008",
    WARNING,
    "layer ids should come from a configuration, not from a formula",
    on=TAPPED,
    needs=FILE,
)
def computed(s: Subject) -> Findings:
    """An engine that computed evenly spaced ids instead of reading them had the wrong ones for
    both sizes of target, and drafts that were mostly rejected."""
    found, n = tuple(ids(s)), s.n_target_layers or 0
    convention = _computed(found, n)
    if any(p.n_layer == n for p in PUBLISHED) and not _trained(found, n) and convention:
        yield Finding(
            s.name(KEY),
            "the ids of the checkpoint's configuration",
            f"{list(found)}, {convention}",
            "take the ids from the checkpoint, counted as inputs",
        )


def _trained(found: tuple[int, ...], n: int) -> bool:
    """Return whether ids are a published set, off by at most one, or the EAGLE-3 default."""
    return bool(_near(found)) or found == (2, n // 2, n - 3)


def _near(found: tuple[int, ...]) -> list[Published]:
    """Return the published sets that these ids equal, or differ from by one."""
    return [p for p in PUBLISHED if any(found == tuple(i + d for i in p.ids) for d in (-1, 0, 1))]


def _computed(found: tuple[int, ...], n: int) -> str | None:
    """Return the formula that gives these ids from the number of layers and of ids, or None."""
    k = len(found)
    if k < 3 or n < k:
        return None
    even = {
        "layers divided evenly (n * i // (k + 1))": [n * i // (k + 1) for i in range(1, k + 1)],
        "evenly spaced from the first layer to the last": [
            round(i * (n - 1) / (k - 1)) for i in range(k)
        ],
        "the last layers": [n - k + i for i in range(k)],
        "the first layers": list(range(k)),
        "the default of EAGLE-3 (2, n // 2, n - 3)": [2, n // 2, n - 3],
        "z-lab's formula for other ids": [round(1 + i * (n - 4) / (k - 1)) for i in range(k)],
    }
    for name, layers in even.items():
        for shift, counted in ((0, ""), (1, ", plus one"), (-1, ", less one")):
            if found == tuple(i + shift for i in layers):
                return name + counted
    return None
