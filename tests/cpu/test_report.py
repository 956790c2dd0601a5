"""The HTML report is complete, self-contained and escaped, and its numbers are those of the
result."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from g4spec.measure import bench_report as report
from g4spec.measure import charts
from tests.support import bench_result

VOID = {"meta", "link", "br", "line", "polyline", "circle", "path", "rect"}


class Page(HTMLParser):
    """Parses a page, checks that its elements nest, and collects them and the numbers of the
    table."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.cells: dict[tuple[str, str], str] = {}
        self.row = self.field = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.seen.append((tag, named))
        self.row = named.get("data-row") or self.row
        self.field = named.get("data-field") or ""
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag
        self.field = ""

    def handle_data(self, data: str) -> None:
        if self.field:
            self.cells[self.row, self.field] = data


@pytest.fixture
def data() -> dict[str, Any]:
    return bench_result.result()


def test_elements_nest_and_all_charts_are_there(data: dict[str, Any]) -> None:
    page = Page(report.page(data))
    assert page.open == []
    labels = [a["aria-label"] or "" for tag, a in page.seen if tag == "svg"]
    for kind in ("tokens per second by", "acceptance by", "cycles by"):
        assert sum(label.startswith(kind) for label in labels) == 6
    assert len(labels) == 19


def test_the_page_loads_no_other_files(data: dict[str, Any]) -> None:
    text = report.page(data)
    page = Page(text)
    assert not any(tag in ("script", "img", "iframe") for tag, _ in page.seen)
    assert not re.search(r"https?://|url\(|@import|\bon\w+=", text)
    assert "default-src 'none'" in text
    assert "prefers-color-scheme: dark" in text and "width=device-width" in text


def test_the_recommendation_comes_first(data: dict[str, Any]) -> None:
    text = report.page(data)
    assert text.index(data["recommendation"]["words"]) < text.index("<svg")


def test_numbers_are_those_of_the_result(data: dict[str, Any]) -> None:
    cells = Page(report.page(data)).cells
    for row in data["rows"]:
        name = f"{row['category']}/{row['length']}"
        assert cells[name, "tokens_per_second"] == f"{row['tokens_per_second']:.1f}"
        assert cells[name, "ratio"] == f"{row['ratio']:.2f}"
        assert cells[name, "committed"] == f"{row['committed']:.2f}"
        assert cells[name, "acceptance"] == f"{100 * row['acceptance']:.1f} %"


def test_foreign_text_is_escaped(data: dict[str, Any]) -> None:
    attack = "</code><script>alert(1)</script>\"'"
    data["provenance"]["command"] = data["provenance"]["target"]["name"] = attack
    data["notes"] = [attack]
    for row in data["rows"]:
        row["category"] = row["category"].replace("chat", attack)
    data["recommendation"]["words"] = attack
    page = Page(report.page(data))
    assert page.open == [] and not any(tag == "script" for tag, _ in page.seen)


def test_a_failed_benchmark_is_reported(data: dict[str, Any]) -> None:
    data["identical"], data["differences"] = False, [{"prompt": "code-0"}]
    text = report.page(data)
    assert "mean nothing" in text and "identical to plain" not in text


def test_plain_only_and_one_category(data: dict[str, Any], tmp_path: Path) -> None:
    data["rows"] = [r for r in data["rows"] if r["category"] == "code" and r["length"] == 0]
    data["provenance"]["draft"], data["memory"]["grown"] = None, None
    data["recommendation"]["lengths"] = {"code": 0}
    (tmp_path / "a.html").write_text(report.page(data), encoding="utf-8")
    text = (tmp_path / "a.html").read_text()
    assert "Acceptance by position" not in text and Page(text).open == []


def test_auto_as_the_recommendation(data: dict[str, Any]) -> None:
    data["recommendation"]["lengths"] = dict.fromkeys(data["recommendation"]["lengths"], "auto")
    text = report.page(data)
    assert "plain speed with auto<" in text and Page(text).open == []


def test_ticks_are_round_and_reach_the_top() -> None:
    for highest in (0, 0.003, 0.9, 1, 7.3, 99, 100, 388.2, 12345):
        scale = charts.ticks(highest)
        assert scale[0] == 0 and scale[-1] >= highest and 2 <= len(scale) <= 7
    assert charts.ticks(388) == [0, 100, 200, 300, 400]


def test_marks_stay_inside_the_drawing() -> None:
    points = [charts.Point(str(i), v, v * 0.9, v * 1.1, "") for i, v in enumerate((1, 50, 100))]
    svg = str(charts.line_chart(points, points[0], 100, "x", "y"))
    for value in re.findall(r'c?y[12]?="([-\d.]+)"', svg):
        assert 0 <= float(value) <= charts.HEIGHT
