"""Small seeded changes to files: to bytes, JSON trees, GGUF keys and tensor entries."""

from __future__ import annotations

import copy
import json
import random
import struct
from typing import Any

from g4spec.gguf import Value, ValueType
from tests.cpu import gguf_fixtures as fixtures

NUMBERS = [
    0,
    1,
    2,
    7,
    31,
    63,
    127,
    255,
    256,
    511,
    512,
    1 << 15,
    1 << 16,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 32,
    1 << 40,
    1 << 62,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
]
ODD: list[Any] = [
    None,
    True,
    False,
    -1,
    0,
    1,
    2,
    1 << 31,
    1 << 63,
    10**30,
    10**400,
    0.5,
    -0.0,
    1e308,
    "",
    "x",
    "\x00",
    "..",
    "../x",
    "\ud800",
    [],
    {},
    [[]],
    [None],
    {"": None},
    [0] * 40,
]
WORDS = [
    b"[" * 4000,
    b'{"a":' * 4000,
    b"NaN",
    b"1e999",
    b"-1",
    b"null",
    b'""',
    b"\xff\xfe",
    b"\x00",
    b"{{",
    b"}}",
    b"{%",
    b"%}",
    b"range(9)",
    b"..",
    b"\\ud800",
    b"9" * 5000,
]


def mutate_bytes(data: bytes, rng: random.Random, other: bytes) -> bytes:
    """Make a few small changes at random places."""
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 4])):
        # The most relevant bytes are at the beginning.
        end = len(out) if rng.random() < 0.3 else min(len(out), rng.choice([64, 400, 4000]))
        at = rng.randrange(end + 1)
        kind = rng.randrange(8)
        if kind == 0 and out:
            out[min(at, len(out) - 1)] ^= 1 << rng.randrange(8)
        elif kind == 1 and out:
            out[min(at, len(out) - 1)] = rng.randrange(256)
        elif kind == 2:
            number, size = rng.choice(NUMBERS), rng.choice([1, 2, 4, 8])
            out[at : at + size] = struct.pack("<Q", number)[:size]
        elif kind == 3:
            del out[at : at + rng.choice([1, 2, 8, 100, 10000])]
        elif kind == 4:
            out[at:at] = rng.choice(WORDS)
        elif kind == 5:
            piece = out[at : at + rng.choice([1, 8, 64, 512])]
            out[at:at] = piece
        elif kind == 6 and other:
            start = rng.randrange(len(other))
            out[at : at + 32] = other[start : start + rng.choice([4, 32, 500])]
        else:
            del out[at:]
    return bytes(out)


def mutate_json(data: bytes, rng: random.Random, other: bytes) -> bytes:
    """Replace a random value of the tree by an unusual one, move it or remove it; or change
    bytes."""
    if rng.random() < 0.2:
        return mutate_bytes(data, rng, other)
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return mutate_bytes(data, rng, other)
    for _ in range(rng.choice([1, 1, 2, 3])):
        holder, key = _place(tree, rng)
        if holder is None:
            break
        kind = rng.randrange(5)
        if kind == 0:
            del holder[key]
        elif kind == 1:
            holder[key] = [copy.deepcopy(holder[key]) for _ in range(rng.choice([1, 2, 50]))]
        elif kind == 2 and isinstance(holder[key], (int, float)):
            holder[key] = rng.choice([-1, 1]) * rng.choice(NUMBERS)
        else:
            holder[key] = copy.deepcopy(rng.choice(ODD))
    return json.dumps(tree).encode()


def _place(tree: Any, rng: random.Random) -> tuple[Any, Any]:
    """Return a random container and key; deep places are as likely as shallow ones."""
    holder: Any = None
    key: Any = None
    while isinstance(tree, (dict, list)) and tree:
        holder, key = (
            tree,
            rng.choice(list(tree)) if isinstance(tree, dict) else rng.randrange(len(tree)),
        )
        if rng.random() < 0.4:
            break
        tree = tree[key]
    return holder, key


def mutate_events(data: bytes, rng: random.Random, other: bytes) -> bytes:
    """Mutate the JSON of one server-sent event, or change bytes."""
    lines = data.split(b"\n")
    with_data = [i for i, line in enumerate(lines) if line.startswith(b"data: ")]
    if not with_data or rng.random() < 0.2:
        return mutate_bytes(data, rng, other)
    at = rng.choice(with_data)
    lines[at] = b"data: " + mutate_json(lines[at][6:], rng, other)
    return b"\n".join(lines)


