"""Sweeps of `bench`: counts, comparisons with plain decoding, refused settings, recommendations."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from g4spec.cli import demo
from g4spec.core import MAX_DRAFT, Batch, Pick
from g4spec.errors import EnvironmentProblem, InputError, UsageError
from g4spec.measure import bench, bench_streams, draft_lengths
from g4spec.measure.bench_summary import Sample, summarize
from g4spec.measure.prompts import (
    CATEGORIES,
    LONG_PROMPTS,
    BenchPrompt,
    long_text,
    mt_bench,
    parse_categories,
    prompts,
)
from g4spec.measure.recommendation import recommend
from tests.support import bench_engine, bench_result, memory_models


@pytest.fixture(scope="module")
def swept() -> bench.SweepResult:
    engine = bench_engine.engine()
    config = bench.BenchConfig((0, 2, 4, "auto"), n_predict=40, repeats=2)
    return bench.sweep(engine, bench_engine.prompts(), config, idle=0)


def test_rows_cover_every_setting(swept: bench.SweepResult) -> None:
    keys = [(r.category, r.length) for r in swept.rows]
    assert keys == [(c, n) for c in ("code", "chat", "all") for n in (0, 2, 4, "auto")]
    assert not swept.differences


def test_counts_add_up(swept: bench.SweepResult) -> None:
    for row in swept.rows:
        cycles = sum(row.accepted_lengths)
        assert row.tokens == row.prompts * 39  # the first token comes from the prompt
        assert cycles + sum(row.accepted_by_position) == row.tokens * 2  # two repeats
        assert row.committed == pytest.approx(row.tokens * 2 / cycles)
        assert sum(n * c for n, c in enumerate(row.accepted_lengths)) == sum(
            row.accepted_by_position
        )
        if row.length != "auto":
            assert sum(row.drafted_by_position[row.length :]) == 0
        assert row.spread[0] <= row.tokens_per_second <= row.spread[1]
    plain = swept.row("all", 0)
    assert plain is not None and plain.committed == 1 and plain.ratio == 1


def test_a_looping_target_is_flagged(swept: bench.SweepResult) -> None:
    # At temperature 0, random weights repeat themselves.
    assert any("outputs loop" in note for note in swept.notes)


def test_memory_is_planned_and_measured(swept: bench.SweepResult) -> None:
    assert swept.memory["total"] == (1 << 20) + (1 << 19) + (1 << 18)
    assert swept.memory["grown"] is None or swept.memory["grown"] > 0


def test_a_changed_text_is_a_failed_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    bench_engine.let_drafts_change_texts(monkeypatch)
    config = bench.BenchConfig((0, 3), n_predict=24, repeats=1)
    result = bench.sweep(
        bench_engine.engine(bench_engine.ConstantDraft()), bench_engine.prompts(1), config
    )
    assert {d.length for d in result.differences} == {3}
    first = result.differences[0]
    assert first.index is not None and first.plain != first.speculative
    assert result.json({}, {})["identical"] is False


@pytest.mark.parametrize("streams", [0, 2])
def test_a_clock_that_stands_still_is_named(streams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths are chosen and texts made without one, but nothing is measured."""
    monkeypatch.setattr(time, "perf_counter", lambda: 7.0)
    made = bench_engine.engine(parallel=max(streams, 1))
    config = bench.BenchConfig((0, "auto"), n_predict=20, repeats=1, ignore_eos=True)
    with pytest.raises(EnvironmentProblem, match="clock of this machine stands still"):
        if streams:
            bench_streams.sweep(made, bench_engine.prompts(1), config, streams)
        else:
            bench.sweep(made, bench_engine.prompts(1), config)


def test_a_useless_draft_is_slower_and_not_recommended() -> None:
    config = bench.BenchConfig((0, 8), n_predict=24, repeats=2)
    result = bench.sweep(
        bench_engine.engine(bench_engine.ConstantDraft()), bench_engine.prompts(1), config
    )
    row = result.row("all", 8)
    assert row is not None and row.acceptance == 0 and row.committed == 1
    assert set(recommend(result.rows).lengths.values()) == {0}


