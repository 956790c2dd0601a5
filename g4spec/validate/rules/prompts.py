"""Chat template, BOS and stop ids of a file, and their equality between draft and target."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from g4spec.convert import provenance
from g4spec.convert.tokenizer import BYTE_TOKEN, STOP_IDS, usual_keys
from g4spec.models.spec import BYTE, CONTROL
from g4spec.runtime.template import syntax_error
from g4spec.validate.needs import Needs
from g4spec.validate.rule import DRAFTS, ERROR, WARNING, Finding, Findings, rule
from g4spec.validate.rules.vocabulary import FROM_TARGET, TOKENS, special_ids, tokenizer_fix
from g4spec.validate.subject import Subject

FILE, TARGET = Needs.FILE, Needs.TARGET
TEMPLATE = "tokenizer.chat_template"
ADD_BOS = "tokenizer.ggml.add_bos_token"
MASK = "tokenizer.ggml.mask_token_id"
COMPARED = {TOKENS, "tokenizer.ggml.merges"} | {
    f"tokenizer.ggml.{name}"
    for name in (
        "bos_token_id",
        "eos_token_id",
        "unknown_token_id",
        "padding_token_id",
        "add_bos_token",
        "add_eos_token",
        "add_space_prefix",
    )
}
"""Keys of the tokenizer that have rules of their own."""
CONTROLS = ("<bos>", "<eos>", "<pad>")
ROLES = {
    "eos": ("<eos>", "<turn|>", "<|tool_response>"),
    "eot": ("<turn|>",),
    "unknown": ("<unk>",),
    "padding": ("<pad>",),
}
MARKS = (
    "<start_of_turn>",
    "<end_of_turn>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|eot_id|>",
    "[INST]",
    "<|turn>",
    "<turn|>",
)
"""Marks of turns that chat templates write; those of Gemma 4 are the last two."""


@rule("G4-VOC-012", ERROR, "chat prompts must begin with a BOS", needs=FILE)
def chat_bos(s: Subject) -> Findings:
    """The template leaves the BOS to the tokenizer and the tokenizer leaves it to the template: no
    prompt gets one, and the model writes degenerate text."""
    template = s.text(TEMPLATE)
    if template and not _writes_bos(template) and s.flag(ADD_BOS) is False:
        yield Finding(
            ADD_BOS,
            "true, as the template writes no BOS",
            "false",
            "set it to true; no prompt ever gets a second one",
        )


@rule("G4-VOC-013", ERROR, "the BOS must be `<bos>`", needs=FILE)
def bos(s: Subject) -> Findings:
    """Gemma's attention relies on `<bos>` at position 0. Another token there, such as the end of
    text that other tokenizers use for both, and the first words are already wrong."""
    tokens, i = s.strings(TOKENS) or [], special_ids(s).get("bos")
    if i is not None and 0 <= i < len(tokens) and tokens[i] != "<bos>":
        yield Finding(
            "tokenizer.ggml.bos_token_id", "<bos>", f"{i}, {tokens[i]!r:.40}", FROM_TARGET
        )


@rule("G4-VOC-014", WARNING, "prompts should not get an EOS appended", needs=FILE)
def add_eos(s: Subject) -> Findings:
    """With an end of text after it every prompt is a finished one: answers are empty, or about
    something else."""
    if s.flag("tokenizer.ggml.add_eos_token"):
        yield Finding("tokenizer.ggml.add_eos_token", "false", "true", "set it to false")


@rule("G4-VOC-015", WARNING, "the template's turn marks should be tokens", needs=FILE)
def marks(s: Subject) -> Findings:
    """A template of Gemma 3 or of another family: its marks are spelled letter by letter, and the
    model that was trained with `<|turn>` sees text where a turn should begin."""
    template, tokens = s.text(TEMPLATE), set(s.strings(TOKENS) or [])
    for mark in MARKS:
        if template and mark in template and mark not in tokens:
            yield Finding(
                TEMPLATE,
                "marks of turns that are tokens",
                mark,
                "take the template of the target's checkpoint",
            )


@rule("G4-PAIR-010", WARNING, "both should have the same chat template", on=DRAFTS, needs=TARGET)
def template(s: Subject) -> Findings:
    """The target's template counts; another one in the draft shows that it was converted with
    another revision, and a server that reads the draft's writes prompts the target does not
    know."""
    mine, its = s.text(TEMPLATE), s.its_target.text(TEMPLATE)
    if mine and its and mine != its:
        same = next(
            (i for i, (a, b) in enumerate(zip(mine, its, strict=False)) if a != b),
            min(len(mine), len(its)),
        )
        yield Finding(
            TEMPLATE,
            f"the target's: {its[same : same + 30]!r} at {same}",
            f"{mine[same : same + 30]!r}",
            FROM_TARGET,
        )


@rule("G4-PAIR-011", WARNING, "both should add the same tokens to prompts", on=DRAFTS, needs=TARGET)
def added(s: Subject) -> Findings:
    """Engines that tokenize for the draft with its own settings give it a prompt that is one token
    shorter than the target's: every position of the draft is off by one."""
    changed = usual_keys(s.its_target.open_file)  # Ollama's, by the conversion
    for name in ("add_bos_token", "add_eos_token", "add_space_prefix"):
        key = f"tokenizer.ggml.{name}"
        mine, its = s.flag(key), changed[key].data if key in changed else s.its_target.flag(key)
        if mine is not None and its is not None and mine != its:
            yield Finding(key, its, mine, FROM_TARGET)


