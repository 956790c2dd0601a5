"""Masks that keep a text to a grammar, by llguidance, over a model's own vocabulary.

A mask depends on the text's tokens alone, so it allows the same with a draft as without. Its state
follows the tokens: a step of sixteen rows costs sixteen steps of the parser, not sixteen texts.
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
from g4spec.server.output_parser import Marks

COMPACT = {"whitespace_flexible": False}
"""JSON without white space: so no answer ends in it up to the limit."""

CACHED_GRAMMARS = 64
"""Compiled grammars that are kept: agents send the same tools with every request."""

_MARK_PATTERN = re.compile(r"<[^\s<>]+>")


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that a text, or parts of it, have to match.

    Attributes:
        text: for llguidance.
        trigger: the token behind which it holds; None: from the beginning, to the end.
        closer: with a trigger, the token behind which the text is free again.
        once: with a trigger, the text ends behind `closer`.
    """

    text: str
    trigger: int | None = None
    closer: int | None = None
    once: bool = False


class Vocabulary:
    """The tokens of a model, as llguidance reads them, and grammars compiled for them.

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
        """Return a matcher at the beginning of a grammar; InputError if the grammar is wrong."""
        with self._lock:
            if (kept := self._cache.get(text)) is not None:
                self._cache.move_to_end(text)
                return kept.deep_copy()
        failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(text, self._tokens)
        if failed:
            raise InputError(
                "the grammar or JSON schema cannot be used", found=_first_line(messages[0])
            )
        matcher = llguidance.LLMatcher(self._tokens, text, log_level=0)
        if matcher.is_error():
            raise InputError(
                "the grammar or JSON schema cannot be used", found=_first_line(matcher.get_error())
            )
        with self._lock:
            self._cache[text] = matcher
            while len(self._cache) > CACHED_GRAMMARS:
                self._cache.popitem(last=False)
        return matcher.deep_copy()

    def mask(self, grammar: Grammar) -> Mask:
        """Make the mask of one text; InputError if the grammar is wrong."""
        return Mask(self, grammar)


class _TokenizerAdapter:
    """A tokenizer as llguidance's wrapper wants it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        pieces = [tokenizer.piece(i, special=True) for i in range(tokenizer.n_vocab)]
        looks = [i for i in tokenizer.special_ids if _MARK_PATTERN.fullmatch(pieces[i].decode())]
        self.eos_token_id = min(tokenizer.stop_ids)
        self.bos_token_id = tokenizer.bos
        self.tokens = pieces
        self.special_token_ids = sorted({*looks, *tokenizer.control_ids})

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, bos=False)


@dataclass(slots=True)
class _Span:
    """A part of the text that the grammar holds for: tokens start .. end - 1.

    Attributes:
        read: how many of them the matcher has taken.
    """

    start: int
    matcher: llguidance.LLMatcher
    read: int = 0
    end: int | None = None


class Mask:
    """Tokens that may follow, of one text (`g4spec.ops.logits.Mask`)."""

    def __init__(self, vocabulary: Vocabulary, grammar: Grammar) -> None:
        self._vocabulary, self._grammar = vocabulary, grammar
        self._start_matcher = vocabulary.compile(grammar.text)
        self._ids: list[int] = []
        self._spans: list[_Span] = []
        self._stopped: int | None = None  # index of the token that ended the text
        if grammar.trigger is None:
            self._spans.append(_Span(0, self._start_matcher.deep_copy()))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle it as of before the first token: another process compiles the grammar again."""
        return Mask, (self._vocabulary, self._grammar)

    def __call__(self, tokens: Sequence[int]) -> torch.Tensor | None:
        """Return bool [V] of the tokens that may follow `tokens`, or None where all may."""
        self._roll_back(_common_prefix(self._ids, tokens))
        for token in tokens[len(self._ids) :]:
            self._consume(token)
        if self._stopped is not None:
            return None  # behind the end, where a step still has rows
        span = self._spans[-1] if self._spans else None
        if span is not None and span.end is None:
            return self._allowed(span.matcher)
        if span is not None and self._grammar.once:
            return self._allow_only(self._vocabulary.stop_ids)
        return None

    def _roll_back(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
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
        return InputError("the grammar parser failed", found=_first_line(matcher.get_error()))


class ThinkingBudget:
    """Ends thoughts after so many tokens, of one text (`g4spec.ops.logits.Mask`).

    Args:
        budget: tokens of all thoughts together, their header included.
        open_thought: the text begins inside a thought.
        inner: a mask that holds, too; where it refuses the end of a thought, that waits.
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
        self._states = [(open_thought, 0)]  # before each token: inside a thought, tokens spent

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle it as of before the first token."""
        make = partial(ThinkingBudget, open_thought=self._states[0][0], inner=self._inner)
        return make, (self._budget, self._marks, self._n_vocab)

    def __call__(self, tokens: Sequence[int]) -> torch.Tensor | None:
        """Return bool [V] of the tokens that may follow `tokens`, or None where all may."""
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
    """Count the tokens that both begin with. They differ near the end, if at all."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    start = max(0, n - 64)
    start = start if a[:start] == b[:start] else 0
    return next(i for i in range(start, n) if a[i] != b[i])


def _first_line(message: str) -> str:
    return message.strip().splitlines()[0][:300] if message.strip() else "no reason given"


# ---- what requests ask for


def json_answer(schema: Mapping[str, Any] | bool, *, strict: bool) -> str:
    """Write the Lark rule `answer` of JSON that fits a schema, in compact form.

    Args:
        strict: refuse keywords that cannot be held, which are notes otherwise.
    """
    if isinstance(schema, bool):
        schema = {}
    options = {**COMPACT, "lenient": not strict}
    return "answer: %json " + json.dumps({**schema, "x-guidance": options})


def to_lark(grammar: str) -> str:
    """Convert a user's grammar to Lark: GBNF, or Lark that begins with `%llguidance`."""
    if grammar.lstrip().startswith("%llguidance"):
        return grammar
    try:
        return gbnf_to_lark.gbnf_to_lark(grammar)
    except Exception as error:
        if type(error) in (Exception, gbnf_to_lark.GbnfToLarkError, ValueError, RecursionError):
            fix = "correct it, or begin it with `%llguidance {}` if it is Lark"
            raise InputError(
                "the grammar is not valid GBNF", found=_first_line(str(error)), fix=fix
            ) from None
        raise


def whole_text(
    marks: Marks | None,
    *,
    answer: str | None = None,
    user: str | None = None,
    calls: Sequence[Function] = (),
    least: int = 0,
    most: int | None = None,
    thinking: str = "no",
) -> Grammar:
    """Make the grammar of a whole text: a thought, and then an answer or calls.

    Args:
        answer: rule of that name. user: a grammar of its own, in its place.
        calls: functions that may be called instead, `least` to `most` times.
        thinking: "no", "may" begin with a thought, or "open": the prompt has begun it.
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
        options.append(f"(<[{marks.call}]> call){{{max(least, 1)},{limit}}}")
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
    """Make the grammar of calls alone, in a text that is free otherwise.

    Args:
        parallel: several calls may follow each other; else the text ends behind the first.
    """
    rules = call_grammar.call_rules(functions, marks.call_end, marks.delimiter)
    return Grammar(f"start: call\n{rules}", marks.call, marks.call_end, once=not parallel)