def test_an_unusable_draft_is_recorded() -> None:
    def broken(batch: Batch, count: int, pick: Pick) -> torch.Tensor:
        rows = len(batch.sizes) * count
        return pick(torch.full((rows, memory_models.V), torch.nan), 0).view(-1, count)

    draft = bench_engine.ConstantDraft()
    draft.propose = broken  # type: ignore[method-assign]
    config = bench.BenchConfig((0, 4), n_predict=8, repeats=1)
    result = bench.sweep(bench_engine.engine(draft), bench_engine.prompts(1), config)
    assert any("cannot be used" in note for note in result.notes) and not result.differences
    row = result.row("all", 4)
    assert row is not None and sum(row.drafted_by_position) == 0


def test_the_same_prompt_twice_is_refused() -> None:
    twice = [BenchPrompt("a", "code", "raw", "x"), BenchPrompt("b", "code", "raw", "x")]
    with pytest.raises(InputError, match="same text"):
        bench.sweep(bench_engine.engine(), twice, bench.BenchConfig((0,), 8, 1))


@pytest.mark.parametrize("kw", [{"n_predict": None}, {"repeats": None}])
def test_settings_of_none_are_refused(kw: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"`{next(iter(kw))}`: expected an integer"):
        bench.BenchConfig((0,), **kw)


def test_a_prompt_without_room_is_refused() -> None:
    with pytest.raises(UsageError, match="do not fit"):
        bench.sweep(
            bench_engine.engine(n_ctx=64), bench_engine.prompts(), bench.BenchConfig((0,), 64)
        )


def test_orders_rotate() -> None:
    assert bench.rotate((0, 1, 2), 4) == (1, 2, 0)


@pytest.mark.parametrize(
    "text, most, expected",
    [
        ("sweep", 15, (*draft_lengths.LENGTHS, "auto")),
        ("sweep", 5, (0, 1, 2, 3, 4, 5, "auto")),
        ("auto", 15, (0, "auto")),
        ("0", 15, (0,)),
        ("4", 15, (0, 4)),
        ("8,2, 2,auto", 15, (0, 2, 8, "auto")),
        ("sweep", None, (0,)),
    ],
)
def test_lengths(text: str, most: int | None, expected: tuple[object, ...]) -> None:
    assert draft_lengths.parse_lengths(text, most) == expected


@pytest.mark.parametrize("text", ["", "16", "-1", "two", "1;2"])
def test_wrong_lengths(text: str) -> None:
    with pytest.raises(UsageError, match="`lengths`"):
        draft_lengths.parse_lengths(text, MAX_DRAFT)


def test_repetition_detects_loops() -> None:
    assert bench.repetition(list(range(200))) == 0
    assert bench.repetition([1, 2, 3, 4, 5] * 20) == 1
    assert bench.repetition([*range(100), *([7, 8, 9] * 40)]) > 0.9  # late loops too
    assert bench.repetition([1] * 31) == 0  # too short to judge
    phrase = [5, 6, 7, 8, 9]
    assert bench.repetition([*range(60), *phrase, *range(100, 140), *phrase]) < bench.LOOPING


def sample(length: object, seconds: list[float], name: str = "a") -> Sample:
    made = Sample(
        BenchPrompt(name, "code", "raw", name), length, 10, 30, seconds, [0.5] * len(seconds)
    )  # type: ignore[arg-type]
    made.draft, made.step = [0.0] * len(seconds), seconds
    made.cycles = [10] * len(seconds)
    made.drafted, made.accepted = [10, 10], [8, 4]
    return made


def test_medians_of_repeats_and_paired_ratios() -> None:
    # The machine is three times slower in the second repeat: the speed-up must not change.
    plain, fast = sample(0, [2.0, 6.0, 2.0]), sample(2, [1.0, 3.0, 1.0])
    row = summarize([plain, fast], (0, 2))[1]
    assert row.tokens_per_second == 30 and row.spread == (10, 30)
    assert row.ratio == 2 and row.ratio_spread == (2, 2)
    assert row.acceptance == 0.6 and row.step_ms == 100 and row.prefill_tokens_per_second == 20


