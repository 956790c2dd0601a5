"""The values of tensors. One pass over the data (`scan.py`) serves all rules."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from g4spec.validate.needs import Needs
from g4spec.validate.rule import ERROR, GEMMA, WARNING, Finding, Findings, rule
from g4spec.validate.scan import BLOCKS, FLOATS
from g4spec.validate.subject import Subject

FILE = Needs.FILE
LOST = 0.01  # allowed share of lost blocks in a tensor
LARGEST_WEIGHT = 4096.0
SHIFTED = "convert again: norms are stored as the checkpoint has them, nothing added"
RECONVERT = "convert again from the original checkpoint, and check that file's digest first"


@rule("G4-VAL-001", ERROR, "every float must be finite", needs=FILE)
def finite(s: Subject) -> Findings:
    """argmax over NaN logits is token 0: an engine reported perfect acceptance because target
    and draft both wrote token 0 forever."""
    for name, stats in s.stats.items():
        if stats.first_bad is not None and s.type_name(name) in FLOATS:
            shape = s.shape(name) or (1,)
            at = tuple(int(i) for i in np.unravel_index(stats.first_bad, shape))
            yield Finding(name, "finite numbers", f"NaN or infinity at {list(at)}", RECONVERT)


@rule("G4-VAL-002", ERROR, "the scale of every quantized block must be finite", needs=FILE)
def finite_scales(s: Subject) -> Findings:
    """Weights above 8.3 million overflow the fp16 scale of a Q8_0 block; only a loader run with
    its check option says so."""
    for name, stats in s.stats.items():
        if stats.first_bad is not None and s.type_name(name) in BLOCKS:
            yield Finding(
                name,
                "finite scales",
                f"a bad scale in block {stats.first_bad}",
                "store this tensor as BF16",
            )


@rule("G4-VAL-003", ERROR, "a tensor must not be all zero", needs=FILE)
def zero(s: Subject) -> Findings:
    """A tensor that was allocated and never filled; a zero `layer_scalar` silences its layer."""
    for name, stats in s.stats.items():
        if stats.zero:
            yield Finding(name, "numbers", "zero everywhere", RECONVERT)


@rule("G4-VAL-004", ERROR, "a matrix must not be the same everywhere", needs=FILE)
def constant(s: Subject) -> Findings:
    """A fill value that was meant to be overwritten: torch.empty, ones from an initializer."""
    for name, stats in s.stats.items():
        if stats.constant and not stats.zero and len(s.shape(name) or ()) > 1:
            yield Finding(name, "numbers that differ", "one value everywhere", RECONVERT)


@rule("G4-VAL-005", WARNING, "two matrices should not be identical", needs=FILE)
def duplicates(s: Subject) -> Findings:
    """A loop over layers that reads layer 0 each time converts without complaint."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, stats in s.stats.items():
        shape = s.shape(name) or ()
        if len(shape) > 1 and not stats.constant:
            groups.setdefault((s.type_name(name), shape, stats.sample), []).append(name)
    for names in groups.values():
        for a, b in combinations(names[:8], 2):
            if np.array_equal(s.open_file.raw(a), s.open_file.raw(b)):
                yield Finding(b, "a tensor of its own", f"a copy of {a}", RECONVERT)


@rule("G4-VAL-006", WARNING, "scales should not be lost to underflow", needs=FILE)
def underflow(s: Subject) -> Findings:
    """Values below about 1e-6 have a scale that fp16 rounds to zero: the block reads as zeros
    while its codes are not. Up to 1 % of a matrix is the dead neurons that trained models have."""
    for name, stats in s.stats.items():
        if stats.lost_blocks > LOST * stats.blocks:
            found = f"{stats.lost_blocks} of {stats.blocks} blocks lost"
            yield Finding(
                name, "scales above zero", found, "store this tensor as BF16 if it matters"
            )


@rule("G4-VAL-007", ERROR, "rope_freqs must rotate a quarter of each global head", on=GEMMA)
def rope_freqs(s: Subject) -> Findings:
    """Gemma's global layers rotate 64 of 256 pairs: divisors are ones, then 1e30. A draft that
    rotated everything lost a tenth of its acceptance; a file without the tensor rotates all."""
    if s.type_name("rope_freqs.weight") != "F32":
        return
    found = s.open_file.array("rope_freqs.weight").reshape(-1)
    n = next((spec.rotary_pairs for spec in s.config.layers if spec.window is None), 0)
    if not ((found[:n] == 1).all() and (found[n:] >= 1e29).all()):
        ones = int((found == 1).sum())
        yield Finding("rope_freqs.weight", f"{n} ones, then 1e30", f"{ones} ones", RECONVERT)


@rule("G4-VAL-008", WARNING, "weights should not be implausibly large", needs=FILE)
def implausible(s: Subject) -> Findings:
    """One flipped bit in the exponent of a block's scale makes its weights 65,536 times larger:
    finite, so that checks for NaN pass, and louder than everything else in its layer."""
    for name, stats in s.stats.items():
        if len(s.shape(name) or ()) > 1 and LARGEST_WEIGHT < stats.largest < float("inf"):
            yield Finding(
                name, f"weights within {LARGEST_WEIGHT:g}", f"up to {stats.largest:.4g}", RECONVERT
            )


@rule("G4-VAL-009", WARNING, "1 should not be subtracted from the norms", needs=FILE)
def norms_centred(s: Subject) -> Findings:
    """Gemma 2 and 3 store norms minus 1, Gemma 4 and Qwen unchanged. Trained norms are hardly ever
    negative; minus 1, a quarter of them have many negative weights."""
    norms = _norms(s)
    negative = [name for name, x in norms.items() if float((x < 0).mean()) > 0.25]
    if norms and len(negative) * 4 >= len(norms):
        found = f"{len(negative)} of {len(norms)} with many weights below 0"
        yield Finding(negative[0], "norms around 1", found, SHIFTED)


@rule("G4-VAL-010", WARNING, "1 should not be added to the norms", needs=FILE)
def norms_shifted(s: Subject) -> Findings:
    """A converter made for Gemma 3 adds one to every norm, which is right there: the draft still
    writes, from activations twice as large. Unshifted, some weight of some norm is below 0.9."""
    norms = _norms(s)
    if norms and all(float(np.percentile(x, 1)) >= 0.9 for x in norms.values()):
        middle = float(np.median([float(np.median(x)) for x in norms.values()]))
        if middle >= 1.5:
            yield Finding("norms", "some weights below 0.9", f"none; median {middle:.2f}", SHIFTED)


def _norms(s: Subject) -> dict[str, NDArray[np.float32]]:
    """Return the finite norm vectors by name."""
    names = [n for n in s.open_file.tensors if n.endswith("norm.weight")]
    found = {n: s.open_file.array(n).reshape(-1) for n in names if s.type_name(n) == "F32"}
    return {n: x for n, x in found.items() if x.size and np.isfinite(x).all()}
