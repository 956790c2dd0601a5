"""Blocks of DFlash drafts: length, embedding scale, window and causality."""

from __future__ import annotations

import math

from g4spec.core import MAX_DRAFT, MAX_STEP_ROWS
from g4spec.models.dflash_backbone import (
    FULL_CAUSAL,
    GEMMA_MARK,
    OTHER_SCALE,
    SCALE_TOLERANCE,
    shared_causality,
)
from g4spec.validate.needs import Needs
from g4spec.validate.rule import DFLASH, ERROR, NOTE, WARNING, Finding, Findings, rule
from g4spec.validate.subject import Subject

FILE = Needs.FILE
CAUSAL = "g4spec.dflash.layer_causal"
FROM_ANCHOR = "g4spec.dflash.window_from_anchor"
SCALE = ".embedding_scale"
WINDOW = ".attention.sliding_window"


def from_speculators(s: Subject) -> bool:
    """Return whether the draft is from speculators: recorded by our converter; in other files, a
    draft with its own tables, or a key that llama.cpp's converter writes for no draft of z-lab. One
    with the layers of Gemma is DeepSpec's."""
    recorded = s.flag(FROM_ANCHOR)
    if recorded is not None:
        return recorded
    own_tables = any(s.shape(name) is not None for name in ("token_embd.weight", "d2t"))
    return (own_tables or s.has(".sample_from_anchor")) and s.shape(GEMMA_MARK) is None


def pattern(s: Subject) -> list[bool]:
    found = s.numbers(".attention.sliding_window_pattern")
    return [] if found is None else [bool(x) for x in found]


def causality(s: Subject) -> list[bool]:
    found = s.numbers(CAUSAL)
    return [] if found is None else [bool(x) for x in found]


@rule(
    "G4-BLK-001",
    ERROR,
    "a block must have room for an anchor and a drafted token",
    on=DFLASH,
    needs=FILE,
)
def long_enough(s: Subject) -> Findings:
    """A block of 1 drafts nothing, and some engines divide by block_size - 1."""
    size = s.integer(".block_size")
    if size is not None and size < 2:
        yield Finding(s.name(".block_size"), "2 or more", size, "take it from the checkpoint")


@rule("G4-BLK-002", ERROR, f"a block must draft at most {MAX_DRAFT} tokens", on=DFLASH, needs=FILE)
def short_enough(s: Subject) -> Findings:
    """A step has at most 16 rows, so that all rows use the same kernels; the runtime refuses more.
    Files by other tools hold the context length here."""
    size = s.integer(".block_size")
    if size is not None and size > MAX_STEP_ROWS:
        yield Finding(
            s.name(".block_size"), f"at most {MAX_STEP_ROWS}", size, f"set it to {MAX_STEP_ROWS}"
        )


@rule("G4-BLK-003", WARNING, "a z-lab draft should have an embedding scale", on=DFLASH, needs=FILE)
def scale_missing(s: Subject) -> Findings:
    """z-lab trains on Gemma's embedding, which multiplies by sqrt(hidden). Their configuration
    does not say so, upstream's converter writes no key, and the block sees rows 73 times too
    small."""
    hidden = s.integer(".embedding_length")
    if hidden and not from_speculators(s) and not s.has(SCALE) and s.number(OTHER_SCALE) != 1:
        yield Finding(
            s.name(SCALE),
            f"{math.sqrt(hidden):.4f} = sqrt({hidden})",
            "nothing",
            "convert again with g4spec convert",
        )


@rule(
    "G4-BLK-004",
    ERROR,
    "an embedding scale must be the square root of the hidden size",
    on=DFLASH,
    needs=FILE,
)
def scale_wrong(s: Subject) -> Findings:
    """hidden instead of its root, the root of the target of another size, or the root applied
    twice. bfloat16 rounding (73.5 for 73.32) is allowed, and another scale that the checkpoint
    configures: the converter records it."""
    hidden, found = s.integer(".embedding_length"), s.number(SCALE)
    if hidden and found is not None and not from_speculators(s):
        expected = s.number(OTHER_SCALE) or math.sqrt(hidden)
        if not abs(found - expected) <= SCALE_TOLERANCE * expected:
            yield Finding(
                s.name(SCALE), f"{expected:.4f}", found, "convert again with g4spec convert"
            )


@rule(
    "G4-BLK-005", ERROR, "a speculators draft must have no embedding scale", on=DFLASH, needs=FILE
)
def scale_doubled(s: Subject) -> Findings:
    """speculators trains on the raw table. Engines that scale every Gemma draft degrade theirs."""
    found = s.number(SCALE)
    if from_speculators(s) and found is not None and found != 1:
        yield Finding(s.name(SCALE), "nothing", found, "remove the key")


@rule("G4-BLK-006", ERROR, "causality must be known for each layer", on=DFLASH, needs=FILE)
def causal_length(s: Subject) -> Findings:
    """One entry too few, and the last layer, the only full one in z-lab's drafts, is guessed."""
    n, found = s.integer(".block_count"), s.count(CAUSAL)
    if n is not None and found is not None and found != n:
        yield Finding(CAUSAL, f"{n} entries", found, "convert again with g4spec convert")