def test_an_answer_of_one_token_does_not_count() -> None:
    empty = sample(0, [0.0], "b")
    empty.tokens, empty.cycles = 0, [0]
    row = summarize([sample(0, [1.0]), empty], (0,))[0]
    assert row.prompts == 2 and row.tokens_per_second == 30
    alone = summarize([empty], (0,))[0]
    assert alone.tokens_per_second == 0 and alone.ratio == 0


def make_row(
    length: object, ratio: float, scatter: float = 0.0, category: str = "code"
) -> bench.SweepRow:
    row = bench_result.row(category, 4 if length == "auto" else length, 0.5)
    spread = (ratio * (1 - scatter), ratio * (1 + scatter))
    return replace(
        row,
        length=length,  # type: ignore[arg-type]
        tokens_per_second=ratio,
        spread=spread,
        ratio=ratio,
        ratio_spread=spread,
    )


def test_recommends_the_fastest_length() -> None:
    advice = recommend(
        [make_row(0, 1.0), make_row(2, 1.5), make_row(4, 2.0), make_row("auto", 1.9)]
    )
    assert advice.lengths == {"code": 4} and advice.auto["code"] == pytest.approx(0.95)
    assert advice.words == "Draft 4 for code." and "reaches 95% of the best" in advice.auto_words


def test_auto_is_recommended_where_it_was_fastest() -> None:
    """A headline once named length 7 at 4.2 times plain while auto reached 5.4."""
    maths = [
        make_row(0, 1.0, category="maths"),
        make_row(7, 4.2, category="maths"),
        make_row("auto", 5.4, category="maths"),
    ]
    advice = recommend([make_row(0, 1.0), make_row(4, 2.0), make_row("auto", 1.9), *maths], 7)
    assert advice.lengths == {"code": 4, "maths": "auto"}
    assert "4 for code" in advice.words and "auto for maths" in advice.words
    noisy = recommend([make_row(0, 1.0), make_row(4, 2.0), make_row("auto", 2.2, scatter=0.2)])
    assert noisy.lengths == {"code": "auto"} and noisy.ties == {"code": [4]}
    assert "faster" not in noisy.words, "equal within the scatter"
    assert noisy.tie_words == (
        "Equal within the scatter: 4 and auto for code (auto has the highest median)."
    )


def test_recommendation_says_if_the_longest_draft_was_best() -> None:
    rows = [make_row(0, 1.0), make_row(4, 2.0), make_row(7, 2.5), make_row("auto", 2.7)]
    assert recommend(rows, 15).unmeasured == {"code": 7}
    assert "--draft-max sweep" in recommend(rows, 15).words
    assert recommend(rows, 7).unmeasured == {}, "the draft ends there"
    assert recommend([*rows, make_row(12, 2.1)], 15).unmeasured == {}, "past its maximum"


def test_the_demo_sweeps_to_the_block_of_its_draft() -> None:
    for most in (4, 7, MAX_DRAFT):
        assert (
            max(n for n in draft_lengths.parse_lengths(demo.LENGTHS, most) if n != "auto") == most
        )


def test_the_fastest_median_is_recommended_and_ties_are_named() -> None:
    near = recommend([make_row(0, 1.0), make_row(2, 1.97), make_row(4, 2.0)])
    assert near.lengths == {"code": 4} and near.ties == {"code": [2]}
    scattered = [
        make_row(0, 1.0),
        make_row(2, 1.7),
        make_row(4, 2.0, scatter=0.2),
        make_row(5, 1.5, scatter=0.4),
    ]
    advice = recommend(scattered)
    assert advice.lengths == {"code": 4} and advice.ties == {"code": [2, 5]}
    assert advice.tie_words == (
        "Equal within the scatter: 2, 4 and 5 for code (4 has the highest median)."
    )
    same = recommend([make_row(0, 1.0), make_row(2, 2.0), make_row(4, 2.0), make_row("auto", 2.0)])
    assert same.lengths == {"code": 2}
    assert same.tie_words.endswith("(2 drafts the fewest tokens).")
    little = recommend([make_row(0, 1.0), make_row(2, 1.015)])
    assert little.lengths == {"code": 2}
    assert little.tie_words.startswith("Equal within the scatter: no draft and 2 for code (2 ")
    assert recommend([make_row(0, 1.0), make_row(2, 1.5), make_row(4, 2.0)]).tie_words == ""


