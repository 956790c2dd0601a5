"""Token masks that constrain a text to a grammar, computed by llguidance.

A mask depends only on the text's tokens, so it is the same with and without a draft. The parser
keeps its state and rolls back: a step of 16 rows costs 16 parser steps, not 16 parses of the text.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import llguidance
import numpy as np
import torch
from llguidance import gbnf_to_lark

from g4spec.errors import InputError
from g4spec.ops import logits
from g4spec.runtime.tokenizer import Tokenizer
from g4spec.server import call_grammar
from g4spec.server.call_grammar import Function
from g4spec.server.exact_numbers import refuse_rounded, refuse_rounded_in_lark
from g4spec.server.output_parser import Marks
from g4spec.server.schemas import Resolver, without_draft_4

COMPACT = {"whitespace_flexible": False}
"""JSON without white space: a model could emit it until the token limit."""

CACHED_GRAMMARS = 64
"""Number of compiled grammars in the cache: agents send the same tools with every request."""

_MARK_PATTERN = re.compile(r"<[^\s<>]+>")


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that constrains a text, or spans of it.

    Attributes:
        text: grammar in llguidance's format.
        trigger: token after which the constraint begins; None: the whole text is constrained.
        closer: with a trigger, the token after which the text is free again.
        once: with a trigger, the text ends after `closer`.
    """

    text: str
    trigger: int | None = None
    closer: int | None = None
    once: bool = False


class Vocabulary:
    """A model's vocabulary for llguidance, and a cache of compiled grammars.

    Args:
        n_vocab: width of the model's logits.
    """

    def __init__(self, tokenizer: Tokenizer, n_vocab: int) -> None:
        self.stop_ids, self.n_vocab = tokenizer.stop_ids, n_vocab
        self._tokens = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_TokenizerAdapter(tokenizer)),
            eos_token=sorted(tokenizer.stop_ids),
        )
        self._cache: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, text: str) -> llguidance.LLMatcher:
        """Return a matcher in its initial state; raise InputError for an invalid grammar."""
        with self._lock:
            if (kept := self._cache.get(text)) is not None:
                self._cache.move_to_end(text)
                return kept.deep_copy()
        failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(text, self._tokens)
        if failed:
            raise InputError(
                "the grammar or JSON schema cannot be used", found=_reason(messages[0])
            )
        matcher = llguidance.LLMatcher(self._tokens, text, log_level=0)
        if matcher.is_error():
            raise InputError(
                "the grammar or JSON schema cannot be used", found=_reason(matcher.get_error())
            )
        with self._lock:
            self._cache[text] = matcher
            while len(self._cache) > CACHED_GRAMMARS:
                self._cache.popitem(last=False)
        return matcher.deep_copy()

    def mask(self, grammar: Grammar) -> Mask:
        """Return the mask of one text; raise InputError for an invalid grammar."""
        return Mask(self, grammar)


