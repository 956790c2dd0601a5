"""Built-in benchmark prompts, written for this project.

A category is one kind of task, because acceptance depends on the task more than on anything else.
Prompts of `code` and `long` are raw beginnings of source files, which base models can continue too;
the others are requests in the model's chat template.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from g4spec.errors import InputError, UsageError, did_you_mean
from g4spec.gguf import regular_files
from g4spec.runtime.tokenizer import Tokenizer

CATEGORIES = ("code", "chat", "maths", "extraction", "rewriting", "long")
"""Categories in the order of all tables."""

TITLES = {"long": "long context", "all": "all prompts", "own": "your prompt"}
"""Display names of categories whose id is not clear."""

LONG_PROMPTS = 8

LONGEST_TOKEN = 64
"""Upper bound on the characters per token of a long prompt."""

OWN = "the prompt"
"""Name of the user's own prompt in results."""


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """A benchmark prompt.

    Attributes:
        name: unique name, such as "code-0"; comparisons of two results match prompts by it.
        form: "raw" text, one "chat" message of the user, or "ids".
        thinking: enable the model's thinking in a chat prompt.
        ids: tokens of a prompt that is encoded already.
    """

    name: str
    category: str
    form: str
    text: str
    thinking: bool = False
    ids: tuple[int, ...] = ()

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        """Return its tokens. Without a chat template, a chat prompt is encoded as raw text."""
        if self.form == "ids":
            return [*self.ids]
        if self.form == "chat" and tokenizer.template:
            message = {"role": "user", "content": self.text}
            return tokenizer.chat([message], thinking=self.thinking)
        return tokenizer.encode(self.text)


def title(name: str) -> str:
    """Return what messages call the prompt with this name: "prompt code-0", "your prompt"."""
    return TITLES["own"] if name == OWN else f"prompt {name}"


def prompts(
    tokenizer: Tokenizer,
    categories: Sequence[str] = CATEGORIES,
    count: int | None = None,
    long_tokens: int = 2048,
    *,
    thinking: bool = False,
) -> list[BenchPrompt]:
    """Return the first `count` prompts of each category, or all of them.

    Args:
        long_tokens: length of `long` prompts in tokens.
        thinking: enable the model's thinking in chat prompts.

    Raises UsageError for an unknown category, or if a category has fewer prompts.
    """
    check_categories(categories, count)
    found: list[BenchPrompt] = []
    for category in categories:
        if category == "long":
            texts = [long_text(tokenizer, long_tokens, i) for i in range(count or LONG_PROMPTS)]
            form = "raw"
        else:
            texts, form = _category(category)
        found += [
            BenchPrompt(f"{category}-{i}", category, form, text, thinking)
            for i, text in enumerate(texts[:count])
        ]
    return found


def parse_categories(text: str | None) -> Sequence[str]:
    """Return the categories in a text with commas between them; all of them for None."""
    return [name.strip() for name in text.split(",")] if text else CATEGORIES


def check_categories(categories: Sequence[str], count: int | None) -> None:
    """Raise UsageError for an unknown category, or if a category has fewer than `count` prompts."""
    if len(set(categories)) < len(categories):
        raise UsageError("`categories`", expected="each name once", found=", ".join(categories))
    for category in categories:
        if category not in CATEGORIES:
            raise UsageError(
                "`categories`",
                expected=f"one of {', '.join(CATEGORIES)}",
                found=repr(category),
                fix=did_you_mean(category, CATEGORIES),
            )
        if count is None:
            continue
        # Any number of long prompts can be generated.
        texts = [] if category == "long" else _category(category)[0]
        if not 1 <= count <= (len(texts) or count):
            raise UsageError("`count`", expected=f"1 to {len(texts) or LONG_PROMPTS}", found=count)


@functools.cache
def _category(name: str) -> tuple[list[str], str]:
    """Return the built-in prompts of a category, and their form."""
    data = json.loads(_shipped(f"{name}.json"))
    return data["prompts"], data["form"]


