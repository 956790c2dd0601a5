"""A draft and its target (`--target`), and requirements on the target itself."""

from __future__ import annotations

from g4spec.convert import provenance
from g4spec.validate.needs import Needs
from g4spec.validate.rule import (
    DFLASH,
    DRAFTS,
    ERROR,
    NOTE,
    TARGETS,
    WARNING,
    Finding,
    Findings,
    rule,
)
from g4spec.validate.rules.vocabulary import TOKENS, special_ids
from g4spec.validate.subject import Subject

TARGET = Needs.TARGET
OTHER = "use the target this draft was trained for"
FROM_TARGET = "convert the draft again with --target and this target"
MERGES = "tokenizer.ggml.merges"


@rule("G4-PAIR-001", ERROR, "hidden sizes must be equal", on=DFLASH, needs=TARGET)
def hidden(s: Subject) -> Findings:
    """A draft for another size of target: upstream aborts inside a matrix product."""
    target = s.its_target
    if s.config.n_embd != target.config.n_embd:
        yield Finding(s.name(".embedding_length"), target.config.n_embd, s.config.n_embd, OTHER)


@rule("G4-PAIR-002", ERROR, "vocabularies must have the same size", on=DRAFTS, needs=TARGET)
def size(s: Subject) -> Findings:
    """Compared with the target at hand, not with Gemma's 262,144: models with pruned or extended
    vocabularies are right when both agree."""
    target = s.its_target
    if s.config.n_vocab != target.config.n_vocab:
        yield Finding("vocabulary", target.config.n_vocab, s.config.n_vocab, OTHER)


@rule("G4-PAIR-003", ERROR, "both must have the same tokens", on=DRAFTS, needs=TARGET)
def tokens(s: Subject) -> Findings:
    """Same size, other tokens: a fine-tune that reused unused entries, or a draft of another
    family. Proposals are then other words than the draft meant."""
    mine, its = s.strings(TOKENS) or [], s.its_target.strings(TOKENS) or []
    if len(mine) == len(its) and mine != its:
        i = next(i for i, (a, b) in enumerate(zip(mine, its, strict=True)) if a != b)
        yield Finding(f"{TOKENS}[{i}]", f"{its[i]!r:.40}", f"{mine[i]!r:.40}", FROM_TARGET)


@rule("G4-PAIR-004", WARNING, "both should have the same merges", on=DRAFTS, needs=TARGET)
def merges(s: Subject) -> Findings:
    """The target's tokenizer is the one that counts; another one in the draft shows that it was
    converted with another revision."""
    mine, its = s.strings(MERGES), s.its_target.strings(MERGES)
    if mine is not None and its is not None and mine != its:
        yield Finding(MERGES, f"the target's {len(its)}", f"{len(mine)} others", FROM_TARGET)


@rule("G4-PAIR-005", WARNING, "special tokens should have the same ids", on=DRAFTS, needs=TARGET)
def special(s: Subject) -> Findings:
    """A draft with another end-of-text id was converted with another checkpoint."""
    mine, its = special_ids(s), special_ids(s.its_target)
    for role in ("bos", "eos", "unknown", "padding"):
        if role in mine and role in its and mine[role] != its[role]:
            yield Finding(f"tokenizer.ggml.{role}_token_id", its[role], mine[role], FROM_TARGET)


@rule(
    "G4-PAIR-006",
    ERROR,
    "the target must have the depth it had at conversion",
    on=DRAFTS,
    needs=TARGET,
)
def depth(s: Subject) -> Findings:
    """Two targets of the same width and another depth: layer ids then name other layers."""
    recorded, n = s.integer(provenance.TARGET_LAYERS), len(s.its_target.config.layers)
    if recorded is not None and recorded != n:
        yield Finding("target layers", recorded, n, OTHER)


@rule(
    "G4-PAIR-007",
    WARNING,
    "the target's tokenizer should be the one of the conversion",
    on=DRAFTS,
    needs=TARGET,
)
def tokenizer(s: Subject) -> Findings:
    """The draft was converted with another revision of the target. Quantizing a target does
    not change its tokenizer."""
    recorded, target = s.text(provenance.TARGET_TOKENIZER), s.its_target
    if recorded:
        lists = (target.strings(TOKENS) or [], target.strings(MERGES) or [])
        found = provenance.tokenizer_sha256(*lists)
        if found != recorded:
            yield Finding(provenance.TARGET_TOKENIZER, recorded[:16], found[:16], FROM_TARGET)


