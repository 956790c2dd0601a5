"""The facts of doctor and recipe: schema, sources, completeness."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from g4spec import __version__, quant
from g4spec.advisor import facts as loader
from g4spec.advisor import schema as rows
from g4spec.advisor import versions
from g4spec.advisor.facts import FOLDER, BadFact, Facts, facts
from g4spec.advisor.figures import CacheTableFact, ContextFitFact, MemoryReadingFact
from g4spec.advisor.schema import (
    CardFact,
    Conditions,
    ErrorFact,
    Fact,
    FlagFact,
    ProblemFact,
    SizeFact,
    SourceFact,
)
from g4spec.advisor.software_facts import BackendFact


@pytest.fixture(scope="module")
def known() -> Facts:
    return facts()


def test_every_row_has_content(known: Facts) -> None:
    silent = (
        rows.CardFact,
        rows.CapabilityFact,
        rows.SupportFact,
        rows.SizeFact,
        rows.WeightsFact,
        BackendFact,
        FlagFact,
        ErrorFact,
        CacheTableFact,
        ContextFitFact,
        MemoryReadingFact,
    )
    empty = [
        r.id
        for r in known
        if not r.says
        and not isinstance(r, (*silent, SourceFact))
        and type(r).__name__ not in ("DraftLengthFact", "DraftFact")
    ]
    assert empty == []


def test_sources_are_public_links(known: Facts) -> None:
    for row in known:
        for link in known.cite(row):
            assert re.match(r"https://[\w.-]+/", link) or link.startswith("g4spec/"), (row.id, link)
            assert " " not in link


def test_dates_are_not_in_the_future(known: Facts) -> None:
    assert [r.id for r in known if not "2026-01" <= r.date <= "2026-11-30"] == []


def test_no_shorthand_in_texts(known: Facts) -> None:
    """Shorthand of the research notes must not appear in the data."""
    bad = re.compile(r"\bC3090\b|\bhd\d|§|\bmnbt\b|\[W\d\d\]|\bEV\b|\*\*")
    for row in known:
        for name in ("says", "fix", "title", "cause", "reason", "item", "value", "now", "sure"):
            text = getattr(row, name, "")
            if isinstance(text, str):
                assert not bad.search(text), (row.id, name, bad.search(text), text)


def test_sizes_of_files() -> None:
    for path in FOLDER.glob("*.toml"):
        assert path.stat().st_size < 100_000, path.name


def test_ids_that_rows_mention_exist(known: Facts) -> None:
    for p in known.all(ProblemFact):
        assert [c for c in p.cured if not isinstance(known.by_id.get(c), FlagFact)] == [], p.id
        assert [c for c in p.when.cards if not isinstance(known.by_id.get(c), CardFact)] == [], p.id
        assert [m for m in p.when.model if not isinstance(known.by_id.get(m), SizeFact)] == [], p.id
        assert [
            d for d in p.when.drafts if not isinstance(known.by_id.get(d), rows.DraftFact)
        ] == []


def test_every_flag_says_for_which_versions_it_holds(known: Facts) -> None:
    """A range, or that the engine does not matter, or that it is unknown. Flags that do not depend
    on the version hold in the newest one that the facts know, for which recipes are written."""
    newest = {e.name: e.newest for e in known.all(rows.EngineFact)} | {"g4spec": __version__}
    for flag in known.all(FlagFact):
        assert bool(flag.holds) != bool(flag.when.versions), flag.id
        if flag.versions in ("any", "unknown"):
            continue
        versions.check(flag.versions)
        if flag.holds:
            assert versions.holds(flag.holds, versions.parse(newest[flag.engine])), (
                flag.id,
                flag.holds,
            )


def test_bad_problems_have_a_fix(known: Facts) -> None:
    assert [p.id for p in known.all(ProblemFact) if p.mark in ("bad", "warn") and not p.fix] == []


# ---- error texts


def test_fixes_can_be_read_alone(known: Facts) -> None:
    """`doctor` shows the title and the fix; `says` is shown with --verbose."""
    assert [
        p.id for p in known.all(ProblemFact) if re.search(r"\bthat\b (pull|issue)", p.fix)
    ] == []


def test_enough_error_texts(known: Facts) -> None:
    assert len(known.all(ErrorFact)) >= 40


def test_each_sample_is_recognised_as_itself(known: Facts) -> None:
    for e in known.all(ErrorFact):
        line = f"(EngineCore pid=4711) ERROR 08-10 12:34:56 [core.py:946] {e.sample}"
        hits = [
            x.id
            for x in known.all(ErrorFact)
            if x.key in line.lower() and re.search(x.pattern, line)
        ]
        assert hits == [e.id]
        assert e.key == e.key.lower()


# ---- schema


def row(**more: Any) -> dict[str, Any]:
    return {
        "id": "x",
        "source": ["https://a.example/b"],
        "date": "2026-11",
        "topic": "t",
        "says": "s",
        **more,
    }


def without(key: str) -> dict[str, Any]:
    return {k: v for k, v in row().items() if k != key}


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (row(colour="red"), "unknown keys"),
        (without("source"), "missing keys"),
        (without("date"), "missing keys"),
        (row(source=[]), "needs a source"),
        (row(source="https://a"), "expected a list"),
        (row(date="last week"), "date"),
        (row(date="2026-13"), "date"),
        (row(id="Has Spaces"), "id"),
        (row(versions=">=newest"), "not a range"),
        (row(versions="0.24-0.26"), "not a range"),
        (row(says=3), "expected str"),
    ],
)
def test_a_bad_row_is_refused(raw: dict[str, Any], words: str) -> None:
    with pytest.raises(BadFact, match=words):
        loader.parse({"note": [raw]}, "test.toml")


def test_a_valid_row_is_accepted() -> None:
    (made,) = loader.parse({"note": [row(versions=">=0.24,<0.33")]}, "test.toml")
    assert isinstance(made, rows.NoteFact) and made.source == ("https://a.example/b",)


def test_unknown_table() -> None:
    with pytest.raises(BadFact, match="unknown table"):
        loader.parse({"gpu": [row()]}, "test.toml")


def test_conditions_are_checked() -> None:
    raw = {**row(), "title": "t", "mark": "bad", "when": {"cc": "about 8"}}
    raw.pop("topic")
    with pytest.raises(BadFact, match="not a range"):
        loader.parse({"problem": [raw]}, "test.toml")
    raw["when"] = {"planet": "mars"}
    with pytest.raises(BadFact, match="unknown keys"):
        loader.parse({"problem": [raw]}, "test.toml")
    raw["when"], raw["mark"] = {"cc": "<8.9"}, "terrible"
    with pytest.raises(BadFact, match="expected one of good"):
        loader.parse({"problem": [raw]}, "test.toml")


def test_duplicate_ids_and_unknown_sources(tmp_path: Path) -> None:
    text = '[[note]]\nid = "a"\nsource = ["https://a.example/b"]\ndate = "2026-11"\ntopic = "t"\n'
    (tmp_path / "one.toml").write_text(text)
    loader.load(tmp_path)
    (tmp_path / "two.toml").write_text(text)
    with pytest.raises(BadFact, match=r"used in one\.toml"):
        loader.load(tmp_path)
    other = text.replace('"a"', '"b"').replace("https://a.example/b", "me")
    (tmp_path / "two.toml").write_text(other)
    with pytest.raises(BadFact, match="unknown source"):
        loader.load(tmp_path)


# ---- ranges


@pytest.mark.parametrize(
    ("text", "version", "inside"),
    [
        ("", "0.19.2", True),
        (">=0.24,<0.33", "0.24.0", True),
        (">=0.24,<0.33", "0.33.0", False),
        (">=0.24,<0.33", "0.19.2rc1.dev21+g893611813", False),
        ("==0.25", "0.25.1", True),
        ("==0.25", "0.26", False),
        ("<=0.27.1", "0.27.1", True),
        ("<=0.27.1", "0.27.2", False),
        ("<=0.27", "0.27.2", True),
        ("!=9.0", "9.0", False),
        (">0.27", "0.27.1", False),
        ("<b9549", "b9548", True),
        ("<b9549", "b9549", False),
        ("8.6", "8.6", True),
    ],
)
def test_ranges(text: str, version: str, inside: bool) -> None:
    assert versions.holds(text, versions.parse(version)) is inside


def test_defaults_do_not_restrict() -> None:
    from g4spec.advisor.conditions import Situation, matches

    names = [[field.name for field in fields(kind)] for kind in (Conditions, Situation)]
    assert names[0] == names[1], "each condition has a value to be matched against"
    assert matches(Conditions(), Situation())
    assert not matches(Conditions(cc="<8.9"), Situation()), "what is unknown does not match"
    assert matches(Conditions(cc="<8.9", draft=("mtp",)), Situation(cc=(8, 6), draft="mtp"))


def test_every_kind_of_row_is_used(known: Facts) -> None:
    used = {type(r) for r in known}
    assert [k for k, c in loader.KINDS.items() if c not in used] == []
    assert all(issubclass(c, Fact) for c in loader.KINDS.values())


def test_the_page_of_supported_files_matches_the_code() -> None:
    """The page is generated from the code; types with kernels are those that packing supports."""
    from g4spec.advisor import opens
    from g4spec.runtime.cuda.weights import held_size, packing

    path = Path(__file__).resolve().parents[2] / "docs" / "opens.md"
    assert path.read_text(encoding="utf-8") == opens.document(), "python -m g4spec.advisor.opens"
    assert held_size.with_kernels() == {*packing.PARTS, "f32", "f16", "bf16"}
    assert {row[0].lower() for row in opens.types()} == set(quant.readable())


def test_facts_about_g4spec_match_the_code(known: Facts) -> None:
    from g4spec.advisor import engines, runtime_support

    row, fact = engines.engine_fact(known, "g4spec"), known.get(rows.EngineFact, "engine-g4spec")
    kinds = set(runtime_support.draft_kinds())
    assert set(fact.drafts) == set(row.drafts) == kinds, "`drafts` of engine-g4spec, problems.toml"
    assert set(fact.kv_all) == set(row.kv_all) == set(runtime_support.cache_types())
    for flag in known.all(rows.FlagFact):
        if flag.engine == "g4spec" and flag.when.draft:  # else a recipe leaves out the draft
            assert kinds - {"ngram"} <= set(flag.when.draft), f"`draft` of {flag.id}, recipes.toml"
    assert all("g4spec" in engines._engines_for(known, kind) for kind in kinds)


def test_the_page_is_up_to_date() -> None:
    from g4spec.advisor.document import document

    path = Path(__file__).resolve().parents[2] / "docs" / "hardware.md"
    fix = "run python -m g4spec.advisor.document"
    assert path.read_text(encoding="utf-8") == document(), fix


def test_the_page_names_every_condition_of_a_problem(known: Facts) -> None:
    from g4spec.advisor.document import document

    lines = document().splitlines()
    for p in known.all(ProblemFact):
        (line,) = [x for x in lines if x.startswith(f"| `{p.id}` | {p.mark} |")]
        missing = [name for name, _ in p.when.stated() if name not in line.split(" | ")[3]]
        assert missing == [], p.id


def test_prose_says_gpu_not_card(known: Facts) -> None:
    """Ids and names of fields may have the word, texts that doctor and recipe print may not."""
    prose = re.compile(r"(?<![\w-])cards?(?![\w-])", re.IGNORECASE)
    printed = ("says", "fix", "title", "verdict", "cause", "reason", "topic", "vllm_why")
    found = [
        (row.id, name)
        for row in known
        for name in printed
        if prose.search(str(getattr(row, name, "")).replace("model cards", ""))
    ]
    assert found == []


@pytest.mark.parametrize("id", ["31b", "26b", "12b", "e4b", "e2b"])
def test_sizes_have_the_tensors_of_the_published_models(known: Facts, id: str) -> None:
    from g4spec.advisor import runtime_support
    from g4spec.measure import synthetic
    from g4spec.models import gemma4
    from g4spec.models.spec import Checkpoint

    name = next(name for name in synthetic.TARGETS if name.split("-")[0] == id)
    whole = gemma4.parse_hf(Checkpoint(synthetic.TARGETS[name], {}))
    config = runtime_support.target_config(known.get(SizeFact, id))
    assert config.layers == whole.layers
    assert [(t.name, t.shape) for t in gemma4.tensors(config)] == [
        (t.name, t.shape) for t in gemma4.tensors(whole)
    ]


@pytest.mark.parametrize("id", ["31b", "26b", "12b", "e4b", "e2b"])
def test_quantize_sizes_are_those_of_published_files(known: Facts, id: str) -> None:
    from g4spec.advisor import runtime_support

    published = next(w for w in known.all(rows.WeightsFact) if (w.model, w.format) == (id, "Q8_0"))
    made = runtime_support.file_bytes(known.get(SizeFact, id), "q8_0") / 1e9
    assert made == pytest.approx(published.gb, rel=0.02)