@rule("G4-PAIR-012", WARNING, "both should stop at the same tokens", on=DRAFTS, needs=TARGET)
def stops(s: Subject) -> Findings:
    """The target's generation settings changed since the draft was converted: a base model beside
    a draft for the instruction-tuned one, or the other way round."""
    mine, its = s.numbers(STOP_IDS), s.its_target.numbers(STOP_IDS)
    if mine is not None and its is not None and set(mine.tolist()) != set(its.tolist()):
        yield Finding(STOP_IDS, sorted(its.tolist()), sorted(mine.tolist()), FROM_TARGET)


@rule(
    "G4-PAIR-013",
    ERROR,
    "the target must have the width it had at conversion",
    on=DRAFTS,
    needs=TARGET,
)
def width(s: Subject) -> Findings:
    """A draft for another size of target whose own shapes happen to fit, as those of EAGLE-3 do
    that project the target's features first."""
    recorded, found = s.integer(provenance.TARGET_HIDDEN), int(s.its_target.config.n_embd)
    if recorded is not None and recorded != found:
        yield Finding(
            "target hidden size", recorded, found, "use the target this draft was trained for"
        )


def _writes_bos(template: str) -> bool:
    return "bos_token" in template or "<bos>" in template


@rule(
    "G4-PAIR-017", WARNING, "both should have the same tokenizer settings", on=DRAFTS, needs=TARGET
)
def settings(s: Subject) -> Findings:
    """Scores, token types, roles and suppressed tokens are copied from the target at conversion;
    another value shows that the draft was converted with another revision, or edited. Its mask
    token is the draft's own."""
    target = s.its_target
    changed = usual_keys(target.open_file)
    named = (key for key in {**target.keys, **s.keys} if key.startswith("tokenizer.ggml."))
    for key in named:
        if key in COMPARED or (key not in target.keys and key == MASK):
            continue
        its = _plain(changed[key].data) if key in changed else _value(target, key)
        mine = _value(s, key)
        if mine != its and key != MASK:
            yield Finding(
                key, "the target's", "another value" if key in s.keys else "nothing", FROM_TARGET
            )


