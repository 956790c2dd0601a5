"""`g4spec demo`: run every step on the bundled model family, with explanations."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from g4spec.cli import _bench_results, _demo_family, _demo_serve, _demo_text
from g4spec.cli._demo_family import DRAFTS
from g4spec.cli._os_errors import check_working_folder
from g4spec.cli.render import Json, Output, Quiet
from g4spec.errors import CheckFailed

if TYPE_CHECKING:
    from g4spec.measure.verify import VerifyResult

LENGTHS = "2,5,10,15,auto"
"""Draft lengths that are measured, up to the longest block."""
LONG, CASES, PROMPTS = 1024, 12, 2


def command(
    family: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the model family. Default: examples/tiny of the clone, or the "
            "package g4spec_family if it is installed.",
        ),
    ] = None,
    folder: Annotated[
        Path, typer.Option("-o", "--out", help="Folder for the files that are written.")
    ] = Path("demo"),
    n_predict: Annotated[
        int, typer.Option("-n", "--n-predict", min=1, max=1920, help="Tokens per text.")
    ] = 48,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run every step, convert to serve, on a small bundled model."""
    began = time.perf_counter()
    out = Output(json, quiet)
    source = _demo_family.find(family)
    check_working_folder()
    from g4spec.gguf import atomic
    from g4spec.measure import bench

    atomic.check_folder(folder)
    idle = bench.memory_in_use()
    converted = _demo_family.convert_all(source, folder)
    files = converted.files
    _demo_text.write(files, out)
    converted.show(out)
    _demo_family.validate_all(source, files, out)
    verdicts = {name: _verify(name, files, out) for name in DRAFTS}
    data = _sweep(files, folder, n_predict, idle, out)
    answer = _demo_serve.serve_and_ask(
        files["target"], files["dflash"], _demo_text.N_CTX, n_predict, out
    )
    out.line(
        f"Done in {time.perf_counter() - began:.0f} s. Open {folder / 'report.html'} in a browser.",
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


def _verify(name: str, files: dict[str, Path], out: Output) -> VerifyResult:
    from g4spec.measure import prompts, verify

    if name == DRAFTS[0]:
        out.line(
            "4  Verify: with any draft, the text is the same as without one.", "bold", gap=True
        )
    engine = _demo_text.load(files, name)
    assert engine.draft is not None
    texts = prompts.prompts(engine.tokenizer, count=PROMPTS, long_tokens=LONG)
    with out.progress(f"verifying {name}") as progress:
        verdict = verify.verify(
            engine, verify.cases(texts, CASES, engine.draft.max_tokens), 32, progress=progress
        )
    if verdict.interrupted:
        raise KeyboardInterrupt
    if not verdict.ok:
        raise CheckFailed(f"{name} changed the text: {verdict.mismatch}")
    share = verdict.accepted / verdict.drafted
    each = 1 + verdict.accepted / verdict.cycles
    out.line(
        f"{name}: {verdict.cases} of {verdict.cases} texts identical, {share:.0%} of the "
        f"drafted tokens accepted, {each:.2f} tokens per step"
    )
    if name == DRAFTS[-1]:
        out.line(
            "The last draft was trained for another target. It does not change the text either, "
            "but it gains no speed: identical text alone does not prove that a draft is good."
        )
    return verdict


def _sweep(
    files: dict[str, Path], folder: Path, n_predict: int, idle: int | None, out: Output
) -> dict[str, Any]:
    from g4spec.measure import bench, draft_lengths, prompts, recommendation, run_record

    out.line("5  Measure: the best draft length depends on the kind of text.", "bold", gap=True)
    engine = _demo_text.load(files, DRAFTS[0])
    assert engine.draft is not None
    lengths = draft_lengths.parse_lengths(LENGTHS, engine.draft.max_tokens)
    texts = prompts.prompts(engine.tokenizer, count=PROMPTS, long_tokens=LONG)
    with out.progress("measuring") as progress:
        result = bench.sweep(
            engine,
            texts,
            bench.BenchConfig(lengths, n_predict, repeats=2),
            idle=idle,
            progress=progress,
        )
    if result.interrupted:
        raise KeyboardInterrupt
    advice = recommendation.recommend(result.rows, bench.longest_proposal(engine))
    origin = run_record.describe(
        files["target"], files["dflash"], engine.backend, ["g4spec", *sys.argv[1:]]
    )
    data = result.json(origin, advice.json())
    _bench_results.write_files(data, out, folder / "bench.json", folder / "report.html")
    _bench_results.show(data, out)
    out.line(
        "A token is accepted if the target would have chosen it, too. The best length balances "
        "accepted tokens against drafting time."
    )
    return data
