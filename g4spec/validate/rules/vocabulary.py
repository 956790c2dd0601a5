"""The tokenizer in the file, its special tokens and its template.

Every draft carries its target's tokenizer: upstream loads no file without one.
"""

from __future__ import annotations

from collections import Counter

from g4spec.convert.tokenizer import STOP_IDS
from g4spec.models import ollama
from g4spec.validate.needs import Needs
from g4spec.validate.rule import EAGLE, ERROR, TARGETS, WARNING, Finding, Findings, rule
from g4spec.validate.subject import Subject

FILE = Needs.FILE
TOKENS = "tokenizer.ggml.tokens"
SPECIAL = ("bos", "eos", "eot", "unknown", "padding", "mask")
STOP_TOKENS = {1: "<eos>", 50: "<|tool_response>", 106: "<turn|>"}
FROM_TARGET = "convert again with --target, which copies the target's tokenizer"
BY_OLLAMA = "none for g4spec, which reads it; llama.cpp needs a file that Ollama did not write"


def special_ids(s: Subject) -> dict[str, int]:
    """Return role -> special token id, for the roles in the file."""
    found = {role: s.integer(f"tokenizer.ggml.{role}_token_id") for role in SPECIAL}
    return {role: i for role, i in found.items() if i is not None}


@rule("G4-VOC-001", ERROR, "the tokenizer must be Gemma 4's", needs=FILE)
def model(s: Subject) -> Findings:
    """A DFlash converter that took the Qwen path, because the draft's layers are Qwen's, failed
    on the tokenizer or wrote one that splits differently; some wrote none. That of EAGLE-3 drafts,
    which llama.cpp's converter calls "llama", only lists the tokens."""
    found = s.text("tokenizer.ggml.model")
    if found != "gemma4" and (s.arch not in EAGLE or found != "llama"):
        yield Finding("tokenizer.ggml.model", "gemma4", found or "nothing", tokenizer_fix(s))


def tokenizer_fix(s: Subject) -> str:
    """Return the fix for a tokenizer that is not as upstream writes it."""
    keys = (ollama.MODEL, ollama.PRE)
    theirs = ollama.has_tokenizer({key: s.text(key) for key in keys})
    return BY_OLLAMA if theirs and s.arch == "gemma4" else FROM_TARGET


@rule("G4-VOC-002", ERROR, "scores and types must have one entry per token", needs=FILE)
def lengths(s: Subject) -> Findings:
    """Lists of different tokenizers: types then mark the wrong tokens as control."""
    n = s.count(TOKENS)
    for key in ("tokenizer.ggml.scores", "tokenizer.ggml.token_type"):
        found = s.count(key)
        if n is not None and found is not None and found != n:
            yield Finding(key, n, found, FROM_TARGET)


@rule("G4-VOC-003", ERROR, "tokens must be unique", needs=FILE)
def unique(s: Subject) -> Findings:
    """Two ids for one text: which one the tokenizer gives depends on the loader."""
    tokens = s.strings(TOKENS) or []
    if len(set(tokens)) != len(tokens):
        text, n = Counter(tokens).most_common(1)[0]
        yield Finding(TOKENS, "different tokens", f"{text!r:.40} {n} times", FROM_TARGET)


@rule("G4-VOC-004", ERROR, "merges must be pairs", needs=FILE)
def merges(s: Subject) -> Findings:
    """Without its merges a BPE tokenizer spells every word letter by letter, and the text that
    comes out still looks like text."""
    found = s.strings("tokenizer.ggml.merges")
    if found is None:
        return
    if not found:
        yield Finding("tokenizer.ggml.merges", "pairs", "none", FROM_TARGET)
    bad = next((m for m in found if " " not in m[1:]), None)
    if bad is not None:
        yield Finding("tokenizer.ggml.merges", "left and right half", f"{bad!r:.40}", FROM_TARGET)


@rule("G4-VOC-005", ERROR, "special token ids must be tokens", needs=FILE)
def in_range(s: Subject) -> Findings:
    """An id beyond the vocabulary aborts upstream ("invalid token") at the first use."""
    n, stop_ids = s.count(TOKENS), s.numbers(STOP_IDS)
    named = [(f"tokenizer.ggml.{role}_token_id", i) for role, i in special_ids(s).items()]
    named += [(STOP_IDS, int(i)) for i in (stop_ids if stop_ids is not None else ())]
    for key, i in named:
        if n is not None and not 0 <= i < n:
            yield Finding(key, f"0 to {n - 1}", i, FROM_TARGET)


@rule("G4-VOC-006", WARNING, "prompts should get a BOS prepended", needs=FILE)
def add_bos(s: Subject) -> Findings:
    """Gemma without `<bos>` at position 0 writes degenerate text, and its draft proposes
    nothing that is accepted. Instruction-tuned checkpoints say false, as their template adds it."""
    if s.flag("tokenizer.ggml.add_bos_token") is not True:
        yield Finding(
            "tokenizer.ggml.add_bos_token",
            "true",
            s.flag("tokenizer.ggml.add_bos_token"),
            "set it to true; no prompt ever gets a second one",
        )


@rule("G4-VOC-007", WARNING, "the target should have a chat template", on=TARGETS, needs=FILE)
def template(s: Subject) -> Findings:
    """Without one, chat prompts are guessed, and an instruction-tuned model answers badly."""
    if not s.text("tokenizer.chat_template"):
        yield Finding(
            "tokenizer.chat_template",
            "a template",
            "nothing",
            "add the checkpoint's template if this is a chat model",
        )


@rule("G4-VOC-008", ERROR, "the token table must have one row per token", needs=FILE)
def table(s: Subject) -> Findings:
    """A table padded to a round number, or of another size of model, has rows without a token."""
    shape, n = s.shape("token_embd.weight"), s.count(TOKENS)
    if shape and n is not None and shape[0] != n:
        yield Finding("token_embd.weight", f"{n} rows", shape[0], FROM_TARGET)


@rule("G4-VOC-009", WARNING, "stop ids should be Gemma's stop tokens", needs=FILE)
def stops(s: Subject) -> Findings:
    """Generation ends at `<eos>`, `<turn|>` and `<|tool_response>`, ids 1, 106 and 50. With
    another tokenizer these ids are other tokens, and text ends in the middle."""
    tokens = s.strings(TOKENS) or []
    for i, text in STOP_TOKENS.items():
        if tokens and (i >= len(tokens) or tokens[i] != text):
            found = repr(tokens[i]) if i < len(tokens) else "nothing"
            yield Finding(f"token {i}", text, found, "use a Gemma 4 tokenizer")


@rule("G4-VOC-010", ERROR, "the end of a turn must not be a line break", needs=FILE)
def newline(s: Subject) -> Findings:
    """A loader that found no end-of-turn id fell back to 107, which is a line break: answers
    ended at their first paragraph, or never where 106 went unnoticed."""
    tokens = s.strings(TOKENS) or []
    for role in ("eos", "eot"):
        i = special_ids(s).get(role)
        if i is not None and 0 <= i < len(tokens) and not tokens[i].strip():
            yield Finding(
                f"tokenizer.ggml.{role}_token_id",
                "1 or 106",
                f"{i}, a line break",
                "set it to 106 (<turn|>)",
            )


@rule("G4-VOC-011", ERROR, "prompts must not get a space prepended", needs=FILE)
def space_prefix(s: Subject) -> Findings:
    """Upstream's default for a missing key is false, a true one changes the first token."""
    if s.flag("tokenizer.ggml.add_space_prefix"):
        yield Finding("tokenizer.ggml.add_space_prefix", "false", "true", FROM_TARGET)
