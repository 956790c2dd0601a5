"""Compares two result files of `g4spec bench` and finds regressions."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from g4spec.errors import InputError, UsageError
from g4spec.gguf import regular_files
from g4spec.measure.bench_summary import SCHEMA
from g4spec.measure.prompts import title

ACCEPTANCE = 0.001
"""Largest drop in acceptance of a fixed length that is not a regression: acceptance is
deterministic, so a larger drop means another draft."""

_NUMBER, LARGEST = (int, float), 1e15
"""Accepted JSON number types, and the upper limit of a plausible speed."""

_FIELDS: dict[str, type] = {
    "provenance": dict,
    "options": dict,
    "rows": list,
    "texts": dict,
    "identical": bool,
    "recommendation": dict,
    "memory": dict,
    "notes": list,
}

_ENGINE = {
    "n_ctx": "context length",
    "cache_type": "cache type",
    "draft_window": "draft window",
    "draft_p_min": "minimum draft confidence",
}
"""Settings of the engine, and what they are called. Older files do not have them."""

_ROW: dict[str, type | tuple[type, ...]] = {
    "category": str,
    "length": (int, str),
    "tokens_per_second": _NUMBER,
    "spread": list,
    "ratio": _NUMBER,
    "acceptance": _NUMBER,
    "committed": _NUMBER,
}

_FILE: dict[str, type | tuple[type, ...]] = {
    "name": (str, type(None)),
    "sha256": (str, type(None)),
    "source": (str, type(None)),
    "kind": (str, type(None)),
    "types": (dict, type(None)),
}


@dataclass(frozen=True, slots=True)
class Change:
    """One category and draft length in both files. `speed`: new over old. `worse`: why it is a
    regression, or None."""

    category: str
    length: int | str
    old_speed: float
    new_speed: float
    speed: float
    old_acceptance: float
    new_acceptance: float
    worse: str | None


@dataclass(frozen=True, slots=True)
class BenchComparison:
    """The result of a comparison. `regressions`: messages, empty without a regression."""

    changes: list[Change]
    regressions: list[str]
    warnings: list[str]

    def json(self) -> dict[str, Any]:
        return {**asdict(self), "ok": not self.regressions}


def read_result(path: Path) -> dict[str, Any]:
    """Read and check a result file; raise InputError for anything else."""
    try:
        data: dict[str, Any] = json.loads(regular_files.read_regular(path))
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{path}: not JSON", found=error, expected="a file written by `g4spec bench -o`"
        ) from None
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        raise InputError(
            f"{path}: not a result of `g4spec bench` for one request at a time",
            expected=f"schema {SCHEMA}",
            found=f"{schema!r:.80}",
        )
    _check(data, _FIELDS, str(path))
    for number, row in enumerate(data["rows"]):
        if not isinstance(row, dict):
            raise InputError(f"{path}: rows[{number}]", expected="an object", found=f"{row!r:.80}")
        _check(row, _ROW, f"{path}: rows[{number}]")
        speeds = [row["tokens_per_second"], *row["spread"]]
        if len(speeds) != 3 or not all(isinstance(s, _NUMBER) and 0 <= s < LARGEST for s in speeds):
            wanted = "tokens_per_second and two numbers of spread, none below 0"
            raise InputError(f"{path}: rows[{number}]", expected=wanted, found=f"{speeds!r:.80}")
        if not 0 <= row["acceptance"] <= 1:
            raise InputError(f"{path}: rows[{number}]: acceptance", expected="0 to 1")
    _check_origin(data, str(path))
    return data


def _check_origin(data: Mapping[str, Any], where: str) -> None:
    """Raise InputError unless target, draft and texts are described as `bench` does."""
    for name, text in data["texts"].items():
        if not isinstance(text, dict):
            raise InputError(f"{where}: texts: {name}", expected="an object", found=f"{text!r:.80}")
    for name in ("target", "draft"):
        file = data["provenance"].get(name) or {}
        if not isinstance(file, dict):
            raise InputError(f"{where}: {name}", expected="an object", found=f"{file!r:.80}")
        _check({key: file.get(key) for key in _FILE}, _FILE, f"{where}: {name}")
        counts = (file.get("types") or {}).values()
        if not all(isinstance(n, int) for n in counts):
            raise InputError(f"{where}: {name}: types", expected="a number of tensors for each")


def _check(data: Mapping[str, Any], fields: Mapping[str, Any], where: str) -> None:
    for name, kind in fields.items():
        if not isinstance(data.get(name), kind):
            wanted = kind if isinstance(kind, tuple) else (kind,)
            raise InputError(
                f"{where}: {name}",
                expected=" or ".join(k.__name__ for k in wanted),
                found=type(data.get(name)).__name__,
            )


def tolerance(text: str) -> float:
    """Parse a fraction: "5%", "5 %" or "0.05"; raise UsageError for anything else."""
    number, percent, rest = text.strip().partition("%")
    try:
        value = float(number) / (100 if percent else 1)
    except ValueError:
        value = math.nan
    if rest.strip() or not 0 <= value < 1:
        raise UsageError("`tolerance`", expected="0% to 99%", found=text)
    return value


def compare(
    old: Mapping[str, Any], new: Mapping[str, Any], allowed: float = 0.05, *, force: bool = False
) -> BenchComparison:
    """Compare two results that `read` returned.

    A regression is a drop in speed by more than `allowed` if the spreads of the repeats do not
    overlap, lower acceptance of a fixed draft length, or a changed text. Of targets with other
    quant types only the speed is compared: their texts differ, and with them the acceptance.

    Raises InputError if the settings of the two differ, unless `force`.
    """
    unlike, other_target = _unlike(old, new), _retyped("target", old, new)
    retyped = [*_retyped("draft", old, new), *other_target]
    if unlike and not force:
        raise InputError(
            "the two results cannot be compared: " + "; ".join(unlike),
            fix="measure both with the same settings, or pass `force`",
        )
    ours = {(r["category"], r["length"]): r for r in old["rows"]}
    theirs = {(r["category"], r["length"]): r for r in new["rows"]}
    both = [(ours[key], theirs[key]) for key in ours if key in theirs]
    timed = [pair for pair in both if all(row["tokens_per_second"] for row in pair)]
    changes = [_change(*pair, allowed, same_texts=not other_target) for pair in timed]
    if not changes:
        raise InputError("the two results have no (category, draft length) pair to compare")
    if untimed := len(both) - len(timed):
        pairs = "1 pair was" if untimed == 1 else f"{untimed} pairs were"
        unlike.append(f"{pairs} not timed: texts of one token")
    regressions = [
        f"{c.category}, {f'length {c.length}' if c.length else 'plain'}: {c.worse}"
        for c in changes
        if c.worse
    ]
    if missing := len(ours.keys() - theirs.keys()):
        unlike.append(f"{missing} of {len(ours)} settings are only in the old file")
    for name in () if other_target else old["texts"].keys() & new["texts"].keys():
        before, after = old["texts"][name], new["texts"][name]
        if before.get("prompt") == after.get("prompt") and before != after:
            regressions.append(f"the text of {title(name)} changed")
    if not new["identical"]:
        regressions.append("the new result's own texts differ between draft lengths")
    return BenchComparison(changes, sorted(regressions), sorted(unlike + retyped))


def _change(
    old: Mapping[str, Any], new: Mapping[str, Any], allowed: float, *, same_texts: bool
) -> Change:
    before, after = old["tokens_per_second"], new["tokens_per_second"]
    speed = after / before
    worse = []
    if speed < 1 - allowed and max(new["spread"]) < min(old["spread"]):
        worse.append(f"{1 - speed:.1%} slower ({before:.1f} to {after:.1f} tokens/s)")
    fell = new["acceptance"] < old["acceptance"] - ACCEPTANCE
    if same_texts and old["length"] != "auto" and fell:
        worse.append(f"acceptance fell from {old['acceptance']:.1%} to {new['acceptance']:.1%}")
    return Change(
        category=old["category"],
        length=old["length"],
        old_speed=before,
        new_speed=after,
        speed=speed,
        old_acceptance=old["acceptance"],
        new_acceptance=new["acceptance"],
        worse=", ".join(worse) or None,
    )


def _unlike(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the differences between the two measurements' settings, files and machines."""
    found = []
    for name in ("machine", "device", "ops"):
        a, b = old["provenance"].get(name), new["provenance"].get(name)
        if a != b:
            found.append(f"{name} {a} and {b}")
    for name in ("target", "draft"):
        if _retyped(name, old, new):
            continue
        one, two = (side["provenance"].get(name) or {} for side in (old, new))
        if not _is_same_file(one, two):
            found.append(f"{name} {one.get('name')} and {two.get('name')} are different files")
    for name in ("n_predict", "sampler", "ignore_eos", "lengths"):
        a, b = old["options"].get(name), new["options"].get(name)
        if a != b:
            found.append(f"{name} {a} and {b}")
    for name, shown in _ENGINE.items():
        pair = [side["options"][name] for side in (old, new) if name in side["options"]]
        if len(pair) == 2 and pair[0] != pair[1]:
            found.append(f"{shown} " + " and ".join("none" if x is None else str(x) for x in pair))
    prompts = [{n: t.get("prompt") for n, t in side["texts"].items()} for side in (old, new)]
    if prompts[0] != prompts[1]:
        found.append("other prompts")
    return found