@rule(
    "G4-PAIR-015",
    WARNING,
    "the target's weights should be those of the conversion",
    on=DRAFTS,
    needs=TARGET,
)
def weights(s: Subject) -> Findings:
    """The draft was converted with another revision of the target, a fine-tune, or a checkpoint
    that was quantized already. It runs, and accepts as much as the two targets agree. Judged by a
    digest over two rows of every published tensor, which quantizing a GGUF does not change; files
    by other tools do not carry it."""
    recorded, found = s.text(provenance.TARGET_WEIGHTS), s.its_target.text(provenance.WEIGHTS)
    if recorded and found and recorded != found:
        mine = s.text(provenance.TARGET_SOURCE), s.text(provenance.TARGET_REVISION)
        its = s.its_target.text(provenance.SOURCE), s.its_target.text(provenance.REVISION)
        yield Finding(
            provenance.TARGET_WEIGHTS,
            _origin(recorded, *mine),
            _origin(found, *its),
            OTHER + ", or if this is it, " + FROM_TARGET,
        )


@rule(
    "G4-PAIR-016",
    NOTE,
    "the target's commit should be that of the conversion",
    on=DRAFTS,
    needs=TARGET,
)
def commit(s: Subject) -> Findings:
    """Asked where one of the two does not know its weights' digest: a draft converted with the id
    of a target on the hub, of which only the small files are fetched. Two commits of a repository
    may differ in weights, or in a README only."""
    target = s.its_target
    if s.text(provenance.TARGET_WEIGHTS) and target.text(provenance.WEIGHTS):
        return
    mine = s.text(provenance.TARGET_SOURCE), s.text(provenance.TARGET_REVISION)
    its = target.text(provenance.SOURCE), target.text(provenance.REVISION)
    if all(mine) and all(its) and mine[0] == its[0] and mine[1] != its[1]:
        yield Finding(
            provenance.TARGET_REVISION,
            mine[1],
            its[1],
            "compare the two commits; if weights changed, " + FROM_TARGET,
        )


@rule("G4-PAIR-008", WARNING, "logits should be capped alike", on=DFLASH, needs=TARGET)
def softcap(s: Subject) -> Findings:
    """A draft that borrows the target's head caps its logits as the target does; a missing cap
    changes nothing at temperature 0 and costs acceptance above."""
    target = s.its_target
    if not s.config.own_head and s.config.softcap != target.config.softcap:
        yield Finding(
            s.name(".final_logit_softcapping"),
            target.config.softcap,
            s.config.softcap,
            "take final_logit_softcapping from the draft's configuration",
        )


@rule(
    "G4-PAIR-009",
    NOTE,
    "the draft should be trained for the target's context",
    on=DRAFTS,
    needs=TARGET,
)
def context(s: Subject) -> Findings:
    """Beyond its own context a draft proposes worse: one reported 10.7 accepted tokens at 32,768
    and 1.2 at 65,536 (there a cache bug had its part)."""
    mine, its = s.integer(".context_length"), s.its_target.integer(".context_length")
    if mine is not None and its is not None and mine < its:
        yield Finding(
            s.name(".context_length"),
            f"{its} or more",
            mine,
            "expect fewer accepted tokens beyond it",
        )


@rule("G4-LAY-002", WARNING, "the target should have final_logit_softcapping", on=TARGETS)
def capped(s: Subject) -> Findings:
    """Gemma 4 caps at 30. Where the key is missing upstream caps at 30 and this runtime does not
    cap at all: the correct value is unknown. 0 says that there is no cap."""
    if not s.has(".final_logit_softcapping"):
        yield Finding(
            "gemma4.final_logit_softcapping",
            "30, or 0 for none",
            "nothing",
            "take final_logit_softcapping from the checkpoint",
        )


def _origin(digest: str, name: str | None, revision: str | None) -> str:
    """Describe a checkpoint by its name, commit and digest, as far as they are known."""
    commit = f"@{revision[:12]}" if revision else ""
    return f"{name or 'a checkpoint'}{commit} ({digest[:20]})"
