"""Finds the option that a word without an option was probably meant for."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from g4spec.cli._types import TYPES

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")
MODEL_SIZE = re.compile(r"(\d+b|e\d+b)(:\w+)?", re.I)
"""Size of a Gemma 4, as `doctor` and `recipe` take it: "31b", "e4b:q4_k_m"."""
CACHE_TYPES = ("f16", "q8_0")
OTHER_NAMES = {
    "--context": "--ctx-size",
    "--context-length": "--ctx-size",
    "--context-size": "--ctx-size",
    "--max-model-len": "--ctx-size",
    "--n-ctx": "--ctx-size",
    "--card": "--assume",
    "--gpu": "--assume",
    "--machine": "--assume",
    "--max-new-tokens": "--n-predict",
    "--max-tokens": "--n-predict",
    "--tensor-parallel-size": "--gpus",
    "--tp": "--gpus",
}
"""Options of other programs, or what they may be called -> the option here."""


def likely_flags(word: str) -> Iterator[str]:
    """Yield the options that a word without an option may be meant for, the likeliest first."""
    if word in ("ngram", "mtp"):
        yield "--model-draft"
    if re.fullmatch(r"auto|cpu|cuda(:\w+)*", word):
        yield "--device"
    if word.lower() in TYPES:
        yield "--type"
    if word in CACHE_TYPES:
        yield "--cache-type"
    if re.fullmatch(r"-?\d+", word):
        yield from ("--n-predict", "--chunks", "--ctx-size")
    path = Path(word)
    if word.lower().endswith(".gguf") and not path.exists():
        yield "--out"
    if word.lower().endswith(".gguf") or path.is_dir() or _is_model_name(word):
        yield from ("--model", "--target", "--model-draft", "--family")
    if path.suffix == ".html":
        yield "--report"
    if path.suffix == ".json":
        yield from ("--messages", "--out")
    if path.is_file() or path.suffix in (".txt", ".md"):
        yield "--file"
    yield "--prompt"


def _is_model_name(word: str) -> bool:
    return bool(HUB_ID.fullmatch(word) or MODEL_SIZE.fullmatch(word))


def _is_card(words: str) -> bool:
    """Return True for the name of a GPU, such as "2x RTX 3090"."""
    from g4spec.advisor import cards
    from g4spec.advisor.facts import facts
    from g4spec.errors import UsageError

    if not re.search(r"\d", words) or Path(words).exists():
        return False
    try:
        cards.assume(facts(), words)
    except UsageError:
        return False
    return True


def meant(params: Sequence[Any], words: Sequence[str], typed: Collection[str]) -> str:
    """Return "did you mean --type q4_0? " for words that fit an option, or "".

    A required option without a value is filled first, from any word. Words that are more than the
    command has arguments are then matched with options that have no value.
    """
    free = [p for p in params if not is_argument(p) and p.name not in typed]
    rest, pairs = list(words), list[str]()
    card = [w for w in rest[sum(map(is_argument, params)) :] if not _is_model_name(w)]
    if any("--assume" in p.opts for p in free) and _is_card(" ".join(card)):
        pairs.append(f"--assume {quoted(' '.join(card))}")
        rest = [w for w in rest if w not in card]
    for required in (True, False):
        n_taken = 0 if required else sum(map(is_argument, params))
        for word in rest[n_taken:]:
            flags = list(likely_flags(word))
            fits = [p for p in free if set(p.opts) & set(flags) and p.required >= required]
            if not fits:
                continue
            option = min(fits, key=lambda p: min(flags.index(f) for f in p.opts if f in flags))
            free.remove(option)
            rest.remove(word)
            pairs.append(f"{option.opts[0]} {quoted(word)}")
    return f"did you mean {' '.join(pairs)}? " if pairs else ""


def is_argument(param: Any) -> bool:
    """Return True for a parameter without an option."""
    return bool(param.param_type_name == "argument")


def quoted(word: str) -> str:
    """Return a word as it is written in a shell."""
    return word if re.fullmatch(r"[\w./:,+-]+", word) else repr(word)
