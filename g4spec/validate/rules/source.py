"""A file and the checkpoint it was converted from (`--against`)."""

from __future__ import annotations

import re
from collections import ChainMap
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from g4spec import models
from g4spec.convert import expected_metadata, provenance
from g4spec.convert.tokenizer import STOP_IDS, SUPPRESS
from g4spec.errors import InputError, UsageError
from g4spec.gguf import Value
from g4spec.models.pairing import TOKENS
from g4spec.models.spec import END_TOKENS, end_ids, stop_ids, with_end_types
from g4spec.quant import policy
from g4spec.validate.needs import Needs
from g4spec.validate.rule import ERROR, WARNING, Finding, Findings, rule
from g4spec.validate.rules.block import FROM_ANCHOR
from g4spec.validate.rules.keys import most_type
from g4spec.validate.rules.prompts import MASK
from g4spec.validate.subject import Subject

SOURCE, OWN = Needs.SOURCE, Needs.OWN_SOURCE
SHOWN = 16  # longest array that is shown whole
RECONVERT = "convert again from this source"
TYPES, CLS = "tokenizer.ggml.token_type", "tokenizer.ggml.cls_token_id"
EFFECTS = {
    TYPES: "; a text that has the token is tokenized differently",
    SUPPRESS: "; other tokens are never chosen",
}
"""Differences in a run of a file with another value of a key of its tokenizer."""


@rule("G4-CMP-001", ERROR, "the source must be the file's own", needs=SOURCE)
def own_source(s: Subject) -> Findings:
    """The folder of the target was given for that of its draft, of another size, or of another
    training run. The other rules of this family are not checked then: each tensor would fail."""
    if s.comparison.other:
        made_from = s.text(provenance.SOURCE)
        yield Finding(
            str(s.source),
            f"{made_from or 'the checkpoint that the file was made from'} "
            f"({getattr(s.kind, 'TITLE', s.arch)})",
            s.comparison.other,
            "pass the checkpoint that this file was made from to --against",
        )


@rule("G4-CMP-002", ERROR, "every tensor of the source must be in the file", needs=OWN)
def used(s: Subject) -> Findings:
    """Converters skip names they do not know, such as a new norm, and the file still loads."""
    for name in s.comparison.unused:
        yield Finding(name, "a tensor of the file, or a reason to drop it", "neither", RECONVERT)


@rule("G4-CMP-003", ERROR, "every tensor of the file must come from the source", needs=OWN)
def sourced(s: Subject) -> Findings:
    """A tensor that was initialised where the checkpoint had none: a head filled with noise."""
    for name in s.comparison.sourceless:
        yield Finding(name, "a tensor of the source", "none", RECONVERT)


@rule("G4-CMP-004", ERROR, "shapes must be the source's", needs=OWN)
def shapes(s: Subject) -> Findings:
    """The checkpoint of another size, or a matrix that was transposed."""
    for name, (source, found) in s.comparison.shapes.items():
        yield Finding(name, list(source), list(found), RECONVERT)


@rule("G4-CMP-005", ERROR, "values of exact types must equal the source's", needs=OWN)
def equal(s: Subject) -> Findings:
    """Norms shifted by one, q and k rows permuted for another architecture, a matrix of the
    neighbouring layer, an edited map: all unintended changes of a conversion."""
    for t in s.comparison.tensors:
        if t.exact and t.first is not None:
            yield Finding(f"{t.name}{list(t.first)}", f"{t.expected!r}", f"{t.found!r}", RECONVERT)


@rule("G4-CMP-006", ERROR, "errors must not exceed the rounding of the type", needs=OWN)
def bounded(s: Subject) -> Findings:
    """A quantizer with a wrong scale gives weights that look right on average: relative error of
    a few per cent instead of half of one."""
    for t in s.comparison.tensors:
        if not t.exact and t.first is not None:
            usual = f" (usual for {t.type}: {t.usual_rms:.2%})" if t.usual_rms is not None else ""
            yield Finding(
                f"{t.name}{list(t.first)}",
                f"about {t.expected:.6g}",
                f"{t.found:.6g}; relative RMS error {t.relative_rms:.2%}{usual}",
                RECONVERT,
            )


@rule("G4-CMP-007", ERROR, "the source's own maps must be consistent", needs=SOURCE)
def sensible(s: Subject) -> Findings:
    """d2t and t2d of the checkpoint must say the same; one export had them sorted apart."""
    for name, reason in s.comparison.refused.items():
        yield Finding(name, "a usable map in the source", reason, "download the checkpoint again")


@rule("G4-CMP-008", WARNING, "the source should be the one that was recorded", needs=OWN)
def recorded(s: Subject) -> Findings:
    """The folder was updated since: another revision, or a training run that went on."""
    recorded_digest, found = s.text(provenance.DIGEST), s.comparison.digest
    if recorded_digest and found and recorded_digest != found:
        yield Finding(provenance.DIGEST, recorded_digest, found, RECONVERT)


