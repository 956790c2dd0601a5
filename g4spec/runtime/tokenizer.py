"""The tokenizer: text to tokens and back, from the data in a GGUF file.

Gemma 4's tokenizer replaces spaces by U+2581, splits off runs of newlines, and applies byte-pair
merges without any other pre-tokenization; a character without a token becomes its UTF-8 bytes.
Tokens of type control, user-defined and unknown are recognised inside the text. Same as llama.cpp's
`gemma4` vocabulary and, for valid UTF-8, transformers' GemmaTokenizer.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from g4spec.errors import InputError, PromptTooLong, Unsupported
from g4spec.gguf.header import NUMBERS
from g4spec.gguf.values import ValueType
from g4spec.models import ollama
from g4spec.models.spec import (
    BYTE,
    CONTROL,
    END_TOKENS,
    USER_DEFINED,
    end_ids,
    stop_ids,
    with_end_types,
)
from g4spec.runtime import special_token_guard
from g4spec.runtime.bpe_encoder import MERGES, SPACE, make_encoder, panic_as_error, share_model

if TYPE_CHECKING:
    from g4spec.gguf import GGUF

UNKNOWN = 2
"""A further token type of GGUF (llama.h, `enum llama_token_type`)."""

_KEY = "tokenizer.ggml."
SUPPRESS = "tokenizer.ggml.suppress_tokens"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class Tokenizer:
    """Encodes and decodes text. Create it with :meth:`from_gguf`.

    Args:
        tokens: text of each id.
        types: GGUF token type of each id.
        merges: "left right", highest priority first.
        bos: id of the token at the start of every prompt.
        stops: ids that end generation, in addition to Gemma's own.
        suppress: ids that are never chosen.
        template: chat template in Jinja, if there is one.
        source: name of the file, for messages.
    """

    def __init__(
        self,
        tokens: Sequence[str],
        types: Sequence[int] | NDArray[Any],
        merges: Sequence[str],
        *,
        bos: int,
        stops: Iterable[int] = (),
        suppress: Iterable[int] = (),
        template: str | None = None,
        source: str = "tokenizer",
    ) -> None:
        self.bos, self.template, self.source = bos, template, source
        self.stop_ids = frozenset(i for i in stop_ids(stops) if 0 <= i < len(tokens))
        self.suppress_ids = tuple(sorted({i for i in suppress if 0 <= i < len(tokens)}))
        self._tokens = tokens
        kinds = np.asarray(types)
        self._hidden = frozenset(_where(kinds, CONTROL, UNKNOWN))
        self._special = self._hidden | _where(kinds, USER_DEFINED)
        self._bytes = _where(kinds, BYTE)
        self._longest = max(map(len, tokens), default=0)
        added = sorted(self._special, key=lambda i: (-len(tokens[i]), i))
        with panic_as_error(source):
            self._plain_encoder = make_encoder(tokens, merges, source)
            self._encoder = share_model(self._plain_encoder)
            self._encoder.add_special_tokens(
                [tokenizers.AddedToken(tokens[i], special=True, normalized=False) for i in added]
            )

    @classmethod
    def from_gguf(cls, file: GGUF) -> Tokenizer:
        """Create the tokenizer of a target file.

        Raises:
            InputError: keys are missing or contradict one another.
            Unsupported: the file has another kind of tokenizer.
        """
        return _read(file)

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that are recognised as a whole in text: control, unknown and user-defined tokens."""
        return self._special

    @property
    def control_ids(self) -> frozenset[int]:
        """Special ids that are marks, not text; decoding skips them."""
        return self._hidden

    @property
    def n_vocab(self) -> int:
        """Number of ids."""
        return len(self._tokens)

    def encode(
        self,
        text: str,
        *,
        bos: bool = True,
        n_ctx: int | None = None,
        special: bool = True,
        guard: str = "",
    ) -> list[int]:
        """Tokenize `text`; with `bos` the result starts with exactly one BOS, even if the text has
        its own.

        Args:
            special: read marks such as `<|turn>` as control tokens; otherwise tokenize them as
                text.
            guard: a character that is removed; a mark that contains it is tokenized as text.

        Raises:
            InputError: the text has an unpaired surrogate.
            PromptTooLong: the text has more than `n_ctx` tokens even if each were as long as
                possible. Checked first, because the library needs 200 bytes per token.
        """
        if n_ctx is not None and len(text) > n_ctx * self._longest:
            least = -(-len(text) // self._longest)
            raise PromptTooLong(least, n_ctx, f"{len(text):,} characters")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError("the text is not valid Unicode", found=error.reason) from None
        with panic_as_error(self.source):
            if special and not guard:
                ids = special_token_guard.encode(self._encoder, text)
            else:
                read = self._special if special else self._special - self._marks
                texts = [self._tokens[i] for i in read]
                ids = special_token_guard.encode_guarded(
                    self._encoder, self._plain_encoder, text, texts, guard
                )
        return [self.bos, *ids] if bos and ids[:1] != [self.bos] else ids

    @property
    def marks(self) -> list[str]:
        """Texts of special tokens that mean something to the model: control tokens, and visible
        ones in angle brackets such as `<|tool_call>`."""
        return [self._tokens[i] for i in self._marks]

    @property
    def _marks(self) -> frozenset[int]:
        shaped = (
            i
            for i in self._special
            if self._tokens[i].startswith("<") and self._tokens[i].endswith(">")
        )
        return self._hidden | frozenset(shaped)

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Decode `ids`. Skips control tokens (turn marks, BOS) unless `special`."""
        stream = self.stream(special=special)
        return stream.push(ids) + stream.finish()

    def stream(self, *, special: bool = False) -> Stream:
        """Create an incremental decoder."""
        return Stream(self, special)

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Return the UTF-8 bytes of one token; they may be part of a character."""
        if not 0 <= token < len(self._tokens):
            raise InputError(
                "token outside the vocabulary", expected=f"0..{len(self._tokens) - 1}", found=token
            )
        text = self._tokens[token]
        if token in self._special:
            return text.encode() if special or token not in self._hidden else b""
        if token in self._bytes:
            return bytes([int(text[3:5], 16)])
        return text.replace(SPACE, " ").encode()

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        system: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool = False,
        special: bool = False,
        n_ctx: int | None = None,
    ) -> list[int]:
        """Tokenize a conversation up to the start of the model's answer, with the file's chat
        template.

        Args:
            messages: {"role": "user" | "assistant" | ..., "content": text}, in order.
            system: system message to put first. `n_ctx`: see `encode`.
            tools: functions that the model may call, as in OpenAI's API.
            thinking: enable the model's thinking.
            special: read marks such as `<|turn>` in messages and tools as control tokens. Otherwise
                they are tokenized as text, except in messages of the role "system", so that a user
                cannot end the turn and start the model's.

        Raises:
            InputError: the file has no template, or the template refuses or fails.
        """
        from g4spec.runtime import template

        if not self.template:
            raise InputError(
                f"{self.source}: no chat template (tokenizer.chat_template)",
                fix="give the whole prompt as text, without `chat`",
            )
        first = [{"role": "system", "content": system}] if system else []
        eos = self._tokens[min(self.stop_ids)] if self.stop_ids else ""
        guard, turns = "", [dict(m) for m in (*first, *messages)]
        offered = [dict(tool) for tool in tools or ()]
        if not special:
            guard, turns, offered = special_token_guard.guard_messages(
                turns, offered, self.marks, self.template
            )
        text = template.render(
            self.template,
            turns,
            bos=self._tokens[self.bos],
            eos=eos,
            tools=offered or None,
            enable_thinking=thinking,
        )
        return self.encode(text, n_ctx=n_ctx, guard=guard)