@rule("G4-BLK-007", WARNING, "the file should say which layers are causal", on=DFLASH, needs=FILE)
def causal_unknown(s: Subject) -> Findings:
    """Upstream has one flag for all layers, off by default; the vendor's own code makes sliding
    layers causal inside the block. Run the other way, acceptance falls silently."""
    if not s.has(CAUSAL) and any(pattern(s)):
        yield Finding(
            CAUSAL,
            "true for sliding layers, false for full ones",
            "nothing",
            "convert again from the original checkpoint",
        )


@rule("G4-BLK-008", WARNING, "full layers should not be causal", on=DFLASH, needs=FILE)
def full_is_causal(s: Subject) -> Findings:
    """Only checkpoints that say so have causal full layers (JetSpec's head, is_causal), and the
    converter records it: otherwise the array is inverted, or one flag was taken for all layers."""
    sliding, causal = pattern(s), causality(s)
    if s.flag(FULL_CAUSAL):
        return
    for i, flag in enumerate(causal):
        if flag and not (i < len(sliding) and sliding[i]):
            yield Finding(
                f"{CAUSAL}[{i}]",
                "false on a full layer",
                "true",
                "check is_causal in the draft's configuration",
            )


@rule(
    "G4-BLK-009",
    NOTE,
    "the draft's layers should have one causality, which is all that upstream supports",
    on=DFLASH,
    needs=FILE,
)
def mixed(s: Subject) -> Findings:
    """Upstream applies one causality to all layers: that of most layers. A file with both
    kinds loads there, and its proposals differ slightly from ours; the text is the same."""
    causal = causality(s)
    if len(set(causal)) > 1:
        yield Finding(
            CAUSAL,
            "one value for all layers",
            f"{sum(causal)} of {len(causal)} layers causal",
            "none needed: g4spec runs it as trained, upstream with the causality of most layers "
            "and slightly lower acceptance",
        )


@rule(
    "G4-BLK-015",
    WARNING,
    "the causality flag, which upstream reads, should be that of most layers",
    on=DFLASH,
    needs=FILE,
)
def shared(s: Subject) -> Findings:
    """Upstream has one flag for all layers; a missing flag means not causal. A draft of causal
    layers that runs without causality loses half of its tokens. Our own runtime ignores the
    flag."""
    causal, found = causality(s), bool(s.flag(".attention.causal"))
    if causal and shared_causality(causal) != found:
        yield Finding(
            s.name(".attention.causal"),
            str(not found).lower(),
            str(found).lower() if s.has(".attention.causal") else "nothing, so false",
            "convert again with g4spec convert",
        )


@rule(
    "G4-BLK-010",
    ERROR,
    "window and pattern must both be present, or neither",
    on=DFLASH,
    needs=FILE,
)
def window(s: Subject) -> Findings:
    """A window without a pattern: upstream refuses it, one fork runs all layers without window.
    A pattern without a window makes sliding layers attend to nothing or everything."""
    size, sliding = s.integer(WINDOW) or 0, pattern(s)
    if size > 0 and not s.has(".attention.sliding_window_pattern"):
        yield Finding(
            s.name(".attention.sliding_window_pattern"),
            "an array",
            "nothing",
            "take layer_types from the draft's configuration",
        )
    if size <= 0 and any(sliding):
        yield Finding(
            s.name(WINDOW),
            "the window in tokens",
            size or "nothing",
            "take sliding_window from the draft's configuration",
        )


@rule("G4-BLK-011", ERROR, "a window must be longer than a block", on=DFLASH, needs=FILE)
def window_holds_block(s: Subject) -> Findings:
    """A window shorter than the block hides the anchor from the last rows."""
    size, block = s.integer(WINDOW) or 0, s.integer(".block_size") or 0
    if 0 < size < block:
        yield Finding(
            s.name(WINDOW), f"{block} or more", size, "take it from the draft's configuration"
        )


@rule("G4-BLK-012", ERROR, "a draft with two norms per layer must use SiLU", on=DFLASH, needs=FILE)
def activation(s: Subject) -> Findings:
    """z-lab's layers are Qwen's. A fork ran them with the target's GELU and scale 1.0: fluent
    text, 28 to 44 % acceptance."""
    found = s.text(".hidden_activation")
    if found not in (None, "silu") and s.shape(GEMMA_MARK) is None:
        yield Finding(s.name(".hidden_activation"), "silu", found, "remove the key")


@rule(
    "G4-BLK-013",
    ERROR,
    "a draft with four norms per layer must use GELU and scale 1",
    on=DFLASH,
    needs=FILE,
)
def gemma_layers(s: Subject) -> Findings:
    """DeepSpec's layers are Gemma 4's. Without the two keys upstream runs them with SiLU and
    divides by the root of the head size."""
    if s.shape(GEMMA_MARK) is None:
        return
    for key, wanted, found in (
        (".hidden_activation", "gelu_pytorch_tanh", s.text(".hidden_activation")),
        (".attention.scale", 1.0, s.number(".attention.scale")),
    ):
        if found != wanted:
            yield Finding(s.name(key), wanted, found, "convert again with g4spec convert")