def check_n_predict(n_predict: int, n_ctx: int) -> None:
    """Raise UsageError unless a prompt fits into the context beside `n_predict` new tokens."""
    if n_predict < 1:
        raise UsageError("`n_predict`", expected=">= 1", found=n_predict)
    if n_predict >= n_ctx:
        raise UsageError(
            "`n_predict`", expected=f"less than the context, {n_ctx} tokens", found=n_predict
        )


def long_prompt_tokens(asked: int | None, n_ctx: int, n_predict: int, usual: int) -> int:
    """Return the length of long prompts in tokens: `asked`, or `usual` capped to what fits.

    Raises UsageError if `asked` plus `n_predict` new tokens exceed the context `n_ctx`.
    """
    check_n_predict(n_predict, n_ctx)
    free = n_ctx - n_predict
    if asked is not None and asked > max(free, 0):
        raise UsageError(
            "`long_tokens`",
            expected=f"at most {free}, the context less `n_predict`",
            found=asked,
            fix="raise `n_ctx` or lower `n_predict`",
        )
    return asked or min(usual, free)


def long_text(tokenizer: Tokenizer, tokens: int, index: int) -> str:
    """Return a Python module of at most `tokens` tokens that ends inside its last function.

    Prompt `index` ends in built-in function `index`, which does not occur earlier in the module.
    If the other functions are too short, they are repeated under other names, up to LONGEST_TOKEN
    characters per token.
    """
    functions = _shipped("long.txt").strip("\n").split("\n\ndef ")
    functions = [f if f.startswith("def ") else f"def {f}" for f in functions]
    index %= len(functions)
    last = functions[index].split("\n")
    text = "\n".join(last[:2]) + "\n"  # signature and docstring
    used = len(tokenizer.encode(text))
    for block in _endless(functions[index + 1 :] + functions[:index]):
        used += len(tokenizer.encode(block, bos=False))
        text = block + text
        if used >= tokens or len(text) > LONGEST_TOKEN * tokens:
            break
    lines = text.split("\n")
    while len(tokenizer.encode(text)) > tokens and len(lines) > len(last[:2]) + 1:
        lines = lines[1:]
        text = "\n".join(lines)
    return text


def _endless(functions: list[str]) -> Iterator[str]:
    number = 1
    while True:
        for function in functions:
            renamed = function.replace("(", f"_{number}(", 1) if number > 1 else function
            yield renamed + "\n\n\n"
        number += 1


def mt_bench(path: Path, count: int | None = None, *, thinking: bool = False) -> list[BenchPrompt]:
    """Read the first turns of the MT-Bench questions (Zheng et al., 2023).

    Args:
        path: `question.jsonl`: one JSON object per line with `question_id`, `category`, `turns`.
        count: maximum number of questions, or None for all.
        thinking: enable the model's thinking.

    Raises InputError if the file is missing or malformed.
    """
    wanted = "one JSON object per line with question_id, category and turns"
    if not path.is_file():
        raise InputError(
            f"{path}: no such file",
            expected=f"MT-Bench's question.jsonl: {wanted}",
            fix="it is part of FastChat, in fastchat/llm_judge/data/mt_bench; pass it with "
            "`dataset`",
        )
    found: list[BenchPrompt] = []
    for number, line in enumerate(
        regular_files.read_regular(path).decode(errors="replace").splitlines()
    ):
        if line.strip():
            row = _question(line)
            if row is None:
                raise InputError(f"{path}, line {number + 1}", expected=wanted, found=line[:40])
            category = str(row.get("category", "mt-bench"))
            name = f"mt-bench-{row.get('question_id', number)}"
            found.append(BenchPrompt(name, category, "chat", row["turns"][0], thinking))
    if len({p.name for p in found}) != len(found):
        raise InputError(f"{path}: question_id", expected="different ones", found="one twice")
    if not found:
        raise InputError(f"{path}: no question", expected=wanted)
    if count is not None and not 1 <= count <= len(found):
        raise UsageError("`count`", expected=f"1 to {len(found)}", found=count)
    return found[:count]


def _question(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    turns = row.get("turns") if isinstance(row, dict) else None
    good = isinstance(turns, list) and turns and isinstance(turns[0], str) and turns[0].strip()
    return row if good else None


def _shipped(name: str) -> str:
    return resources.files(__name__).joinpath(name).read_text(encoding="utf-8")