class Stream:
    """Decodes tokens incrementally; holds bytes back until they form a whole character."""

    def __init__(self, tokenizer: Tokenizer, special: bool) -> None:
        self._tokenizer, self._show = tokenizer, special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """Return the text that is complete after `ids`; may be empty."""
        piece = self._tokenizer.piece
        return self._utf8.decode(b"".join(piece(i, special=self._show) for i in ids))

    def finish(self) -> str:
        """Return the text that was held back; incomplete characters become U+FFFD."""
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text


def _where(kinds: NDArray[Any], *wanted: int) -> set[int]:
    return set(np.flatnonzero(np.isin(kinds, wanted)).tolist())


class _Merges(Sequence[str]):
    """The merges of a file, read again on each use: a list of them takes 50 MB."""

    def __init__(self, file: GGUF) -> None:
        self._file = file

    def __len__(self) -> int:
        return self._file.length(MERGES)

    def __iter__(self) -> Iterator[str]:
        return chain.from_iterable(self._file.string_blocks(MERGES))

    def __getitem__(self, i: Any) -> Any:
        return self._file[MERGES][i]


def _read(file: GGUF) -> Tokenizer:
    kv, source = file.kv, str(file.path)
    model = kv.get(_KEY + "model")
    by_ollama = ollama.has_tokenizer(kv)
    if model != "gemma4" and not by_ollama:
        raise Unsupported(
            f"{source}: {_KEY}model",
            expected="gemma4",
            found=model or "nothing",
            fix="pass a Gemma 4 target",
        )
    for name, kind in (("tokens", str), ("merges", str), ("token_type", int)):
        _check_list(file, name, kind)
    tokens, types = kv[_KEY + "tokens"], file.number_array(_KEY + "token_type")
    if len(types) != len(tokens):
        raise InputError(
            f"{source}: {_KEY}token_type", expected=f"{len(tokens)} entries", found=len(types)
        )
    types = ollama.token_types(tokens, types) if by_ollama else types
    for i in sorted(_where(types, BYTE)):
        if not _BYTE.fullmatch(tokens[i]):
            raise InputError(
                f"{source}: byte token {i}", expected="<0x00> to <0xFF>", found=repr(tokens[i])
            )
    ids = {name: _id(kv, name, len(tokens), source) for name in ("bos", *END_TOKENS)}
    bos = ids.pop("bos")
    if bos is None:
        raise InputError(f"{source}: {_KEY}bos_token_id is missing")
    own, suppress = (_ids(kv, key, len(tokens), source) for key in ("g4spec.stop_ids", SUPPRESS))
    ends = end_ids(tokens)
    types = with_end_types(types, ends)
    stops = [*own, *ends, *(i for i in ids.values() if i is not None)]
    template = kv.get("tokenizer.chat_template")
    template = template if isinstance(template, str) else None
    return Tokenizer(
        tokens,
        types,
        _Merges(file),
        bos=bos,
        stops=stops,
        suppress=suppress,
        template=template,
        source=source,
    )


