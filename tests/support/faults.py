"""Mutation testing of `validate`: plausible conversion faults, planted one at a time into a good
file.

`faults(file)` lists the faults of every key and every tensor; `Fault.plant` returns a copy with one
of them. Faults of tensors: dropped, doubled, halved, negated, rows permuted, halves of query and
key heads swapped or interleaved, norms shifted by one, replaced by another layer's tensor, swapped
with a neighbour. Faults of keys: dropped, off by one, doubled, halved, negated, neighbours swapped,
shortened, replaced by another text.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from g4spec import quant
from g4spec.convert.expected_metadata import ORIGIN_KEYS
from g4spec.gguf import GGUF, Value, ValueType
from g4spec.validate import Report, validate
from g4spec.validate.rule import NOTE
from tests.cpu.gguf_fixtures import Entry, File

IGNORED = (*ORIGIN_KEYS, "general.name")
"""Provenance keys: nothing is computed from them."""
ATTENTION = re.compile(r"blk\.\d+\.attn_[qk]\.weight")
LAYER = re.compile(r"blk\.(\d+)\.(.*)")

Edit = Callable[[File], None]


@dataclass(frozen=True)
class Fault:
    """One fault. `name` describes it, `where` is the key or tensor."""

    name: str
    where: str
    edit: Edit

    def plant(self, file: File) -> File:
        """Return a copy of `file` with this fault."""
        out = replace(file, kv=dict(file.kv), tensors=copy.copy(file.tensors))
        self.edit(out)
        return out


def read(path: Path) -> File:
    """Return a GGUF file as data."""
    with GGUF(path) as file:
        kv = {}
        for key in file:
            value = file.value(key)
            data = value.data.tolist() if isinstance(value.data, np.ndarray) else value.data
            kv[key] = Value(value.type, data, value.item)
        tensors = {
            name: Entry(t.shape, t.format.type, file.raw(name).tobytes())
            for name, t in file.tensors.items()
        }
    return File(kv, tensors)


def faults(file: File) -> list[Fault]:
    """Return all faults, keys first, in the order of the file."""
    found = [f for key, v in file.kv.items() if key not in IGNORED for f in _of_key(key, v)]
    return found + [f for name in file.tensors for f in _of_tensor(file, name)]


def _of_key(key: str, v: Value) -> Iterator[Fault]:
    yield Fault("dropped", key, lambda file: file.kv.__delitem__(key))
    changes = _of_array(v.data, v.item) if v.type is ValueType.ARRAY else _of_scalar(v.data, v.type)
    for name, data in changes.items():
        if not _same(data, v.data) and _storable(data, v.item or v.type):
            yield Fault(name, key, lambda file, data=data: file.set(key, v.type, data, v.item))


def _same(a: Any, b: Any) -> bool:
    return bool(a == b)


def _storable(data: Any, kind: ValueType) -> bool:
    """Return True if the integer type can hold the values (unsigned types hold no negative
    ones)."""
    if kind not in (ValueType.U32, ValueType.I32, ValueType.U64, ValueType.I64):
        return True
    low, high = (0, 1 << 32) if kind is ValueType.U32 else (-(1 << 31), 1 << 31)
    return all(low <= x < high for x in (data if isinstance(data, list) else [data]))


def _of_scalar(x: Any, kind: ValueType) -> dict[str, Any]:
    if isinstance(x, bool):
        return {"flipped": not x}
    if isinstance(x, str):
        return {"emptied": "", "cut": x[:-1], "another": x[1:] + x[:1]}
    if kind in (ValueType.F32, ValueType.F64):
        return {"doubled": 2 * x, "halved": x / 2, "sign": -x, "ten times": 10 * x}
    return {"one more": x + 1, "one less": x - 1, "doubled": 2 * x, "halved": x // 2}


def _of_array(x: list[Any], item: ValueType | None) -> dict[str, list[Any]]:
    out = {"cut": x[:-1], "neighbours swapped": [x[i] for i in _swapped(x)]}
    if item is ValueType.BOOL:
        return out | {"inverted": [not i for i in x], "first flipped": [not x[0], *x[1:]]}
    if item is ValueType.STRING:
        return out | {"first repeated": [x[0], *x[:-1]]}
    return out | {
        "one more": [i + 1 for i in x],
        "one less": [i - 1 for i in x],
        "doubled": [2 * i for i in x],
        "first one more": [x[0] + 1, *x[1:]],
        "sign": [-i for i in x],
    }


def _swapped(x: list[Any]) -> list[int]:
    """Return indices in which the middle one of the unequal neighbour pairs is swapped."""
    order = list(range(len(x)))
    at = [i for i in range(len(x) - 1) if x[i] != x[i + 1]]
    if at:
        i = at[len(at) // 2]
        order[i], order[i + 1] = i + 1, i
    return order


def _of_tensor(file: File, name: str) -> Iterator[Fault]:
    entry = file.tensors[name]
    form = quant.by_type(entry.type)
    yield Fault("dropped", name, lambda f: f.tensors.__delitem__(name))
    if form.integer:
        changes = _of_index(entry)
    else:
        changes = _of_values(form, entry, name)
    for what, data in changes.items():
        if data != entry.data:
            made = replace(entry, data=data)
            yield Fault(what, name, lambda f, made=made: f.tensors.__setitem__(name, made))
    yield from _of_neighbours(file, name)


def _of_index(entry: Entry) -> dict[str, bytes]:
    x = np.frombuffer(entry.data, np.int64)
    order = _swapped(x.tolist())
    made = {
        "one more": x + 1,
        "one less": x - 1,
        "doubled": 2 * x,
        "neighbours swapped": x[order],
        "rolled": np.roll(x, 1),
        "as deltas": x - np.arange(len(x)),
    }
    return {name: values.astype(np.int64).tobytes() for name, values in made.items()}


def _of_values(form: quant.Format, entry: Entry, name: str) -> dict[str, bytes]:
    rows = int(np.prod(entry.shape[:-1]))
    raw = np.frombuffer(entry.data, np.uint8).reshape(rows, -1)
    x = form.array(raw, (rows, entry.shape[-1])).astype(np.float32)
    made = {"doubled": 2 * x, "halved": x / 2, "sign": -x}
    if "norm" in name:
        made |= {"plus one": x + 1, "less one": x - 1}
    out = {what: form.quantize(y).tobytes() for what, y in made.items()}
    if rows > 1:
        order = np.random.default_rng(rows).permutation(rows)
        out["rows permuted"] = raw[order].tobytes()
    if ATTENTION.fullmatch(name):
        heads = raw.reshape(-1, 2, rows // _heads(rows) // 2, raw.shape[1])
        pairs = heads.swapaxes(1, 2)  # layout of interleaved RoPE
        out |= {"halves swapped": heads[:, ::-1].tobytes(), "halves as pairs": pairs.tobytes()}
    return out


def _heads(rows: int) -> int:
    """Return a number of heads that divides the rows into even parts."""
    return 2 if rows % 4 == 0 and rows >= 128 else 1


def _of_neighbours(file: File, name: str) -> Iterator[Fault]:
    """Yield faults that replace this tensor by the next layer's, swap the two, or swap it with a
    tensor of the same layer (gate and up, keys and values, norms of queries and keys)."""
    match, entry = LAYER.fullmatch(name), file.tensors[name]
    if match is None:
        return
    following = f"blk.{int(match[1]) + 1}.{match[2]}"
    others = {"another layer's copy": following, "exchanged with the next layer's": following}
    for a, b in (
        ("ffn_gate.", "ffn_up."),
        ("attn_k.", "attn_v."),
        ("attn_q_norm.", "attn_k_norm."),
    ):
        if match[2].startswith(a):
            others[f"exchanged with {b[:-1]}"] = f"blk.{match[1]}.{match[2].replace(a, b)}"
    for what, other in others.items():
        its = file.tensors.get(other)
        if its is None or its.shape != entry.shape or its.data == entry.data:
            continue
        swap = what.startswith("exchanged")
        yield Fault(
            what,
            name,
            lambda f, o=other, i=its, both=swap: f.tensors.update(
                {
                    name: replace(entry, data=i.data),
                    **({o: replace(i, data=entry.data)} if both else {}),
                }
            ),
        )


def findings(report: Report) -> set[tuple[str, str]]:
    """Return errors and warnings of a report, and the reasons why rules could not be checked."""
    reported = {
        (f.rule.id, f"{f.finding.where} {f.finding.found}")
        for f in report.failures
        if f.rule.severity is not NOTE
    }
    return reported | {("unable", why) for why in report.unable.values()}


def named(
    file: File,
    fault: Fault,
    path: Path,
    known: set[tuple[str, str]],
    target: Path | None,
    source: Path | None,
) -> bool:
    """Return True if `validate` reports more about a file with this fault than `known`."""
    fault.plant(file).write(path)
    return bool(findings(validate(path, target, source)) - known)
