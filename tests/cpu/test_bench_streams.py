"""`bench --parallel`: timing and counts of several streams, and that their texts do not change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from g4spec import cli
from g4spec.errors import InputError
from g4spec.measure import bench, bench_streams
from g4spec.measure.bench_streams import percentile
from g4spec.measure.prompts import BenchPrompt
from tests.support import bench_engine, tokens
from tests.support.memory_engine import engine


@pytest.fixture(scope="module")
def swept() -> bench_streams.StreamsResult:
    made = bench_engine.engine(parallel=3)
    config = bench.BenchConfig((0, 4, "auto"), n_predict=20, repeats=2, ignore_eos=True)
    return bench_streams.sweep(made, bench_engine.prompts(3), config, 3)


def test_rows_by_length(swept: bench_streams.StreamsResult) -> None:
    assert [(r.length, r.streams, r.requests, r.tokens) for r in swept.rows] == [
        (n, 3, 6, 6 * 20) for n in (0, 4, "auto")
    ]
    assert not swept.differences
    for row in swept.rows:
        assert 0 < row.spread[0] <= row.tokens_per_second <= row.spread[1]
        assert 0 < row.first_token_median <= row.first_token_p95
        assert 0 < row.between_tokens_median <= row.between_tokens_p95
    assert swept.rows[0].ratio == 1 and swept.rows[0].committed == 1
    assert swept.rows[1].committed > 1 and 0 < swept.rows[1].acceptance <= 1


def test_each_stream_has_one_request_under_way() -> None:
    on = bench_engine.engine(parallel=3)
    live: list[int] = []
    step = on.scheduler.step

    def watched() -> bool:
        live.append(len(on.scheduler.running) + len(on.scheduler.waiting))
        return step()

    on.scheduler.step = watched  # type: ignore[method-assign]
    prompts = [(str(i), [2, *range(20 + i, 30)]) for i in range(5)]
    options = bench.BenchConfig((0,), 8, ignore_eos=True).options(0)
    made = bench_streams.answer_prompts(on, prompts, options, 2)
    assert set(live) == {1, 2} and [name for name, _ in made.answers] == list("01234")
    assert len(made.first) == 5 and len(made.between) == 5 * 7 and made.tokens == 40
    spent = sum(made.first) + sum(made.between)
    assert spent <= 2 * made.seconds, "two streams wait at a time"
    assert spent > made.seconds


def test_the_time_of_a_cycle_is_shared_by_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake clock advances by one with every step of the engine."""
    on = bench_engine.engine()
    clock, step = [0.0], on.scheduler.step

    def tick() -> bool:
        clock[0] += 1
        return step()

    on.scheduler.step = tick  # type: ignore[method-assign]
    monkeypatch.setattr(bench_streams.time, "perf_counter", lambda: clock[0])
    options = bench.BenchConfig((0, 4), 12, ignore_eos=True).options(4)
    made = bench_streams.answer_prompts(on, [("a", [2, *[30, 31, 32] * 6])], options, 1)
    stats = made.answers[0][1].stats
    assert stats.accepted and made.seconds == clock[0]
    assert made.first == [1] and len(made.between) == 11
    assert sum(made.between) == pytest.approx(made.seconds - 1)
    assert min(made.between) < 1 == max(made.between)


def test_tokens_of_the_step_after_prefill_arrive_after_the_first() -> None:
    """The engine's step that ends prefill also runs the first cycle."""
    on = bench_engine.engine(parallel=3)
    prompts = [(str(i), [2, *range(20 + i, 30)]) for i in range(3)]
    options = bench.BenchConfig((0, 4), 8, ignore_eos=True).options(4)
    made = bench_streams.answer_prompts(on, prompts, options, 3)
    assert len(made.between) == 3 * 7 and min(made.between) > 0


def test_percentiles() -> None:
    values = [float(i) for i in range(100, 0, -1)]
    assert [percentile(values, p) for p in (1, 50, 95, 100)] == [1, 50, 95, 100]
    assert percentile([3.0], 95) == 3 and percentile([], 50) == 0


def test_a_text_that_changes_is_a_failed_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    bench_engine.let_drafts_change_texts(monkeypatch)
    result = bench_streams.sweep(
        bench_engine.engine(parallel=2),
        bench_engine.prompts(1),
        bench.BenchConfig((0, 3), 12, 1),
        2,
    )
    assert {d.length for d in result.differences} == {3}
    assert result.json({})["identical"] is False


def test_remarks() -> None:
    prompts = [BenchPrompt(f"{i}", "code", "raw", f"{i} " + "abc" * 30) for i in range(4)]
    result = bench_streams.sweep(
        engine(n_ctx=512, parallel=8), prompts, bench.BenchConfig((0,), 45, 1, ignore_eos=True), 4
    )
    output = "\n".join(result.notes)
    assert "preempted" in output and "4 prompts for 4 streams" in output and "one repeat" in output
    assert result.rows[0].preempted
    twice = [BenchPrompt("a", "code", "raw", "x"), BenchPrompt("b", "code", "raw", "x")]
    with pytest.raises(InputError, match="same text"):
        bench_streams.sweep(engine(), twice, bench.BenchConfig((0,), 8, 1), 1)


# ---- the commands


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("models")
    target, draft = tokens.target_file(folder / "t.gguf"), tokens.draft_file(folder / "d.gguf")
    return ["-m", str(target), "-md", str(draft), "-c", "1024"]


def test_bench_parallel(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "streams.json"
    few = ["--categories", "maths", "--prompts", "3", "-n", "6", "--repeats", "1"]
    argv = ["bench", *files, *few, "--draft-max", "2,auto", "-np", "2", "-o", str(kept)]
    assert cli.run([*argv, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data == json.loads(kept.read_text()) and data["identical"]
    assert [(r["length"], r["streams"]) for r in data["rows"]] == [(0, 2), (2, 2), ("auto", 2)]
    assert cli.run(argv) == 0
    output = " ".join(capsys.readouterr().out.split())
    for part in ("2 streams at once", "first token ms", "between tokens ms", "p95", "plain"):
        assert part in output
    explained = output[output.index("drafted: draft length") :]
    assert "first token ms: time from a request" in explained and "p95" in explained
    assert "draft ms" not in explained and "by prompt" not in explained, "no such columns"


def test_own_prompt_is_answered_by_every_stream(
    files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["bench", *files, "-p", "abc", "-n", "6", "--repeats", "1", "--draft-max", "2"]
    assert cli.run([*argv, "-np", "3", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["identical"] and [row["requests"] for row in data["rows"]] == [3, 3]
    assert any("each was answered 3 times" in note for note in data["notes"])


def test_verify_parallel(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["verify", *files, "--cases", "5", "-n", "6", "--long-tokens", "64", "--parallel", "3"]
    assert cli.run([*argv, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["ok"] and data["cases"] == 5 and data["parallel"] == 3
    assert cli.run(argv) == 0
    assert "with and without the draft, 3 at once" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "argv",
    [
        ("verify", "-np", "0"),
        ("bench", "--parallel", "0"),
        ("bench", "-np", "2", "--report", "x.html"),
        ("bench", "--synthetic", "31b", "-np", "2"),
    ],
)
def test_wrong_use(
    files: list[str], argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run([argv[0], *(files if "--synthetic" not in argv else ()), *argv[1:]]) == 2
    error = capsys.readouterr().err
    assert "-np" in error or "--parallel" in error
