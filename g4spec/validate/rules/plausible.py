"""Values that no published model has: off by one, doubled, halved, or of another model family.

These rules run without the source. Most are warnings, because an unusual model may be correct.
`--against` compares every key with what the source says.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np

from g4spec.convert import provenance
from g4spec.models.fields import MAX_LAYERS
from g4spec.validate.needs import Needs
from g4spec.validate.rule import (
    COMPARE,
    DFLASH,
    DRAFTS,
    ERROR,
    GEMMA,
    TAPPED,
    TARGETS,
    WARNING,
    Finding,
    Findings,
    rule,
)
from g4spec.validate.subject import Subject

FILE, TARGET = Needs.FILE, Needs.TARGET
PATTERN = ".attention.sliding_window_pattern"
EPSILONS = (1e-6, 1e-5)
BASES = (1e4, 1e5, 5e5, 1e6, 5e6, 1e7)
"""Rotation bases of Llama, Qwen and Gemma models."""
GEMMA_BASES = {".rope.freq_base": 1e6, ".rope.freq_base_swa": 1e4}
PERIODS = {35: 5, 42: 6, 48: 6, 30: 6, 60: 6}
"""Number of layers of a published target -> period of its full-attention layers."""
CAP = 30.0
DIGESTS = {
    provenance.WEIGHTS: r"rows-sha256:[0-9a-f]{64}",
    provenance.TARGET_WEIGHTS: r"rows-sha256:[0-9a-f]{64}",
    provenance.TARGET_TOKENIZER: r"[0-9a-f]{64}",
    provenance.T2D_SHA256: r"[0-9a-f]{64}",
}


@rule("G4-KEY-013", ERROR, "full layers must be where a Gemma 4 has them", on=GEMMA, needs=FILE)
def pattern(s: Subject) -> Findings:
    """Every Gemma 4 has one full layer after each four or five sliding ones, and a full one at the
    end. An array that was shifted, inverted or cut from another size sends layers of one kind
    through the shapes and caches of the other: the file describes no model, and most other rules
    cannot run."""
    found = s.numbers(PATTERN)
    n = 0 if found is None else len(found)
    if found is None or not 0 < n <= MAX_LAYERS:
        return
    full = [i + 1 for i in range(n) if not found[i]]
    period = PERIODS.get(n) if s.arch in TARGETS else None
    wanted = period or (full[0] if full else n)
    if full != _every(wanted, n) or (period is None and full and full[0] < 2 < n):
        yield Finding(
            s.name(PATTERN),
            f"full layers {_every(max(wanted, 2), n)}, counted from 1",
            full or "none",
            "take layer_types from the checkpoint",
        )


@rule(
    "G4-KEY-014", WARNING, "epsilon and rotation bases should be ones that models have", needs=FILE
)
def constants(s: Subject) -> Findings:
    """A doubled base or an epsilon of another family changes every number a little: the text stays
    plausible, and a draft loses a third of its acceptance (rotation base 1e4 instead of 1e6: 7 %
    instead of 23 %)."""
    checks: dict[str, Iterable[float]] = {".attention.layer_norm_rms_epsilon": EPSILONS}
    for key, base in GEMMA_BASES.items():
        checks[key] = (base,) if s.arch in GEMMA else BASES
    for key, allowed in checks.items():
        found = s.number(key)
        if found is not None and not any(np.float32(found) == np.float32(x) for x in allowed):
            yield Finding(
                s.name(key), " or ".join(f"{x:g}" for x in allowed), f"{found:g}", COMPARE
            )


@rule("G4-KEY-015", WARNING, "context and window should be round numbers", needs=FILE)
def rounded(s: Subject) -> Findings:
    """A window counted with or without the token itself: trainers write 512, 1024 or 2048, and an
    engine that stores one more or one less sees another row than the model was trained with."""
    for key, unit in ((".context_length", 64), (".attention.sliding_window", 8)):
        found = s.integer(key)
        if found is not None and found % unit:
            yield Finding(s.name(key), f"a multiple of {unit}", found, COMPARE)


@rule(
    "G4-KEY-016",
    WARNING,
    "the container's own keys should be those of this kind of file",
    needs=FILE,
)
def container(s: Subject) -> Findings:
    """`general.type` other than a model's makes loaders take the file for an adapter; quantization
    version 2 is the only one that the block layouts of today have."""
    kind, version = s.text("general.type"), s.integer("general.quantization_version")
    if kind not in (None, "model"):
        yield Finding("general.type", "model", kind, "convert again with g4spec convert")
    if version not in (None, 2):
        yield Finding(
            "general.quantization_version", 2, version, "convert again with g4spec convert"
        )


@rule("G4-KEY-017", WARNING, "digests should be complete", needs=FILE)
def digests(s: Subject) -> Findings:
    """A digest that was cut or edited can never be equal to the one that it is compared with, so
    that a wrong target would pass for one of unknown origin."""
    for key, form in DIGESTS.items():
        found = s.text(key)
        if found is not None and not re.fullmatch(form, found):
            yield Finding(
                key, "64 hexadecimal digits", f"{found!r:.40}", "convert again with g4spec convert"
            )


@rule(
    "G4-KEY-018",
    WARNING,
    "a converted draft should have recorded facts about its target",
    on=DRAFTS,
    needs=FILE,
)
def remembers(s: Subject) -> Findings:
    """Without the facts that were recorded at conversion a target of another depth, width or
    tokenizer cannot be told from the right one. Files by other tools do not have them."""
    if s.has(provenance.VERSIONS):
        keys = (provenance.TARGET_LAYERS, provenance.TARGET_HIDDEN, provenance.TARGET_TOKENIZER)
        for key in keys:
            if not s.has(key):
                yield Finding(
                    key, "what was recorded at conversion", "nothing", "convert again with --target"
                )


@rule(
    "G4-KEY-019", WARNING, "recommended sampling settings should be valid", on=TARGETS, needs=FILE
)
def sampling(s: Subject) -> Findings:
    """llama.cpp takes these as defaults: a top-p above 1 or a negative temperature is a value in
    the wrong key."""
    for name, low, high in (("top_p", 0.0, 1.0), ("min_p", 0.0, 1.0), ("temp", 0.0, 1.5)):
        found = s.number(f"general.sampling.{name}")
        if found is not None and not low <= found <= high:
            yield Finding(
                f"general.sampling.{name}",
                f"{low:g} to {high:g}",
                found,
                "take it from generation_config.json",
            )


@rule("G4-LAY-003", WARNING, "the target should cap its logits at 30", on=TARGETS, needs=FILE)
def cap(s: Subject) -> Findings:
    """Every published Gemma 4 caps its logits at 30; another cap changes how sharp sampling is,
    and what a draft that borrows the head proposes."""
    found = s.number(".final_logit_softcapping")
    if found is not None and found not in (0.0, CAP):
        yield Finding("gemma4.final_logit_softcapping", f"{CAP:g}, or 0 for none", found, COMPARE)


@rule(
    "G4-BLK-016", WARNING, "the block should be as long as trainers make it", on=DFLASH, needs=FILE
)
def block(s: Subject) -> Findings:
    """z-lab trains blocks of 16 rows, RedHat of 8, DeepSpec of 7 drafts. A block_size that counts
    the drafts instead of the rows, or the other way round, gives every row but the first another
    neighbourhood than in training."""
    size = s.integer(".block_size")
    if size is None or size < 2:
        return
    rows = size + bool(s.flag(".sample_from_anchor"))
    if not _power_of_two(size) and not _power_of_two(rows):
        yield Finding(s.name(".block_size"), "4, 8 or 16 rows", size, COMPARE)


@rule(
    "G4-PAIR-018",
    WARNING,
    "the draft should not be made for a longer context",
    on=TAPPED,
    needs=TARGET,
)
def longer(s: Subject) -> Findings:
    """Trainers give a draft its target's context length; one for more positions than the target
    has was made for another one, or the number is wrong."""
    mine, its = s.integer(".context_length"), s.its_target.integer(".context_length")
    if mine is not None and its is not None and mine > its:
        yield Finding(s.name(".context_length"), f"at most {its}", mine, COMPARE)


@rule(
    "G4-PAIR-019",
    WARNING,
    "logits should be capped as the target's, or not at all",
    on=TAPPED,
    needs=TARGET,
)
def same_cap(s: Subject) -> Findings:
    """A draft with its own head caps as its target does, or was trained without a cap."""
    mine, its = s.number(".final_logit_softcapping"), s.its_target.config.softcap
    if mine is not None and mine not in (0.0, its):
        yield Finding(s.name(".final_logit_softcapping"), f"{its:g}, or 0", mine, COMPARE)


def _every(period: int, n: int) -> list[int]:
    """Numbers of the full layers, counted from 1: every `period`th, and the last one."""
    return sorted({*range(period, n + 1, period), n})


def _power_of_two(n: int) -> bool:
    return n & (n - 1) == 0