class _TokenizerAdapter:
    """An adapter of `Tokenizer` to the interface of `llguidance.TokenizerWrapper`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        pieces = [tokenizer.piece(i, special=True) for i in range(tokenizer.n_vocab)]
        marks = [i for i in tokenizer.special_ids if _MARK_PATTERN.fullmatch(pieces[i].decode())]
        self.eos_token_id = min(tokenizer.stop_ids)
        self.bos_token_id = tokenizer.bos
        self.tokens = pieces
        self.special_token_ids = sorted({*marks, *tokenizer.control_ids})

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, bos=False)


@dataclass(slots=True)
class _Span:
    """A constrained span of the text: tokens `start` to `end - 1`.

    Attributes:
        matcher: parser state after `read` tokens.
        read: number of tokens that the matcher has consumed.
        end: None while the span is open.
    """

    start: int
    matcher: llguidance.LLMatcher
    read: int = 0
    end: int | None = None


class Mask:
    """The grammar mask of one text (implements `g4spec.ops.logits.Mask`)."""

    def __init__(self, vocabulary: Vocabulary, grammar: Grammar) -> None:
        self._vocabulary, self._grammar = vocabulary, grammar
        self._start_matcher = vocabulary.compile(grammar.text)
        self._ids: list[int] = []
        self._spans: list[_Span] = []
        self._stopped: int | None = None  # index of the token that ended the text
        if grammar.trigger is None:
            self._spans.append(_Span(0, self._start_matcher.deep_copy()))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the initial state; the other process compiles the grammar again."""
        return Mask, (self._vocabulary, self._grammar)

    def __call__(self, tokens: Sequence[int]) -> torch.Tensor | None:
        """Return bool [V], True for tokens allowed after `tokens`, or None if all are allowed."""
        self._roll_back(_common_prefix(self._ids, tokens))
        for token in tokens[len(self._ids) :]:
            self._consume(token)
        if self._stopped is not None:
            return None  # after the end: a step may still have rows there
        span = self._spans[-1] if self._spans else None
        if span is not None and span.end is None:
            return self._allowed(span.matcher)
        if span is not None and self._grammar.once:
            return self._allow_only(self._vocabulary.stop_ids)
        return None

    def _roll_back(self, length: int) -> None:
        """Roll back to the first `length` tokens."""
        if self._stopped is not None and self._stopped >= length:
            self._stopped = None
        while self._spans and self._grammar.trigger is not None and self._spans[-1].start > length:
            self._spans.pop()
        if self._spans:
            span = self._spans[-1]
            if span.end is not None and span.end > length:
                span.end = None
            back = max(0, span.start + span.read - length)
            if back and not span.matcher.rollback(back):
                raise self._matcher_error(span.matcher)
            span.read -= back
        del self._ids[length:]

    def _consume(self, token: int) -> None:
        grammar = self._grammar
        span = self._spans[-1] if self._spans else None
        at = len(self._ids)
        self._ids.append(token)
        if self._stopped is not None:
            return
        if token in self._vocabulary.stop_ids:
            self._stopped = at
        elif span is not None and span.end is None:
            if not span.matcher.consume_token(token):
                raise self._matcher_error(span.matcher)
            span.read += 1
            if grammar.trigger is not None and token == grammar.closer:
                span.end = at + 1
        elif token == grammar.trigger:
            self._spans.append(_Span(at + 1, self._start_matcher.deep_copy()))

    def _allowed(self, matcher: llguidance.LLMatcher) -> torch.Tensor:
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            raise self._matcher_error(matcher)
        n = self._vocabulary.n_vocab
        allowed = np.zeros(n, np.bool_)
        known = np.unpackbits(bits, bitorder="little")[:n]
        allowed[: len(known)] = known
        stops = list(self._vocabulary.stop_ids)
        if not matcher.is_accepting():
            allowed[stops] = False
            if not allowed.any():
                raise InputError(
                    "no continuation of the text matches the grammar or JSON schema",
                    found=f"a dead end after {len(self._ids)} tokens",
                )
        return torch.from_numpy(allowed)

    def _allow_only(self, ids: Iterable[int]) -> torch.Tensor:
        allowed = torch.zeros(self._vocabulary.n_vocab, dtype=torch.bool)
        allowed[list(ids)] = True
        return allowed

    def _matcher_error(self, matcher: llguidance.LLMatcher) -> InputError:
        return InputError("the grammar parser failed", found=_reason(matcher.get_error()))


class ThinkingBudget:
    """A mask that ends reasoning after a number of tokens (implements `g4spec.ops.logits.Mask`).

    Args:
        budget: maximum number of reasoning tokens in the text, headers included.
        marks: structural tokens.
        n_vocab: width of the model's logits.
        open_thought: the text begins inside reasoning.
        inner: another mask to apply; while it forbids the end of reasoning, reasoning continues.
    """

    def __init__(
        self,
        budget: int,
        marks: Marks,
        n_vocab: int,
        *,
        open_thought: bool = False,
        inner: logits.Mask | None = None,
    ) -> None:
        self._budget, self._marks, self._n_vocab, self._inner = budget, marks, n_vocab, inner
        self._ids: list[int] = []
        self._states = [(open_thought, 0)]  # before each token: (inside reasoning, tokens spent)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the initial state."""
        make = partial(ThinkingBudget, open_thought=self._states[0][0], inner=self._inner)
        return make, (self._budget, self._marks, self._n_vocab)

    def __call__(self, tokens: Sequence[int]) -> torch.Tensor | None:
        """Return bool [V], True for tokens allowed after `tokens`, or None if all are allowed."""
        shared = _common_prefix(self._ids, tokens)
        del self._ids[shared:], self._states[shared + 1 :]
        for token in tokens[shared:]:
            inside, spent = self._states[-1]
            self._ids.append(token)
            ends = token in (self._marks.channel_end, self._marks.call)
            after = token == self._marks.channel or (inside and not ends)
            self._states.append((after, spent + inside))
        allowed = self._inner(tokens) if self._inner is not None else None
        inside, spent = self._states[-1]
        if spent < self._budget:
            return allowed
        end, begin = self._marks.channel_end, self._marks.channel
        if allowed is None:
            allowed = torch.ones(self._n_vocab, dtype=torch.bool)
        if not inside:
            allowed[begin] = False
        elif allowed[end]:
            allowed = torch.zeros_like(allowed)
            allowed[end] = True
        return allowed


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix; fast if the lists differ only near the end."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    start = max(0, n - 64)
    start = start if a[:start] == b[:start] else 0
    return next(i for i in range(start, n) if a[i] != b[i])