@rule(
    "G4-CMP-009",
    ERROR,
    "metadata must be what a conversion of the source writes",
    needs=Needs.CONVERSION,
)
def described(s: Subject) -> Findings:
    """Layer ids, rotation base, window, epsilon, block size, context: each can be wrong while every
    tensor is right. The draft loads, the text is right, and a third of the acceptance is gone. The
    expected values come from the functions that `convert` itself uses."""
    if s.conversion.refusal:
        yield Finding(
            str(s.source),
            "a checkpoint that can be converted",
            s.conversion.refusal,
            "give the checkpoint this file was made from",
        )
        return
    wanted, arch, ours = s.conversion.keys, str(s.arch), s.has(provenance.VERSIONS)
    optional = expected_metadata.OPTIONAL_KEYS
    for key, value in wanted.items():
        if not ours and _is_unread(s, key):
            continue
        if key in s.keys:
            found = s.open_file.value(key)
            yield from _difference(key, value, found if ours else _as_read(s, key, found))
        elif key not in optional and (ours or not _dispensable(s, key, value)):
            yield Finding(key, _shown(value.data), "nothing", _fix(key))
    for key in s.keys:
        extra = key not in wanted and s.conversion.covers(key, arch)
        if extra and (ours or not _is_unread(s, key)):
            yield Finding(key, "no such key", _shown(s.open_file.value(key).data), _fix(key))
    if "general.file_type" not in s.keys and (number := _file_type(s)) is not None:
        yield Finding("general.file_type", number, "nothing", RECONVERT)


@rule(
    "G4-CMP-010",
    ERROR,
    "tensors that a conversion computes must be in the file",
    needs=Needs.CONVERSION,
)
def computed(s: Subject) -> Findings:
    """The draft rotates a part of each head, which only `rope_freqs` says: without it the whole
    head rotates. The file is valid, and the draft guesses worse."""
    for name in sorted(s.conversion.computed - s.open_file.tensors.keys()):
        yield Finding(name, "a tensor computed from the configuration", "nothing", RECONVERT)


def _dispensable(s: Subject, key: str, value: Value) -> bool:
    """Return True if a file of another program works alike without this key."""
    if key == STOP_IDS:
        named = [s.open_file.get(f"tokenizer.ggml.{name}_token_id") for name in END_TOKENS]
        ends = end_ids(s.strings("tokenizer.ggml.tokens") or ())
        return stop_ids(ends, (n for n in named if isinstance(n, int))).issuperset(value.data)
    return key.startswith(expected_metadata.OPTIONAL_PREFIXES) or _is_default(s, key, value)


def _is_default(s: Subject, key: str, value: Value) -> bool:
    """Return True if a draft without this key computes the same, here and in llama.cpp, which does
    not know this program's own keys."""
    short, file = key.removeprefix(f"{s.arch}."), s.open_file
    known = key.startswith("g4spec.") or short in expected_metadata.DEFAULTED_KEYS
    if s.config is None or s.kind is None or s.arch in models.TARGETS or not known:
        return False
    if key == FROM_ANCHOR and not any(spec.window for spec in s.config.layers):
        return True
    keys: Any = ChainMap({key: value.data}, file)  # type: ignore[arg-type]
    with suppress(InputError):
        return bool(s.kind.parse_gguf(keys, file.shapes()) == s.config)
    return False


def _is_unread(s: Subject, key: str) -> bool:
    """Return True for a key from which nothing is computed: of a draft, its tokenizer's settings,
    which rules of the family PAIR compare with the target's."""
    own = key in (TOKENS, MASK) or not key.startswith("tokenizer.ggml.")
    return key == CLS or (s.arch not in models.TARGETS and not own)


def _as_read(s: Subject, key: str, found: Value) -> Value:
    """Return a value as it is read: tokens that end a text by their name are control tokens."""
    if key != TYPES:
        return found
    ends = end_ids(s.strings("tokenizer.ggml.tokens") or ())
    return replace(found, data=with_end_types(found.data, ends))


def _file_type(s: Subject) -> int | None:
    """Return the number of the type that `convert` was asked for, which no source says: by the
    command in the file, unless it was quantized again since. None where llama.cpp has none."""
    option = re.search(r" --type (\S+)", s.text(provenance.COMMAND) or "")
    with suppress(UsageError):
        mix = policy.parse_type(option[1]) if option else None
        if mix is not None and str(most_type(s)).lower() in policy.expected_types(mix):
            return mix.file_type
    return None


def _difference(key: str, wanted: Value, found: Value) -> Findings:
    """A finding if two values of a key differ. A number for all layers equals an array of it, and
    floats are compared as the file stores them."""
    a, b = _plain(wanted.data), _plain(found.data)
    if isinstance(a, str) or isinstance(b, str):
        if a is not b and str(a) != str(b):
            yield Finding(key, _shown(wanted.data), _shown(found.data), _fix(key))
    elif a.ndim and b.ndim and a.shape != b.shape:
        yield Finding(key, f"{a.size} entries", f"{b.size}", _fix(key))
    elif not (same := a == b).all():
        at = int(np.argmin(same))
        if not same.ndim or same.size <= SHOWN:
            yield Finding(key, _shown(wanted.data), _shown(found.data), _fix(key))
        else:
            x, y = np.broadcast_to(a, same.shape)[at], np.broadcast_to(b, same.shape)[at]
            yield Finding(f"{key}[{at}]", f"{x!r:.40}", f"{y!r:.40}", _fix(key))


def _fix(key: str) -> str:
    return RECONVERT + EFFECTS.get(key, "")


def _plain(data: Any) -> Any:
    """A text, or an array of numbers (floats in 32 bits) or texts."""
    if isinstance(data, str):
        return data
    values = _array(data)
    return values.astype(np.float32) if values.dtype.kind == "f" else values


def _array(data: Any) -> NDArray[Any]:
    """Return an array of numbers, or of texts as objects: numpy's own texts all take the memory of
    the longest one, and lose NULs at their end."""
    texts = isinstance(data, list) and len(data) > 0 and isinstance(data[0], str)
    return np.array(data, dtype=object) if texts else np.asarray(data)


def _shown(data: Any) -> str:
    if isinstance(data, str):
        return f"{data!r:.60}"
    values = _array(data)
    return str(values.tolist()) if values.size <= SHOWN else f"{values.size} entries"
