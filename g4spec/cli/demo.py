"""The whole job on the bundled model family, explained step by step."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from g4spec.cli import _bench_results, _demo_family, _demo_serve, _demo_text
from g4spec.cli._demo_family import DRAFTS
from g4spec.cli.render import Json, Output, Quiet
from g4spec.errors import CheckFailed

if TYPE_CHECKING:
    from g4spec.measure.verify import Verdict

LENGTHS = "2,5,10,15,auto"
"""Draft lengths of the sweep, up to the longest block."""
LONG, CASES, PROMPTS = 1024, 12, 2


def command(
    family: Annotated[Path | None, typer.Option(help="Folder of the model family.")] = None,
    folder: Annotated[Path, typer.Option("-o", "--out", help="Where files go.")] = Path("demo"),
    n_predict: Annotated[int, typer.Option("-n", "--n-predict", help="Tokens of a text.")] = 48,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show everything on a small trained family: convert, validate, verify, measure, serve."""
    began = time.perf_counter()
    out = Output(json, quiet)
    from g4spec.runtime.request import Options

    Options(n_predict)  # refuses what no text can have, before anything is converted
    source = _demo_family.find(family)
    folder.mkdir(parents=True, exist_ok=True)
    from g4spec.measure import bench

    idle = bench.memory_in_use()
    made = _demo_family.convert_all(source, folder)
    files = made.files
    _demo_text.write(files, out)
    made.show(out)
    _demo_family.validate_all(source, files, out)
    verdicts = {name: _verify(name, files, out) for name in DRAFTS}
    data = _sweep(files, folder, n_predict, idle, out)
    answer = _demo_serve.serve_and_ask(
        files["target"], files["dflash"], _demo_text.N_CTX, n_predict, out
    )
    out.line(
        f"Open {folder / 'report.html'} in a browser. That was the whole job, in "
        f"{time.perf_counter() - began:.0f} s.",
        style="good",
        gap=True,
    )
    out.result(
        {
            "files": {name: str(path) for name, path in files.items()},
            "verified": {name: verdict.json() for name, verdict in verdicts.items()},
            "bench": data,
            "served": answer,
            "seconds": time.perf_counter() - began,
        }
    )
    _bench_results.require_identical(data)


def _verify(name: str, files: dict[str, Path], out: Output) -> Verdict:
    from g4spec.measure import prompts, verify

    if name == DRAFTS[0]:
        out.line(
            "4  Verify: with any draft the text is exactly what it is without.", "bold", gap=True
        )
    engine = _demo_text.load(files, name)
    assert engine.draft is not None
    texts = prompts.prompts(engine.tokenizer, count=PROMPTS, long_tokens=LONG)
    with out.progress(f"verifying {name}") as progress:
        verdict = verify.verify(
            engine, verify.cases(texts, CASES, engine.draft.max_tokens), 32, progress=progress
        )
    if not verdict.ok:
        raise CheckFailed(f"{name} changed the text: {verdict.mismatch}")
    share = verdict.accepted / verdict.drafted
    each = 1 + verdict.accepted / verdict.cycles
    out.line(
        f"{name}: {verdict.cases} of {verdict.cases} texts identical, {share:.0%} of the "
        f"drafted tokens accepted, {each:.2f} tokens a cycle"
    )
    if name == DRAFTS[-1]:
        out.line(
            "The last draft was trained for another target: it changes no text either, it "
            "only gains nothing. So identical text alone proves no draft good."
        )
    return verdict


def _sweep(
    files: dict[str, Path], folder: Path, n_predict: int, idle: int | None, out: Output
) -> dict[str, Any]:
    from g4spec.measure import bench, prompts, recommendation
    from g4spec.measure import run_record as provenance

    out.line("5  Measure: how many tokens to draft depends on what is written.", "bold", gap=True)
    engine = _demo_text.load(files, DRAFTS[0])
    assert engine.draft is not None
    lengths = bench.lengths_of(LENGTHS, engine.draft.max_tokens)
    texts = prompts.prompts(engine.tokenizer, count=PROMPTS, long_tokens=LONG)
    with out.progress("measuring") as progress:
        result = bench.sweep(
            engine,
            texts,
            bench.Protocol(lengths, n_predict, repeats=2),
            idle=idle,
            progress=progress,
        )
    advice = recommendation.recommend(result.rows, bench.longest(engine))
    origin = provenance.describe(
        files["target"], files["dflash"], engine.backend, ["g4spec", *sys.argv[1:]]
    )
    data = result.json(origin, advice.json())
    _bench_results.write_files(data, out, folder / "bench.json", folder / "report.html")
    _bench_results.show(data, out)
    out.line(
        "A token is accepted when the target would have written it too; the best length "
        "balances that against the time of drafting."
    )
    return data