@rule("G4-VOC-016", WARNING, "token types should match the tokens", needs=FILE)
def token_types(s: Subject) -> Findings:
    """`<0x41>` is a byte and `<bos>` a control token. Types that were shifted make control tokens
    writable by users, and bytes come out as their names."""
    tokens, types = s.strings(TOKENS) or [], s.numbers("tokenizer.ggml.token_type")
    if types is None or len(types) != len(tokens):
        return
    for i, text in enumerate(tokens):
        wanted = BYTE if BYTE_TOKEN.fullmatch(text) else CONTROL if text in CONTROLS else None
        if (wanted is not None and types[i] != wanted) or not 1 <= types[i] <= BYTE:
            yield Finding(
                f"tokenizer.ggml.token_type[{i}]",
                wanted or f"1 to {BYTE}",
                f"{int(types[i])} for {text!r}",
                tokenizer_fix(s),
            )
            return


@rule("G4-VOC-017", WARNING, "merges should produce tokens, and each should occur once", needs=FILE)
def merged(s: Subject) -> Findings:
    """A list of merges that belongs to another vocabulary, or that was joined twice."""
    found, tokens = s.strings("tokenizer.ggml.merges") or [], set(s.strings(TOKENS) or [])
    if not found or not tokens:
        return
    if len(set(found)) != len(found):
        twice = next(a for a, b in pairwise(sorted(found)) if a == b)
        yield Finding(
            "tokenizer.ggml.merges", "each pair once", f"{twice!r:.40} twice", FROM_TARGET
        )
    joined = ((m, "".join(m.split(" ", 1))) for m in found)  # U+0120 stands for a space
    unknown = (
        m for m, text in joined if text not in tokens and text.replace("\u0120", " ") not in tokens
    )
    lost = next(unknown, None)
    if lost is not None:
        yield Finding(
            "tokenizer.ggml.merges", "pairs that make a token", f"{lost!r:.40}", FROM_TARGET
        )


@rule("G4-VOC-018", WARNING, "special tokens should be Gemma's", needs=FILE)
def roles(s: Subject) -> Findings:
    """A role with an id that is off by one: padding that is a real token is attended
    to, and an unknown-token id of a word puts that word into the text."""
    tokens = s.strings(TOKENS) or []
    for role, text in ROLES.items():
        i = special_ids(s).get(role)
        if i is not None and 0 <= i < len(tokens) and tokens[i] not in text:
            yield Finding(
                f"tokenizer.ggml.{role}_token_id",
                " or ".join(text),
                f"{i}, {tokens[i]!r:.40}",
                FROM_TARGET,
            )


@rule("G4-VOC-019", WARNING, "recorded stop tokens should be control tokens", needs=FILE)
def recorded_stops(s: Subject) -> Findings:
    """Ids that are off by one: a text then ends at an ordinary word, or continues after its end."""
    tokens, found = s.strings(TOKENS) or [], s.numbers(STOP_IDS)
    for i in found if found is not None else ():
        if 0 <= i < len(tokens) and not (tokens[i].startswith("<") and tokens[i].endswith(">")):
            yield Finding(
                STOP_IDS, "ids of control tokens", f"{int(i)}, {tokens[i]!r:.40}", FROM_TARGET
            )


@rule("G4-VOC-020", WARNING, "the chat template should compile", needs=FILE)
def compiles(s: Subject) -> Findings:
    """A template that was cut or escaped on its way into the file: chats fail, or its tags are
    written out as text."""
    found = s.text(TEMPLATE)
    if not found:
        return
    if why := syntax_error(found):
        yield Finding(TEMPLATE, "a Jinja template", why, FROM_TARGET)


def _plain(value: Any) -> Any:
    """Return a value as `_value` does."""
    return value.tobytes() if isinstance(value, np.ndarray) else value


def _value(s: Subject, key: str) -> Any:
    """The value of a key, None if there is none or it cannot be read; arrays as bytes or texts."""
    if key not in s.keys:
        return None
    if (numbers := s.numbers(key)) is not None:
        return numbers.tobytes()
    strings = s.strings(key)
    return strings if strings is not None else s.keys[key].value
