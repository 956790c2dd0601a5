"""`g4spec doctor`: report what works on this machine, what breaks, and the fix."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from g4spec.cli import _host_options, _option_checks, render
from g4spec.errors import CheckFailed, UsageError

if TYPE_CHECKING:
    from g4spec.advisor.diagnosis import Diagnosis

ALONE = ("why", "log", "cards", "self_test", "network")
"""Parameters that each ask another question than what works with a target."""


def command(
    context: typer.Context,
    model: _host_options.Model[str | None] = None,
    draft: _host_options.Draft = None,
    ctx_size: _host_options.Context = None,
    kv: _host_options.Kv = None,
    engine: Annotated[
        str | None, typer.Option(help="Report only this engine: vllm, sglang, llama.cpp, g4spec.")
    ] = None,
    attention_backend: Annotated[
        str | None, typer.Option(help="Attention backend that you force for vLLM's target.")
    ] = None,
    gpus: _host_options.Gpus = None,
    n_gpu_layers: _host_options.GpuLayers = None,
    n_cpu_moe: _host_options.CpuMoe = None,
    assume: _host_options.Assume = None,
    versions: _host_options.With = None,
    log: Annotated[
        Path | None, typer.Option(help="Explain known errors in a log file; - is stdin.")
    ] = None,
    why: Annotated[
        str | None, typer.Option(metavar="ID", help="Show the fact with this id, and its source.")
    ] = None,
    cards: Annotated[
        bool, typer.Option("--cards", help="List the GPUs that --assume knows.")
    ] = False,
    self_test: Annotated[
        bool,
        typer.Option(
            "--self-test",
            help="Check g4spec's kernels against the reference on this machine, and measure its "
            "bandwidth, which later speeds are computed from.",
        ),
    ] = False,
    network: Annotated[
        bool, typer.Option("--network", help="Watch network link error counters for 15 s.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show everything, with fact ids for --why.")
    ] = False,
    json: render.Json = False,
    quiet: render.Quiet = False,
) -> None:
    """Report what works on this machine, what breaks, and the fix.

    Marks: ✓ works, ! works under a condition, ✗ does not work, · a figure or remark. Without -m,
    every size of Gemma 4 is reported. Exits with 1 if the requested run cannot work.
    """
    from g4spec.advisor import questions
    from g4spec.advisor.doctor import diagnose
    from g4spec.advisor.facts import facts

    _check_alone(_option_checks.given_flags(context))
    out, all_facts = render.Output(json, quiet), facts()
    if why is not None:
        return questions.explain(all_facts, why, out)
    if log is not None:
        return questions.explain_log(all_facts, log, out)
    if cards:
        return questions.list_cards(all_facts, out)
    if self_test:
        return questions.run_self_test(out)
    if network:
        return questions.watch_network(out)
    machine = questions.build_machine(all_facts, assume, versions or ())
    _host_options.check_gpus(gpus, machine)
    question = questions.build_question(
        all_facts, model, draft, ctx_size, kv, attention_backend, gpus, n_gpu_layers, n_cpu_moe
    )
    _host_options.check_split(question, machine)
    name = questions.engine_for(question, questions.engine_name(engine))
    _answer(diagnose(all_facts, machine, question, name), out, verbose)


def _answer(d: Diagnosis, out: render.Output, verbose: bool) -> None:
    """Show a diagnosis; raise CheckFailed if the requested run cannot work."""
    d.show(out, verbose)
    out.result(d.json())
    if not d.works:
        fix = f"try {d.steps[0]}" if d.steps else None
        raise CheckFailed(f"{d.question}: cannot work as requested", fix=fix)


def _check_alone(given_flags: Mapping[str, str]) -> None:
    """Raise UsageError if an option that asks another question is combined with other options."""
    alone = [given_flags[name] for name in ALONE if name in given_flags]
    if alone and len(given_flags.keys() - {"verbose", "json", "quiet"}) > 1:
        raise UsageError(
            f"{' and '.join(alone)}: cannot be combined with other options",
            fix="ask one question at a time",
        )
