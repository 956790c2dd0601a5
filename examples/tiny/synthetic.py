# ruff: noqa: SIM905
"""Synthetic conversations and recall tasks, from fixed seeds.

A conversation is a list of (user, model) texts; recall tasks are built in `data`.
"""

import ast
import json
import random
import re

NAMES = """
Maple Anna Boris Clara David Elena Felix Grace Henry Irene Jonas Karen Lukas Maria Nora Oscar
Paula Quinn Robert Sofia Thomas Ursula Victor Wanda Xenia Yusuf Zoe Alder Birch Cedar Delta Ember
Falcon Garnet Harbor Indigo Jasper Kestrel Lotus Meadow Nimbus Onyx Pepper Quartz Raven Saffron
Tulip Umber Violet Willow Zephyr Amber Basil Cobalt Dune Echo Fern Glacier Hazel Iris Juniper
""".split()
ITEMS = """
apples pears books coins cards pencils stamps marbles tickets bottles files pages boxes eggs cups
keys
""".split()
CITIES = """
Berlin Paris Oslo Madrid Rome Vienna Prague Dublin Lisbon Athens Warsaw Zurich Tokyo Lima Cairo
Delhi
""".split()
JOBS = """
engineer teacher doctor painter farmer pilot writer baker lawyer nurse chemist driver singer judge
""".split()
COLORS = """
red green blue yellow white black orange purple brown grey pink silver
""".split()
THINGS = """
house river garden window bridge mountain table letter train market forest engine lamp ship tower
road
""".split()
VERBS = """
stands waits shines turns moves sleeps falls grows breaks opens closes burns
""".split()
PLACES = [
    "near the river",
    "behind the house",
    "in the old town",
    "under the bridge",
    "at the station",
    "by the sea",
]


def sentence(rng: random.Random) -> str:
    """Return a short random statement."""
    return (
        f"The {rng.choice(COLORS)} {rng.choice(THINGS)} {rng.choice(VERBS)} {rng.choice(PLACES)}"
        f"{rng.choice(['', ' every day', ' at night', ' in winter'])}."
    )


def arithmetic(rng: random.Random) -> tuple[str, str]:
    """Return a sum, product or one-step story, and its worked answer."""
    kind = rng.randrange(5)
    a, b = rng.randrange(2, 100), rng.randrange(2, 100)
    if kind == 0:
        return f"What is {a} + {b}?", f"{a} + {b} = {a + b}. The answer is {a + b}."
    if kind == 1:
        a, b = max(a, b), min(a, b)
        return f"What is {a} - {b}?", f"{a} - {b} = {a - b}. The answer is {a - b}."
    if kind == 2:
        a, b = rng.randrange(2, 13), rng.randrange(2, 13)
        return f"What is {a} * {b}?", f"{a} * {b} = {a * b}. The answer is {a * b}."
    who, what = rng.choice(NAMES), rng.choice(ITEMS)
    if kind == 3:
        return (
            f"{who} has {a} {what} and buys {b} more. How many {what} does {who} have now?",
            f"{who} starts with {a} {what}. {who} buys {b} more. {a} + {b} = {a + b}. "
            f"The answer is {a + b}.",
        )
    a, b = max(a, b), min(a, b)
    return (
        f"{who} has {a} {what} and gives away {b}. How many {what} are left?",
        f"{who} starts with {a} {what}. {who} gives away {b}. {a} - {b} = {a - b}. "
        f"The answer is {a - b}.",
    )


def record(rng: random.Random) -> dict[str, object]:
    """Return a random person."""
    name = rng.choice(NAMES)
    fields = {
        "name": name,
        "city": rng.choice(CITIES),
        "age": rng.randrange(18, 90),
        "job": rng.choice(JOBS),
        "color": rng.choice(COLORS),
        "email": f"{name.lower()}{rng.randrange(10, 99)}@example.com",
        "phone": f"{rng.randrange(100, 999)}-{rng.randrange(1000, 9999)}",
        "id": rng.randrange(1000, 99999),
    }
    keys = rng.sample(list(fields), rng.randrange(4, 8))
    return {k: fields[k] for k in keys}


def extraction(rng: random.Random) -> tuple[str, str]:
    """Ask for one or more fields of a record given as JSON or lines."""
    fields = record(rng)
    key = rng.choice(list(fields))
    kind = rng.randrange(4)
    lines = "\n".join(f"{k}: {v}" for k, v in fields.items())
    if kind == 0:
        return (
            f"Give the {key} from this record:\n{json.dumps(fields)}",
            f"The {key} is {fields[key]}.",
        )
    if kind == 1:
        return f"Give the {key} from this record:\n{lines}", f"The {key} is {fields[key]}."
    if kind == 2:
        return f"Turn this record into JSON:\n{lines}", json.dumps(fields, indent=2)
    keys = ", ".join(list(fields)[:3])
    return (
        f"List the {keys} of this record:\n{json.dumps(fields)}",
        "\n".join(f"- {k}: {fields[k]}" for k in list(fields)[:3]),
    )


