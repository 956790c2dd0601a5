"""Heads of DSpark and EAGLE-3 drafts, and how upstream runs a draft."""

from __future__ import annotations

from g4spec.models import upstream
from g4spec.models.dflash_backbone import GEMMA_MARK
from g4spec.models.dspark import UNIQUE_TENSORS
from g4spec.validate.needs import Needs
from g4spec.validate.rule import (
    DFLASH,
    DRAFTS,
    EAGLE,
    ERROR,
    NOTE,
    RECONVERT,
    WARNING,
    Finding,
    Findings,
    rule,
)
from g4spec.validate.subject import Subject

FILE = Needs.FILE


@rule(
    "G4-HEAD-001",
    ERROR,
    "the metadata of a DSpark draft must say which row drafts first",
    on=DFLASH,
    needs=FILE,
)
def first_row(s: Subject) -> Findings:
    """DeepSpec reads from the anchor's row on, RedHat's drafts from the next one. A loader that
    guesses is off by one: only the first drafted token is ever accepted."""
    if any(s.shape(name) for name in UNIQUE_TENSORS) and not s.has(".sample_from_anchor"):
        yield Finding(s.name(".sample_from_anchor"), "true or false", "nothing", RECONVERT)


@rule(
    "G4-HEAD-002",
    ERROR,
    "the confidence head must be present if the metadata says so",
    on=DFLASH,
    needs=FILE,
)
def confidence(s: Subject) -> Findings:
    """Upstream with --spec-draft-p-min drafts nothing, without an error, when the key is
    true or missing and the head is not there."""
    has_head, recorded = s.shape("conf_proj.weight") is not None, s.flag(".has_confidence_head")
    if recorded is not None and recorded != has_head:
        yield Finding(s.name(".has_confidence_head"), has_head, recorded, RECONVERT)


@rule(
    "G4-HEAD-003",
    WARNING,
    "the metadata of an EAGLE-3 draft should have norm_before_residual",
    on=EAGLE,
    needs=FILE,
)
def residual(s: Subject) -> Findings:
    """`norm_before_residual` is false by default in speculators and llama.cpp and true in vLLM;
    RedHat's drafts are trained with true. The wrong one drafts noise."""
    if not s.has(".norm_before_residual"):
        yield Finding(s.name(".norm_before_residual"), "true or false", "nothing", RECONVERT)


@rule(
    "G4-HEAD-004",
    ERROR,
    "a draft that upstream would compute wrongly must have an architecture that it refuses",
    on=DRAFTS,
)
def refused(s: Subject) -> Findings:
    """A gated Markov head, a P-EAGLE block or a draft that starts in another row also loads in an
    engine without support for it, and is slow there for no visible reason."""
    verdict = upstream.judge(getattr(s.kind, "LIMITS", ()), s.config)
    if verdict.case == "refused" and s.arch in upstream.ARCHITECTURES:
        why = next(limit for limit in verdict.reasons if limit.case == "refused")
        yield Finding(
            "general.architecture",
            f"{s.arch}{upstream.REFUSED_SUFFIX}, for {why.what}",
            s.arch,
            RECONVERT,
        )


@rule(
    "G4-HEAD-005",
    NOTE,
    "a draft that upstream computes correctly should have an architecture that it loads",
    on=DRAFTS,
)
def needlessly(s: Subject) -> Findings:
    """A file under our own architecture name runs here only; when upstream would run it as it was
    trained, the name is a mistake."""
    verdict = upstream.judge(getattr(s.kind, "LIMITS", ()), s.config)
    if verdict.case != "refused" and str(s.arch).endswith(upstream.REFUSED_SUFFIX):
        yield Finding(
            "general.architecture",
            str(s.arch).removesuffix(upstream.REFUSED_SUFFIX),
            s.arch,
            RECONVERT,
        )


@rule(
    "G4-HEAD-006",
    WARNING,
    "a DeepSpec draft should start in its anchor's row",
    on=DFLASH,
    needs=FILE,
)
def anchored(s: Subject) -> Findings:
    """DeepSpec's layers, with four norms, were trained to draft from the anchor's row on. A rewrite
    by a tool that knows RedHat's drafts only says false, and every token is one place late."""
    if s.shape(GEMMA_MARK) is not None and s.flag(".sample_from_anchor") is False:
        yield Finding(s.name(".sample_from_anchor"), "true", "false", RECONVERT)