def mutate_gguf(data: bytes, rng: random.Random, other: bytes) -> bytes:
    """Change a key or tensor entry of a file that stays well-formed; or change bytes."""
    file = FILES.get(data)
    if file is None or rng.random() < 0.3:
        return mutate_bytes(data, rng, other)
    kv, tensors = (
        dict(file.kv),
        {k: fixtures.Entry(v.shape, v.type, v.data) for k, v in file.tensors.items()},
    )
    changed = fixtures.File(kv, tensors)
    change_gguf(changed, rng)
    try:
        return changed.bytes()
    except (struct.error, UnicodeEncodeError, OverflowError):
        return mutate_bytes(data, rng, other)


def change_gguf(file: fixtures.File, rng: random.Random) -> None:
    """Change one or two keys or tensor entries of a file."""
    kv, tensors = file.kv, file.tensors
    for _ in range(rng.choice([1, 1, 2])):
        if tensors and rng.random() < 0.3:
            name = rng.choice(list(tensors))
            entry = tensors[name]
            kind = rng.randrange(5)
            if kind == 0:
                tensors[name + rng.choice(["x", ".weight", ""])] = tensors.pop(name)
            elif kind == 1:
                entry.shape = tuple(
                    rng.choice([*entry.shape, *NUMBERS[:20]]) for _ in range(rng.randrange(5))
                )
            elif kind == 2:
                entry.type = rng.choice([*range(25), 26, 27, 28, 29, 30, 39, 40, 41, 42, 45, 99])
            elif kind == 3 and entry.data:
                at = rng.randrange(len(entry.data))
                some = bytes(rng.randrange(256) for _ in range(4))
                odd = rng.choice([b"\xff" * 8, b"\0" * 8, some])
                entry.data = (entry.data[:at] + odd + entry.data[at + 8 :])[: len(entry.data)]
            else:
                del tensors[name]
        elif kv:
            key = rng.choice(list(kv))
            kv[key] = _odd_value(kv[key], rng)
            if rng.random() < 0.2:
                del kv[key]


def _odd_value(value: Value, rng: random.Random) -> Value:
    if value.type is ValueType.ARRAY and rng.random() < 0.7:
        data = list(value.data)
        at = rng.randrange(len(data)) if data else 0
        kind = rng.randrange(4)
        if kind == 0:
            data = data[:at]
        elif kind == 1:
            data = data + data[at : at + 3]
        elif data:
            numbers = [0, 1, -1, 255, 511, 512, 1 << 30]
            pool: list[Any] = ODD_TEXT if value.item is ValueType.STRING else numbers
            data[at] = (
                bool(at % 2) if value.item is ValueType.BOOL else rng.choice([*pool, data[at // 2]])
            )
        return Value(ValueType.ARRAY, data, value.item)
    kind = rng.choice(
        [
            ValueType.U32,
            ValueType.I32,
            ValueType.U64,
            ValueType.F32,
            ValueType.BOOL,
            ValueType.STRING,
            ValueType.ARRAY,
        ]
    )
    if kind is ValueType.STRING:
        return Value(kind, rng.choice(ODD_TEXT))
    if kind is ValueType.ARRAY:
        return Value(kind, [rng.randrange(4) for _ in range(rng.randrange(20))], ValueType.I32)
    if kind is ValueType.F32:
        return Value(kind, rng.choice([0.0, -1.0, float("nan"), float("inf"), 1e38]))
    return Value(
        kind, bool(rng.randrange(2)) if kind is ValueType.BOOL else rng.choice(NUMBERS[:13])
    )


ODD_TEXT = [
    "",
    " ",
    "a b",
    "a",
    "\x00",
    "<0xZZ>",
    "<0x41>",
    "\u2581" * 300,
    "<bos>",
    "gemma4",
    "dflash",
    "gemma4-assistant",
    "gemma4_mtp",
    "dflash-draft",
    "{{ x",
    "{% for i in x %}",
]
FILES: dict[bytes, fixtures.File] = {}
"""GGUF seeds as data."""