def _reason(message: str) -> str:
    """Return the first line of a message; of an invalid regex, also what is wrong with it."""
    first, *others = message.strip().splitlines() or ["no reason given"]
    why = [line.removeprefix("error:") for line in others if line.startswith("error: ")]
    return "".join([first, *why])[:300]


# ---- grammars of requests


def json_answer(schema: Mapping[str, Any] | bool, *, strict: bool, space: str = "") -> str:
    """Return the Lark rule `answer` for compact JSON that is valid against a schema.

    Args:
        strict: reject keywords that cannot be enforced; otherwise ignore them.
        space: regular expression of the white space between tokens.

    Raises:
        InputError: the schema consists only of references that lead back to it.
        Unsupported: the schema is strict and has such a keyword that the library would ignore, or
            it has numbers that the library would replace by others.
    """
    if isinstance(schema, bool):
        schema = {}
    converted = without_draft_4(schema, strict=strict, where="the answer")
    refuse_rounded(converted, "the answer")
    _refuse_endless(converted)
    options = {**COMPACT, "lenient": not strict, "whitespace_pattern": space or None}
    return "answer: %json " + json.dumps({**converted, "x-guidance": options})


def _refuse_endless(schema: Mapping[str, Any]) -> None:
    resolver, seen = Resolver(schema, strict=False, where="the answer"), set[str]()
    part: Any = schema
    while isinstance(part, Mapping) and re.match("#(/|$)", str(part.get("$ref"))):
        if (pointer := resolver.pointer(part)) is None:
            return
        if pointer in seen:
            fix = "let it refer to a schema with keywords such as `type`"
            raise resolver.error(
                "it refers to itself", expected="content", found=f"only $ref {pointer}", fix=fix
            )
        seen.add(pointer)
        part = resolver.target(pointer)


def to_lark(grammar: str) -> str:
    """Convert a user's grammar to Lark: GBNF, or Lark that begins with `%llguidance`. Raises
    InputError for invalid GBNF, and Unsupported for schemas in Lark that llguidance changes."""
    if grammar.lstrip().startswith("%llguidance"):
        refuse_rounded_in_lark(grammar)
        return grammar
    try:
        return gbnf_to_lark.gbnf_to_lark(grammar)
    except Exception as error:
        if type(error) in (Exception, gbnf_to_lark.GbnfToLarkError, ValueError, RecursionError):
            fix = "correct it, or begin it with `%llguidance {}` if it is Lark"
            raise InputError(
                "the grammar is not valid GBNF", found=_reason(str(error)), fix=fix
            ) from None
        raise


def whole_text(
    marks: Marks | None,
    *,
    answer: str | None = None,
    user: str | None = None,
    calls: Sequence[Function] = (),
    most: int | None = None,
    thinking: str = "no",
) -> Grammar:
    """Return the grammar of a complete text: optional reasoning, then an answer or calls.

    Args:
        answer: Lark rule named `answer`.
        user: the user's grammar, instead of `answer`.
        calls: functions that may be called instead, at most `most` times.
        thinking: "no", the text "may" begin with reasoning, or "open": it continues reasoning.
    """
    rules, options = [], []
    if answer is not None:
        rules.append(answer)
        options.append("answer")
    if user is not None:
        options.append("@user")
    if calls:
        assert marks is not None
        rules.append(call_grammar.call_rules(calls, marks.call_end, marks.delimiter))
        limit = "" if most is None else str(most)
        options.append(f"(<[{marks.call}]> call){{1,{limit}}}")
    before = ""
    if thinking != "no":
        assert marks is not None
        rules.append("THOUGHT: /(?s:.*)/")
        opened = f"THOUGHT <[{marks.channel_end}]>"
        before = opened if thinking == "open" else f'(<[{marks.channel}]> "thought\\n" {opened})?'
    lark = "\n".join([f"start: {before} ({' | '.join(options)})", *rules])
    if user is None:
        return Grammar(lark)
    parts = [{"lark_grammar": lark}, {"name": "user", "lark_grammar": user}]
    return Grammar(json.dumps({"grammars": parts}))


def inside_calls(marks: Marks, functions: Sequence[Function], *, parallel: bool) -> Grammar:
    """Return a grammar that constrains only the tool calls of a text.

    Args:
        parallel: allow several calls; otherwise the text ends after the first.
    """
    rules = call_grammar.call_rules(functions, marks.call_end, marks.delimiter)
    return Grammar(f"start: call\n{rules}", marks.call, marks.call_end, once=not parallel)