def test_without_a_fixed_length_none_is_recommended() -> None:
    advice = recommend([make_row(0, 1.0), make_row("auto", 1.9)])
    assert advice.lengths == advice.auto == {} and not advice.auto_words
    assert advice.words == "Only auto was measured: 1.90 x plain."
    chat = [make_row(0, 1.0, category="chat"), make_row("auto", 1.1, category="chat")]
    words = recommend([make_row(0, 1.0), make_row("auto", 1.9), *chat]).words
    assert words == "Only auto was measured: 1.50 x plain on average, at least 1.10 (chat)."


def test_recommendation_names_categories_without_gain() -> None:
    chat = [make_row(0, 1.0, category="chat"), make_row(4, 0.7, category="chat")]
    rows = [make_row(0, 1.0), make_row(4, 2.0), *chat]
    assert recommend(rows).words == "Draft 4 for code. No draft for chat: it gains nothing there."
    assert recommend(rows[:1]).words == "Only plain decoding was measured."
    plain = [make_row(0, 1.0), make_row(0, 1.0, category="chat"), make_row(0, 1.0, category="all")]
    assert recommend(plain).words == "Only plain decoding was measured."
    assert "gains nothing on any" in recommend(chat).words
    everywhere = recommend([*rows[:2], *(replace(r, category="chat") for r in rows[:2])])
    assert everywhere.words == "Draft 4 for all prompts."


def test_shipped_prompts_are_different_and_short() -> None:
    tokenizer = bench_engine.Characters()
    found = prompts(tokenizer, long_tokens=1500)  # type: ignore[arg-type]
    assert {p.category for p in found} == set(CATEGORIES)
    assert all(sum(p.category == c for p in found) >= 6 for c in CATEGORIES)
    assert len({p.text for p in found}) == len(found) == len({p.name for p in found})
    assert all(len(p.text) < 800 for p in found if p.category != "long")


@pytest.mark.parametrize("tokens", [300, 2000, 20000])
def test_long_prompts_have_the_length_and_end_inside_a_new_function(tokens: int) -> None:
    tokenizer = bench_engine.Characters()
    for i in range(LONG_PROMPTS):
        text = long_text(tokenizer, tokens, i)  # type: ignore[arg-type]
        assert tokens - 100 <= len(tokenizer.encode(text)) <= tokens
        *_, signature, docstring, end = text.split("\n")
        assert signature.startswith("def ") and docstring.strip().startswith('"""') and not end
        assert text.count(signature.partition("(")[0] + "(") == 1


def test_categories_may_have_spaces_around_commas() -> None:
    assert parse_categories("code, chat") == ["code", "chat"]
    assert parse_categories(None) == CATEGORIES


def test_unknown_category_and_too_many_prompts() -> None:
    tokenizer = bench_engine.Characters()
    with pytest.raises(UsageError, match="`categories`"):
        prompts(tokenizer, ["poems"])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="`count`"):
        prompts(tokenizer, ["code"], 99)  # type: ignore[arg-type]


def test_mt_bench_takes_first_turns(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "question.jsonl"
    path.write_text(
        '{"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]}\n\n'
        '{"question_id": 82, "category": "math", "turns": ["Add."]}\n'
    )
    found = mt_bench(path)
    assert [(p.name, p.category, p.form, p.text) for p in found] == [
        ("mt-bench-81", "writing", "chat", "Write."),
        ("mt-bench-82", "math", "chat", "Add."),
    ]
    assert len(mt_bench(path, 1)) == 1


@pytest.mark.parametrize(
    "text", ["", "nonsense", '{"turns": []}', '{"turns": [""]}', '{"prompt": "x"}', "[]"]
)
def test_mt_bench_refuses_other_files(tmp_path, text: str) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "question.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match="turns"):
        mt_bench(path)


def test_a_missing_mt_bench_file_names_its_source(tmp_path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InputError, match=r"question\.jsonl.*FastChat.*`dataset`"):
        mt_bench(tmp_path / "question.jsonl")