def _ids(kv: Mapping[str, Any], key: str, n_vocab: int, source: str) -> list[int]:
    found = kv.get(key, [])
    if not isinstance(found, list) or not all(isinstance(i, int) for i in found):
        raise InputError(f"{source}: {key}", expected="a list of ids", found=f"{found!r:.80}")
    if bad := [i for i in found if not 0 <= i < n_vocab]:
        raise InputError(f"{source}: {key}", expected=f"0..{n_vocab - 1}", found=bad[0])
    return found


def _id(kv: Mapping[str, Any], name: str, n_vocab: int, source: str) -> int | None:
    value = kv.get(f"{_KEY}{name}_token_id")
    if value is None or (type(value) is int and 0 <= value < n_vocab):
        return value
    raise InputError(f"{source}: {_KEY}{name}_token_id", expected=f"0..{n_vocab - 1}", found=value)


def _check_list(file: GGUF, name: str, kind: type[str] | type[int]) -> None:
    item = file.array_type(_KEY + name)
    integers = [t for t, dtype in NUMBERS.items() if dtype.kind in "iu"]
    if item in ([ValueType.STRING] if kind is str else integers) and file.length(_KEY + name):
        return
    value = file.get(_KEY + name)
    raise InputError(
        f"{file.path}: {_KEY}{name}",
        expected=f"a list of {kind.__name__}",
        found=type(value).__name__ if value else "nothing",
        fix="convert the target again",
    )
