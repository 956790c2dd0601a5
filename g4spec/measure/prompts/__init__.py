"""Prompts for benchmarks, written for this project and shipped with it.

A category is one kind of work, because acceptance depends on it more than on anything else. `code`
and `long` are the raw beginning of a source file that the model continues, which every model can
do, trained for chat or not; the others are requests in the model's chat template.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from g4spec.errors import InputError, UsageError
from g4spec.gguf import regular_files
from g4spec.runtime.tokenizer import Tokenizer

CATEGORIES = ("code", "chat", "maths", "extraction", "rewriting", "long")
"""In the order of every table."""

TITLES = {"long": "long context", "all": "all prompts"}
"""How a category is called in sentences, where its name does not say it."""

LONG_PROMPTS = 8

LONGEST_TOKEN = 64
"""Characters of a token in what a long prompt is made of, more than there are."""

MT_BENCH_QUESTIONS = 80


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """A text to begin with.

    Attributes:
        name: unique, such as "code-0"; results of two runs are matched by it.
        form: "raw" text, or one "chat" message of the user.
    """

    name: str
    category: str
    form: str
    text: str

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        """Its tokens. A chat prompt is used as raw text when the model has no chat template."""
        if self.form == "chat" and tokenizer.template:
            return tokenizer.chat([{"role": "user", "content": self.text}])
        return tokenizer.encode(self.text)


def prompts(
    tokenizer: Tokenizer,
    categories: Sequence[str] = CATEGORIES,
    count: int | None = None,
    long_tokens: int = 2048,
) -> list[BenchPrompt]:
    """The first `count` prompts of each category, or all of them.

    Args:
        long_tokens: length of the prompts of category `long`.

    Raises UsageError for an unknown category, or when there are fewer prompts.
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
            BenchPrompt(f"{category}-{i}", category, form, text)
            for i, text in enumerate(texts[:count])
        ]
    return found


def check_categories(categories: Sequence[str], count: int | None = None) -> None:
    """UsageError for an unknown category, or more prompts than there are."""
    for category in categories:
        if category not in CATEGORIES:
            raise UsageError("--categories", expected=", ".join(CATEGORIES), found=category)
        if count is None:
            continue
        # Long prompts are put together, as many as are wanted.
        texts = [] if category == "long" else _category(category)[0]
        if not 1 <= count <= (len(texts) or count):
            raise UsageError(
                "--prompts", expected=f"1 to {len(texts) or LONG_PROMPTS}", found=count
            )


@functools.cache
def _category(name: str) -> tuple[list[str], str]:
    """The shipped prompts of a category, and their form."""
    data = json.loads(_shipped(f"{name}.json"))
    return data["prompts"], data["form"]


def long_prompt_tokens(asked: int | None, n_ctx: int, n_predict: int, usual: int) -> int:
    """Tokens of long prompts: as many as asked for, or the usual number, as far as they fit.

    Raises UsageError for more than a context of `n_ctx` has beside `n_predict` new ones.
    """
    free = n_ctx - n_predict
    if asked is not None and asked > max(free, 0):
        raise UsageError(
            "--long-tokens",
            expected=f"at most {free}, the context less -n",
            found=asked,
            fix="raise -c or lower -n",
        )
    return asked or min(usual, free)


def long_text(tokenizer: Tokenizer, tokens: int, index: int) -> str:
    """A Python module of at most `tokens` tokens that breaks off inside its last function.

    Prompt `index` breaks off in shipped function `index`, which is nowhere before it. When the
    other functions do not suffice they come again under other names; with a tokenizer that makes
    no tokens of them the text ends, too.
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


def mt_bench(path: Path, count: int | None = None) -> list[BenchPrompt]:
    """First turns of the MT-Bench questions (Zheng et al., 2023), as serving benchmarks use them.

    Args:
        path: `question.jsonl`: one object a line with `question_id`, `category`, `turns`.
        count: only the first ones.

    Raises InputError when the file is missing or is something else.
    """
    wanted = "one JSON object a line with question_id, category and turns"
    if not path.is_file():
        raise InputError(
            f"{path}: no such file",
            expected=f"MT-Bench's question.jsonl: {wanted}",
            fix="it is part of FastChat, in fastchat/llm_judge/data/mt_bench; pass it with "
            "--dataset",
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
            found.append(BenchPrompt(name, category, "chat", row["turns"][0]))
    if len({p.name for p in found}) != len(found):
        raise InputError(f"{path}: question_id", expected="different ones", found="one twice")
    if not found:
        raise InputError(f"{path}: no question", expected=wanted)
    if count is not None and not 1 <= count <= len(found):
        raise UsageError("--prompts", expected=f"1 to {len(found)}", found=count)
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
