"""The byte-pair encoder of a vocabulary, made with the tokenizers library, whose errors are
explained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from g4spec.errors import InputError
from g4spec.gguf.string_arrays import BLOCK

SPACE = "\u2581"
"""What stands for a space in the texts of tokens."""

MERGES = "tokenizer.ggml.merges"
"""Key of the merges in GGUF, named in errors."""


@contextmanager
def panic_as_error(source: str) -> Iterator[None]:
    """Turn a panic of the Rust library, which is not an Exception, into an InputError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ == "PanicException":
            raise InputError(
                f"{source}: the tokenizers library cannot hold this vocabulary",
                found=str(error)[:200],
            ) from None
        raise


def make_encoder(tokens: Sequence[str], merges: Sequence[str], source: str) -> tokenizers.Tokenizer:
    """Return the encoder of a vocabulary, without special tokens. Raise InputError if a text is
    twice in it, or a merge is not of its tokens. `source`: name of the file, for errors."""
    vocab = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(vocab) != len(tokens):
        twice = next(t for i, t in enumerate(tokens) if vocab[t] != i)
        raise InputError(
            f"{source}: tokenizer.ggml.tokens", expected="different texts", found=f"{twice!r} twice"
        )
    pairs = _MergePairs(vocab, merges, source)
    with pairs.explained():
        model = models.BPE(vocab, pairs, byte_fallback=True, fuse_unk=True)
    encoder = tokenizers.Tokenizer(model)
    encoder.normalizer = normalizers.Replace(" ", SPACE)
    newlines = tokenizers.Regex(r"\n+")
    encoder.pre_tokenizer = pre_tokenizers.Split(newlines, behavior="isolated")
    return encoder


def share_model(encoder: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Return an encoder without special tokens that shares the model of another: no copy."""
    out = tokenizers.Tokenizer(encoder.model)
    out.normalizer, out.pre_tokenizer = encoder.normalizer, encoder.pre_tokenizer
    return out


class _MergePairs(Sequence[tuple[str, str]]):
    """Merges in the form that the library asks for, one after the other.

    The library copies each pair, so none is kept here: half a million tuples and a million strings
    would take 130 MB, and more time to allocate than to create again.
    """

    def __init__(self, vocab: Mapping[str, int], merges: Sequence[str], source: str) -> None:
        self._vocab, self._merges, self._source = vocab, merges, source
        self._error: BaseException | None = None
        self._longest = max((len(t.encode()) for t in vocab), default=0)

    def __len__(self) -> int:
        return len(self._merges)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        halves = chain.from_iterable(self._halves())
        return zip(halves, halves, strict=True)

    def __getitem__(self, i: Any) -> Any:
        return tuple(self._merges[i].split(" "))

    def _halves(self) -> Iterator[list[str]]:
        """Yield both halves of each merge; works in blocks, which is faster."""
        entries = iter(self._merges)
        try:
            while block := list(islice(entries, BLOCK)):
                halves = " ".join(block).split(" ")
                if len(halves) != 2 * len(block) or self._too_long(block):
                    self._blame()
                yield halves
        except (Exception, KeyboardInterrupt) as error:
            self._error = error  # the library would raise a TypeError in its place
            raise

    def _too_long(self, block: Sequence[str]) -> bool:
        """Return True if a merge is longer than every token, which makes the library panic."""
        if 4 * max(map(len, block)) <= self._longest:
            return False
        return max(len(m.encode()) for m in block) > self._longest + 1

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Name the merge that the library refuses, because its exception does not."""
        try:
            yield
        except Exception as error:
            if self._error:
                raise self._error from None
            if type(error) is Exception:
                self._blame()
            raise

    def _blame(self) -> None:
        for i, merge in enumerate(self._merges):
            two = merge.split(" ")
            if len(two) != 2 or not all(t in self._vocab for t in (*two, "".join(two))):
                raise InputError(
                    f"{self._source}: {MERGES}, entry {i}",
                    expected="two tokens, a space between them, that make a token together",
                    found=repr(merge),
                ) from None
