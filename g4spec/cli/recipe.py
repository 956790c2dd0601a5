"""`g4spec recipe`: print complete commands for an engine, with a reason for each flag."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from g4spec.cli import _host_options, render

if TYPE_CHECKING:
    from g4spec.advisor.recipe import Recipe


def command(
    engine: Annotated[str, typer.Argument(help="Engine: vllm, sglang, llama.cpp or g4spec.")],
    model: _host_options.Model[str],
    draft: _host_options.Draft = None,
    ctx_size: _host_options.Context = None,
    kv: _host_options.Kv = None,
    gpus: _host_options.Gpus = None,
    n_gpu_layers: _host_options.GpuLayers = None,
    n_cpu_moe: _host_options.CpuMoe = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Number of identical machines (vllm and sglang only).")
    ] = None,
    assume: _host_options.Assume = None,
    versions: _host_options.With = None,
    compose: Annotated[
        bool, typer.Option("--compose", help="Print a Docker Compose file instead.")
    ] = False,
    out_dir: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="Also write the commands as scripts into this folder."),
    ] = None,
    json: render.Json = False,
    quiet: render.Quiet = False,
) -> None:
    """Print complete commands for a pair and explain each flag.

    Exits with 1 if the engine cannot run the pair on this machine, and names one that can.
    """
    from g4spec.advisor import questions, recipe, scripts
    from g4spec.advisor.facts import facts
    from g4spec.advisor.machine import on_nodes
    from g4spec.errors import CheckFailed
    from g4spec.gguf import atomic

    out, all_facts = render.Output(json, quiet), facts()
    name = questions.engine_name(engine) or engine
    machine = on_nodes(questions.build_machine(all_facts, assume, versions or ()), nodes)
    if out_dir is not None:
        atomic.check_folder(out_dir)
    _host_options.check_gpus(gpus, machine)
    question = questions.build_question(
        all_facts, model, draft, ctx_size, kv, None, gpus, n_gpu_layers, n_cpu_moe
    )
    assert question is not None
    _host_options.check_split(question, machine)
    questions.engine_for(question, name)
    result = recipe.make(all_facts, machine, question, name)
    text = scripts.compose(result, machine) if result.works and compose else None
    if result.works and out_dir is not None:
        written, stale = scripts.write(result, machine, out_dir)
        for path in stale:
            out.note(f"removed {path}, of an earlier recipe")
        for path in written:
            out.note(f"wrote {path}")
    if text is not None:
        out.stream(text)
    else:
        _show(out, result)
    out.result(result.json())
    if not result.works:
        what, why, fix = result.blocked[0]
        what = f"no recipe for {result.title} {result.version}: {what}"
        raise CheckFailed(f"{what}. {why.rstrip('.')}" if why else what, fix=f"instead: {fix}")


def _show(out: render.Output, r: Recipe) -> None:
    newest = "" if r.installed else " (newest known, not installed)"
    if not r.works:  # the first reason ends the command (below)
        for what, why, fix in r.blocked[1:]:
            out.line(f"✗ {what}", "bad")
            out.line(f"    {why + ' ' if why else ''}Fix: {fix}")
        if r.instead and r.instead != r.blocked[0][2]:
            out.line(f"What works here: {r.instead}", "good")
        return
    out.line(f"# {r.title} {r.version}{newest}", "bold")
    for title, parts in (("Before", r.prepare), ("Start", r.commands), ("Measure", r.bench)):
        for i, text in enumerate(parts):
            node = f", node {i}" if parts is r.commands and len(parts) > 1 else ""
            if i == 0 or node:
                out.line(f"# {title}{node}", "bold", gap=True)
            out.script(text)
    holds = f"for {r.title} {r.version}; versions in parentheses are those that a flag holds for"
    out.line(f"# Why ({holds})", "bold", gap=True)
    for text in r.reasons():
        out.line(f"#   {text}")
    for text in r.unknown:
        out.line(f"#   unknown: {text}", "warn")
    for what, why, fix in r.conditions:
        out.line(f"#   ! {what}: {why} Fix: {fix}", "warn")
