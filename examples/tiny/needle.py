"""Needle test: a prompt with one fact right after BOS, filler, and the question at the end."""

from collections.abc import Callable

FACT = "The secret number of {name} is {number}.\n"
QUESTION = "\nQuestion: What is the secret number of {name}?\nAnswer:"
ANSWER = " {number}."


def needle_prompt(
    encode: Callable[[str], list[int]],
    filler: str,
    tokens: int = 3359,
    name: str = "Maple",
    number: str = "48213",
) -> str:
    """Return a prompt of exactly `tokens` tokens, BOS included; the right answer is " 48213.".

    Args:
        encode: returns the token ids of a text, without BOS.
        filler: text to fill the middle with; lines that do not fit are skipped.
    """
    fact, question = FACT.format(name=name, number=number), QUESTION.format(name=name)
    budget = tokens - 1 - len(encode(fact)) - len(encode(question))
    used: list[str] = []
    for raw in filler.splitlines():
        line = raw.rstrip() + "\n"
        if line == "\n" or len(encode("".join(used) + line)) > budget - 1:
            continue
        used.append(line)
        if len(encode("".join(used))) == budget - 1:
            break
    body = "".join(used)
    while len(encode(fact + body + question)) + 1 < tokens:
        body += "#"  # the tokenizer never merges it with the text before it
        body += "" if len(encode(fact + body + question)) + 1 <= tokens else "\n"
    text = fact + body + question
    if len(encode(text)) + 1 != tokens:
        raise ValueError(f"the filler gives {len(encode(text)) + 1} tokens, wanted {tokens}")
    return text
