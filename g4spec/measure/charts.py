"""Draws charts as inline SVG. Colours and fonts come from the page's style sheet, for light and
dark mode; every mark has a `<title>`, which browsers show as a tooltip."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH, HEIGHT = 320, 190
LEFT, RIGHT, TOP, BOTTOM = 38, 12, 14, 34
"""Margins in pixels, for the axis labels."""


@dataclass(frozen=True, slots=True)
class Point:
    """One data point. `low`, `high`: ends of its whisker; `strong`: True to highlight it."""

    label: str
    value: float
    low: float
    high: float
    title: str
    strong: bool = False


def ticks(highest: float) -> list[float]:
    """Return about four round axis values from 0 to at least `highest`."""
    if highest <= 0:
        return [0.0, 1.0]
    raw = highest / 4
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(m * unit for m in (1, 2, 2.5, 5, 10) if m * unit >= raw * 0.999)
    return [i * step for i in range(math.ceil(highest / step - 1e-9) + 1)]


def line_chart(
    points: Sequence[Point], apart: Point | None, highest: float, label: str, x_label: str
) -> Markup:
    """Draw a line through `points`, with a dashed baseline at the value of the first.

    Args:
        apart: an extra point, drawn to the right as a diamond (`auto`).
        highest: maximum of the axis, the same for neighbouring charts.
    """
    scale = ticks(highest)
    marks = [*points, apart] if apart else list(points)
    xs = _columns(len(marks))
    out = _axis(scale, lambda v: f"{v:g}")
    base = _y(points[0].value, scale)
    out.append(f'<line class="base" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>')
    path = " ".join(f"{x:.1f},{_y(p.value, scale)}" for x, p in zip(xs, points, strict=False))
    out.append(f'<polyline class="line" points="{path}"/>')
    for x, p in zip(xs, marks, strict=True):
        y = _y(p.value, scale)
        out.append(f"<g><title>{escape(p.title)}</title>")
        out.append(
            f'<line class="whisker" x1="{x:.1f}" x2="{x:.1f}" y1="{_y(p.low, scale)}" '
            f'y2="{_y(p.high, scale)}"/>'
        )
        if p is apart:
            out.append(f'<path class="apart" d="M{x:.1f} {y - 6}l6 6l-6 6l-6-6z"/>')
        else:
            style, radius = ("dot strong", 6) if p.strong else ("dot", 3.5)
            out.append(f'<circle class="{style}" cx="{x:.1f}" cy="{y}" r="{radius}"/>')
        if p.strong:
            out.append(
                f'<text class="value" x="{x:.1f}" y="{max(y - 11, 10)}">{p.value:.0f}</text>'
            )
        out.append("</g>")
    out += _names([p.label for p in marks], xs, x_label)
    return _svg(out, label)


def bar_chart(
    values: Sequence[float], names: Sequence[str], titles: Sequence[str], label: str, x_label: str
) -> Markup:
    """Draw fractions between 0 and 1 as columns."""
    scale = [0.0, 0.25, 0.5, 0.75, 1.0]
    xs = _columns(len(values))
    wide = min(26.0, (WIDTH - LEFT - RIGHT) / max(len(values), 1) * 0.7)
    out = _axis(scale, lambda v: f"{v:.0%}")
    for x, value, title in zip(xs, values, titles, strict=True):
        y, foot = _y(value, scale), HEIGHT - BOTTOM
        out.append(
            f'<rect class="bar" x="{x - wide / 2:.1f}" y="{y}" width="{wide:.1f}" '
            f'height="{max(foot - y, 0.5):.1f}" rx="2"><title>{escape(title)}</title></rect>'
        )
        if len(values) <= 9:
            out.append(f'<text class="value" x="{x:.1f}" y="{y - 4}">{value * 100:.0f}</text>')
    out += _names(names, xs, x_label)
    return _svg(out, label)


def stacked_bars(rows: Sequence[tuple[str, float, float]], label: str) -> Markup:
    """Draw one stacked bar per row (name, draft ms, step ms)."""
    top, high, left, wide = 6, 24, 46, 640
    most = max((a + b for _, a, b in rows), default=0) or 1.0
    out = []
    for i, (name, first, second) in enumerate(rows):
        y, a = top + i * high, first / most * (wide - left - 120)
        b = second / most * (wide - left - 120)
        out.append(
            f"<g><title>{escape(name)}: draft {first:.2f} ms, step {second:.2f} ms</title>"
            f'<text class="row" x="{left - 8}" y="{y + 13}">{escape(name)}</text>'
            f'<rect class="draft" x="{left}" y="{y}" width="{a:.1f}" height="17"/>'
            f'<rect class="step" x="{left + a:.1f}" y="{y}" width="{b:.1f}" height="17"/>'
            f'<text class="note" x="{left + a + b + 8:.1f}" y="{y + 13}">'
            f"{first:.1f} + {second:.1f} ms</text></g>"
        )
    return _svg(out, label, wide, top + high * len(rows))


def _axis(scale: Sequence[float], text: Callable[[float], str]) -> list[str]:
    out = []
    for value in scale:
        y = _y(value, scale)
        out.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        out.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 3.5}">{text(value)}</text>')
    return out


def _names(names: Sequence[str], xs: Sequence[float], label: str) -> list[str]:
    out = [
        f'<text class="name" x="{x:.1f}" y="{HEIGHT - BOTTOM + 14}">{escape(name)}</text>'
        for name, x in zip(names, xs, strict=True)
    ]
    middle = (LEFT + WIDTH - RIGHT) / 2
    return [*out, f'<text class="axis" x="{middle}" y="{HEIGHT - 4}">{escape(label)}</text>']


def _columns(count: int) -> list[float]:
    step = (WIDTH - LEFT - RIGHT) / max(count, 1)
    return [LEFT + step * (i + 0.5) for i in range(count)]


def _y(value: float, scale: Sequence[float]) -> float:
    share = min(max(value / scale[-1], 0.0), 1.0)
    return round(HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP), 1)


def _svg(parts: Sequence[str], label: str, width: int = WIDTH, height: int = HEIGHT) -> Markup:
    return Markup(
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">'
        f"{''.join(parts)}</svg>"
    )
