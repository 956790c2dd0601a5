"""Renders the result of a sweep as a self-contained HTML page without scripts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from g4spec.measure import charts
from g4spec.measure.bench_summary import ALL
from g4spec.measure.prompts import TITLES

Rows = list[dict[str, Any]]


def page(data: Mapping[str, Any]) -> str:
    """Return the HTML page of a result file's contents, with all text escaped. Check untrusted
    files with `bench_compare.read_result` first."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["bytes"] = _bytes
    environment.filters["title_of"] = lambda name: TITLES.get(name, name)
    template = environment.from_string(
        resources.files("g4spec.measure").joinpath("bench_report.html").read_text(encoding="utf-8")
    )
    rows: Rows = list(data["rows"])
    categories = list(dict.fromkeys(r["category"] for r in rows))
    single = [c for c in categories if c != ALL] or categories
    drafted = any(r["length"] != 0 for r in rows)
    whole = [r for r in rows if r["category"] == categories[-1]]
    return template.render(
        data=data,
        rows=rows,
        drafted=drafted,
        whole=whole,
        best=_best(data, rows),
        speed=[_speed(c, rows, data["recommendation"]["lengths"]) for c in single],
        positions=[c for c in (_positions(name, rows) for name in single) if c],
        committed=[
            c for c in (_committed(n, rows, data["recommendation"]["lengths"]) for n in single) if c
        ],
        times=charts.stacked_bars(
            [(str(r["length"]), r["draft_ms"], r["step_ms"]) for r in whole],
            "milliseconds of a cycle by draft length",
        ),
    )


def _best(data: Mapping[str, Any], rows: Rows) -> Rows:
    """Return the row of the recommended length of each category."""
    chosen = data["recommendation"]["lengths"]
    return [r for r in rows if chosen.get(r["category"]) == r["length"]]


def _speed(category: str, rows: Rows, chosen: Mapping[str, int | str]) -> tuple[str, Markup]:
    mine = [r for r in rows if r["category"] == category]
    highest = max(max(r["tokens_per_second"], r["spread"][1]) for r in rows)

    def point(row: Mapping[str, Any]) -> charts.Point:
        speed = row["tokens_per_second"]
        return charts.Point(
            str(row["length"]),
            speed,
            row["spread"][0],
            row["spread"][1],
            f"length {row['length']}: {speed:.1f} tokens/s, {row['ratio']:.2f} x plain",
            chosen.get(category) == row["length"],
        )

    fixed = [point(r) for r in mine if r["length"] != "auto"]
    auto = next((point(r) for r in mine if r["length"] == "auto"), None)
    label = f"tokens per second by draft length, {category}"
    return category, charts.line_chart(fixed, auto, highest, label, "drafted tokens per step")


def _positions(category: str, rows: Rows) -> tuple[str, Markup] | None:
    """Chart the acceptance at each position, from the longest fixed draft length."""
    mine = [r for r in rows if r["category"] == category and r["length"] not in (0, "auto")]
    if not mine:
        return None
    row = max(mine, key=lambda r: int(r["length"]))
    pairs = [
        (a, d)
        for a, d in zip(row["accepted_by_position"], row["drafted_by_position"], strict=True)
        if d
    ]
    names = [str(i + 1) for i in range(len(pairs))]
    titles = [f"position {n}: {a} of {d} accepted" for n, (a, d) in zip(names, pairs, strict=True)]
    shares = [a / d for a, d in pairs]
    label = f"acceptance by position, {category}"
    return category, charts.bar_chart(shares, names, titles, label, "position of the drafted token")


def _committed(
    category: str, rows: Rows, chosen: Mapping[str, int | str]
) -> tuple[str, Markup, int | str] | None:
    """Chart the cycles by committed tokens, at the recommended (else shortest) length."""
    mine = [r for r in rows if r["category"] == category and r["length"] != 0]
    if not mine:
        return None
    row = next((r for r in mine if r["length"] == chosen.get(category)), mine[0])
    most = max((i + 1 for i, n in enumerate(row["drafted_by_position"]) if n), default=0)
    counts: Sequence[int] = row["accepted_lengths"][: most + 1]
    total = sum(counts) or 1
    names = [str(i + 1) for i in range(len(counts))]
    titles = [f"{n} tokens: {c} of {total} cycles" for n, c in zip(names, counts, strict=True)]
    label = f"cycles by committed tokens, {category}"
    chart = charts.bar_chart([c / total for c in counts], names, titles, label, "tokens of a cycle")
    return category, chart, row["length"]


def _bytes(value: float | None) -> str:
    if value is None:
        return "an unknown amount"
    units = ("B", "KiB", "MiB", "GiB")
    power = min(int(math.log(max(value, 1), 1024)), len(units) - 1)
    return f"{value / 1024**power:.1f} {units[power]}"