def rewriting(rng: random.Random, functions: list[dict]) -> tuple[str, str]:
    """Ask to repeat a text with one change."""
    kind = rng.randrange(6)
    text = " ".join(sentence(rng) for _ in range(rng.randrange(1, 5)))
    words = rng.sample(THINGS, rng.randrange(3, 8))
    if kind == 0:
        return f"Write this text in upper case:\n{text}", text.upper()
    if kind == 1:
        return f"Repeat this text:\n{text}", text
    if kind == 2:
        return f"Turn this list into bullet points:\n{', '.join(words)}", "\n".join(
            f"- {w}" for w in words
        )
    if kind == 3:
        return "Join these lines with commas:\n" + "\n".join(words), ", ".join(words)
    if kind == 4:
        old, new = rng.choice(re.findall(r"The (\w+)", text)), rng.choice(COLORS)
        return f"Replace {old} by {new} in this text:\n{text}", re.sub(rf"\b{old}\b", new, text)
    f = rng.choice(functions)
    names = [n for n in f["names"] if len(n) > 2] or ["self"]
    old, new = rng.choice(names), f"{rng.choice(THINGS)}_{rng.choice(COLORS)}"
    return (
        f"Rename {old} to {new} in this code:\n```python\n{f['code']}\n```",
        f"```python\n{re.sub(rf'(?<![A-Za-z0-9_]){old}(?![A-Za-z0-9_])', new, f['code'])}\n```",
    )


def python_question(rng: random.Random, functions: list[dict]) -> tuple[str, str]:
    """Ask what a library function does, or for its code."""
    f = rng.choice(functions)
    kind = rng.randrange(3)
    if kind == 0:
        return f"What does {f['name']} in the module {f['module']} do?", f["summary"]
    if kind == 1:
        return (
            f"Write a Python function {f['signature']}. {f['summary']}",
            f"```python\n{f['code']}\n```",
        )
    return (
        f"Explain this code:\n```python\n{f['bare']}\n```",
        f"The function {f['name']}: {f['summary']}",
    )


def small_talk(rng: random.Random) -> tuple[str, str]:
    """Return a greeting or similar small talk."""
    who = rng.choice(NAMES)
    return rng.choice(
        [
            ("Hello!", "Hello! How can I help you?"),
            ("Hi, how are you?", "I am fine, thank you. How can I help you?"),
            (f"My name is {who}. What is my name?", f"Your name is {who}."),
            ("Thank you.", "You are welcome."),
            ("Who are you?", "I am a small language model trained on Python sources."),
            (f"Say hello to {who}.", f"Hello, {who}!"),
            (
                "What can you do?",
                "I can answer questions about Python, "
                "do simple sums, take fields from records and rewrite short texts.",
            ),
        ]
    )


def functions_of(texts: dict[str, str]) -> list[dict]:
    """Return short documented functions of the corpus, with code, summary and used names."""
    found: list[dict] = []
    for path, text in texts.items():
        if not path.endswith(".py"):
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef) or not (doc := ast.get_docstring(node)):
                continue
            code = "\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno])
            code = "\n".join(line[node.col_offset :] for line in code.splitlines())
            summary = " ".join(doc.split("\n\n")[0].split())
            if len(code) > 900 or not 20 < len(summary) < 220:
                continue
            names = sorted(
                {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
                | {a.arg for a in node.args.args}
            )
            found.append(
                {
                    "name": node.name,
                    "module": path[:-3].replace("/", "."),
                    "code": code,
                    "summary": summary,
                    "signature": code.splitlines()[0][4:].rstrip(":"),
                    "bare": re.sub(r'"""(.|\n)*?"""\n *', "", code),
                    "names": names,
                }
            )
    return found


def conversation(
    rng: random.Random, functions: list[dict], kind: str | None = None
) -> list[tuple[str, str]]:
    """Return one to five turns; `kind` fixes the category."""
    makers = {
        "maths": arithmetic,
        "extraction": extraction,
        "rewriting": lambda r: rewriting(r, functions),
        "chat": lambda r: python_question(r, functions) if r.random() < 0.8 else small_talk(r),
    }
    names = [kind] if kind else list(makers)
    return [makers[rng.choice(names)](rng) for _ in range(rng.randrange(1, 6))]


def render(turns: list[tuple[str, str]], rng: random.Random | None = None) -> str:
    """Format a conversation with the chat template, without BOS."""
    head = (
        "<|turn>system\nYou are a helpful assistant.<turn|>\n" if rng and rng.random() < 0.1 else ""
    )
    return head + "".join(
        f"<|turn>user\n{u.strip()}<turn|>\n<|turn>model\n{m.strip()}<turn|>\n" for u, m in turns
    )


def chat_text(seed: int, functions: list[dict]) -> str:
    """Return conversation number `seed` as text."""
    rng = random.Random(seed)
    return render(conversation(rng, functions), rng)
