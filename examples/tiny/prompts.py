"""Held-out prompts by category, detection of looping text, and n-gram lookup."""

import random
from collections import Counter

import data
import needle
import synthetic
import tokenizer as tk

CATEGORIES = ("code", "docs", "chat", "maths", "extraction", "rewriting", "long")


def held_out_ids(tok, end: str) -> list[list[int]]:
    """Return the token ids of the held-out files whose name ends with `end`."""
    return [
        tok.encode(t, add_special_tokens=False).ids
        for k, t in data.held_out_texts().items()
        if k.endswith(end)
    ]


def prompts(tok, category: str, count: int, seed: int = 5) -> list[list[int]]:
    """Return the ids (with BOS) of `count` prompts.

    Files are cut at a line end, conversations before the last answer.
    """
    rng, out = random.Random(f"{seed} {category}"), []
    if category in ("code", "docs"):
        files = [
            f for f in held_out_ids(tok, ".py" if category == "code" else ".txt") if len(f) > 1000
        ]
        while len(out) < count:
            file = rng.choice(files)
            start = rng.randrange(len(file) - 900)
            cut = start + rng.randrange(200, 600)
            while cut < len(file) and file[cut - 1] != tk.NEWLINE:
                cut += 1
            out.append([tk.BOS, *file[start:cut]])
        return out
    functions = synthetic.functions_of(data.held_out_texts())
    filler = "\n".join(t for k, t in data.held_out_texts().items() if k.endswith(".txt"))
    for _ in range(count):
        if category == "long":
            name, start = rng.choice(synthetic.NAMES), rng.randrange(len(filler) // 2)
            fact = needle.FACT.format(name=name, number=rng.randrange(10_000, 99_999))
            body = filler[start : start + rng.randrange(2000, 9000)].strip()
            text = (
                f"<|turn>user\n{fact}{body}\n\nWhat is the secret number of {name}?<turn|>\n"
                "<|turn>model\n"
            )
        else:
            turns = synthetic.conversation(rng, functions, category)
            text = synthetic.render(turns)
            text = text[: text.rindex("<|turn>model\n") + len("<|turn>model\n")]
        out.append([tk.BOS, *tok.encode(text, add_special_tokens=False).ids])
    return out


def loops(ids: list[int], n: int = 16, times: int = 3) -> bool:
    """Return True if an n-gram occurs more than `times` times."""
    grams = Counter(tuple(ids[i : i + n]) for i in range(len(ids) - n + 1))
    return bool(grams) and grams.most_common(1)[0][1] > times


def lookup(ids: list[int], at: int, n: int) -> list[int]:
    """Return up to `n` tokens after the previous occurrence of the last 3 (else 2) tokens."""
    for size in (3, 2):
        key = ids[at - size + 1 : at + 1]
        for i in range(at - 1, size - 2, -1):
            if ids[i - size + 1 : i + 1] == key:
                return ids[i + 1 : i + 1 + n]
    return []
