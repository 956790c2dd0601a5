"""The mask token, which fills the rows of a DFlash block that are to be drafted."""

from __future__ import annotations

from g4spec.models.spec import GEMMA_STOP_IDS
from g4spec.validate.needs import Needs
from g4spec.validate.rule import DFLASH, ERROR, WARNING, Finding, Findings, rule
from g4spec.validate.rules.vocabulary import TOKENS, special_ids
from g4spec.validate.subject import Subject

KEY = "tokenizer.ggml.mask_token_id"
FILE = Needs.FILE
FIX = "take mask_token_id from the draft's configuration"


@rule("G4-MASK-001", ERROR, "the draft must have a mask token", on=DFLASH, needs=FILE)
def present(s: Subject) -> Findings:
    """Upstream takes the mask from the vocabulary; without one it decodes token -1 and fails."""
    if s.integer(KEY) is None:
        yield Finding(KEY, "a token id (4 in Gemma 4)", "nothing", FIX)


@rule(
    "G4-MASK-002", ERROR, "the mask token must have a row in the token table", on=DFLASH, needs=FILE
)
def in_range(s: Subject) -> Findings:
    """A fork's default of 248070, made for another model, reads beyond the table."""
    i, n = s.integer(KEY), s.n_vocab
    if i is not None and n is not None and not 0 <= i < n:
        yield Finding(KEY, f"0 to {n - 1}", i, FIX)


@rule("G4-MASK-003", WARNING, "the mask token should be `<mask>`", on=DFLASH, needs=FILE)
def named(s: Subject) -> Findings:
    """A draft trained with `<mask>` and run with another token fills its block with ordinary
    words: acceptance falls, with no other symptom."""
    i, tokens = s.integer(KEY), s.strings(TOKENS) or []
    if i is not None and 0 <= i < len(tokens) and "mask" not in tokens[i].lower():
        yield Finding(KEY, "<mask>", f"{i}, {tokens[i]!r:.40}", FIX)


@rule("G4-MASK-004", ERROR, "the mask token must have no other use", on=DFLASH, needs=FILE)
def no_other_duty(s: Subject) -> Findings:
    """A tokenizer without a mask made tools reuse padding or end-of-text for it, whose rows were
    trained to mean the opposite of "to be filled"."""
    i = s.integer(KEY)
    duties = {v: role for role, v in special_ids(s).items() if role != "mask"}
    duties |= {stop: "stop" for stop in GEMMA_STOP_IDS}
    if i in duties:
        yield Finding(KEY, "a token of its own", f"{i}, the {duties[i]} token", FIX)