def _is_same_file(one: Mapping[str, Any], two: Mapping[str, Any]) -> bool:
    """Return True for one file, or two conversions of one checkpoint, whose metadata say when and
    how they were made."""
    made = [(side.get("source"), side.get("types")) for side in (one, two)]
    same = one.get("sha256") == two.get("sha256") or (made[0] == made[1] and made[0][0])
    return bool(same) and one.get("kind") == two.get("kind")


def _retyped(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return a warning if the targets or drafts have the same kind but other quant types, or [].
    Such results can be compared; targets must also have as many tensors, else they are not two
    files of one model."""
    one, two = (side["provenance"].get(name) or {} for side in (old, new))
    types = [side.get("types") or {} for side in (one, two)]
    if one.get("kind") != two.get("kind") or types[0] == types[1] or not all(types):
        return []
    as_many = sum(types[0].values()) == sum(types[1].values())
    if not as_many and (name == "target" or set(types[0]) == set(types[1])):
        return []
    shown = [
        max((t for t in side if t != "f32"), key=lambda t: side[t], default="f32") for side in types
    ]
    if shown[0] == shown[1]:
        shown = [", ".join(f"{n} {t}" for t, n in side.items()) for side in types]
    found = f"quant type of the {name}: {shown[0]} in the old file, {shown[1]} in the new"
    expected = "; changes of texts and acceptance are no regressions" if name == "target" else ""
    return [found + expected]
