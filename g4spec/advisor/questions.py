"""Builds questions from command-line options, and runs the options of `doctor` that need no
question."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, Protocol

from g4spec.advisor import backends, cards, engines, lookup, measured, versions
from g4spec.advisor.cache_sizes import BITS
from g4spec.advisor.facts import Facts
from g4spec.advisor.format_choice import Question
from g4spec.advisor.layer_split import split_of
from g4spec.advisor.machine import Machine
from g4spec.advisor.schema import CardFact, Conditions, Fact, NoteFact
from g4spec.errors import CheckFailed, InputError, UsageError

ALIASES = {"llamacpp": "llama.cpp", "llama-cpp": "llama.cpp", "llama_cpp": "llama.cpp"}


class TableOutput(Protocol):
    """The methods of `cli.render.Output` used here."""

    def line(self, text: str = "", style: str | None = None) -> None: ...
    def note(self, text: str) -> None: ...
    def table(
        self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]
    ) -> None: ...
    def result(self, value: dict[str, Any]) -> None: ...


def engine_name(name: str | None) -> str | None:
    """Return the canonical name of an engine; raise UsageError for an unknown one."""
    if name is None:
        return None
    known = ALIASES.get(name.lower(), name.lower())
    if known not in engines.NAMES:
        raise UsageError(f"unknown engine {name!r}", expected=" or ".join(engines.NAMES))
    return known


def build_question(
    facts: Facts,
    model: str | None,
    draft: str | None,
    context: int | None,
    kv: str | None,
    backend: str | None,
    gpus: int | None,
    n_gpu_layers: int | None = None,
    n_cpu_moe: int | None = None,
) -> Question | None:
    """Build the question from the options; None without a model. Raises UsageError or InputError
    for an invalid option, or for options that need a model if there is none."""
    if model is None:
        options = {
            "-md": draft,
            "-c": context,
            "--kv": kv,
            "--attention-backend": backend,
            "--gpus": gpus,
            "-ngl": n_gpu_layers,
            "-ncmoe": n_cpu_moe,
        }
        named = [name for name, value in options.items() if value is not None]
        if named:
            raise UsageError(f"{' and '.join(named)} without a target", expected="-m as well")
        return None
    if kv is not None and kv not in BITS:
        alias = {
            "bfloat16": "bf16",
            "float16": "f16",
            "fp8_e4m3": "fp8",
            "fp8_e5m2": "fp8",
            "int8_per_token_head": "int8",
        }
        if kv not in alias:
            raise UsageError(f"--kv {kv!r}", expected=f"one of {', '.join(BITS)}")
        kv = alias[kv]
    target = lookup.find_target(facts, model)
    pair = lookup.find_draft(facts, draft, target) if draft is not None else None
    if context is not None and context > target.context:
        raise UsageError(
            f"-c {context}: {target.title} has a smaller training context",
            expected=f"at most {target.context}",
        )
    if backend is not None:
        backend, known = backend.upper(), backends.backend_names(facts)
        if backend not in known:
            raise UsageError(
                "--attention-backend", expected=f"one of {', '.join(known)}", found=backend
            )
    if n_cpu_moe is not None and not target.moe:
        raise UsageError(f"-ncmoe: {target.title} has no experts", fix="use -ngl")
    split = split_of(facts, target, n_gpu_layers, n_cpu_moe)
    return Question(target, pair, context, kv, backend, gpus, split=split)


def engine_for(q: Question | None, engine: str | None) -> str | None:
    """Return the engine to ask about, None for all. Only llama.cpp keeps layers in RAM: for a
    question with such layers, return it, and raise UsageError if another engine was named."""
    if q is None or not q.split:
        return engine
    if engine not in (None, "llama.cpp"):
        raise UsageError(
            f"{q.split.flags.strip()}: only llama.cpp keeps layers in RAM",
            expected="engine llama.cpp",
            found=engine,
            fix="leave the option out, or ask for llama.cpp",
        )
    return "llama.cpp"


def build_machine(facts: Facts, assume: str | None, given: Iterable[str]) -> Machine:
    """Return this machine or the assumed one. `given`: NAME=VERSION pairs of --with, which replace
    the versions found."""
    from g4spec.advisor.machine_probe import PACKAGES, probe

    known = sorted({*engines.NAMES, *PACKAGES, "nvcc", "driver"} - {"g4spec"})
    tools, driver, supposed = {}, None, tuple[str, ...]()
    for pair in given:
        name, sign, version = pair.partition("=")
        name = ALIASES.get(name.lower(), name.lower())
        if not sign or not any(c.isdigit() for c in version):
            raise UsageError(f"--with {pair!r}", expected="NAME=VERSION, for instance vllm=0.19.2")
        if name not in known:
            raise UsageError(f"--with {pair!r}", expected=f"one of {', '.join(known)}")
        supposed += (f"{name}={version}",)
        if name == "driver":
            driver = version
        else:
            tools[name] = version
    found = cards.assume(facts, assume) if assume is not None else probe(facts)
    return replace(
        found, tools={**found.tools, **tools}, driver=driver or found.driver, supposed=supposed
    )


def explain(facts: Facts, id: str, out: TableOutput) -> None:
    """Print the fact with this id, its source and date; raise UsageError for an unknown id."""
    row = _measured(facts) if id == measured.ID else facts.by_id.get(id)
    if row is None:
        near = [k for k in facts.by_id if id.lower() in k][:8]
        raise UsageError(
            f"no fact has the id {id!r}",
            fix="run `g4spec doctor --verbose`, which shows ids",
            expected=f"perhaps one of {', '.join(near)}" if near else None,
        )
    out.line(id, "bold")
    for name, value in _fields(row):
        out.line(f"  {name}: {value}")
    for link in facts.cite(row):
        out.line(f"  source: {link}")
    out.line(f"  date: {row.date}")
    out.result({**asdict(row), "links": facts.cite(row)})


def _measured(facts: Facts) -> Fact:
    """Return what the self-test measured on this machine; raise UsageError without it."""
    from g4spec.advisor.machine_probe import probe

    machine = probe(facts)
    here = machine.measured
    if here is None:
        raise UsageError(
            "no bandwidth was measured on this machine",
            fix="run `g4spec doctor --self-test` on a GPU; `g4spec doctor --verbose` says why a "
            "measurement is not used",
        )
    says = "; ".join(f"{g.name}: {g.measured.read:.0f} GB/s" for g in machine.gpus if g.measured)
    return NoteFact(
        id=measured.ID,
        source=(str(measured.folder()),),
        date=here.date,
        topic="read bandwidth measured here by the self-test",
        says=says,
    )


def _fields(row: Fact) -> list[tuple[str, str]]:
    """Return the names of a row's non-empty fields and their values as text."""
    out = []
    for field in fields(row):
        name, value = field.name, getattr(row, field.name)
        if name in ("id", "source", "date") or value in ("", (), 0, None):
            continue
        if isinstance(value, Conditions):
            text = ", ".join(value.texts())
        elif isinstance(value, tuple):
            text = ", ".join(str(v) for v in value)
        else:
            text = str(value)
        if text:
            out.append((name.replace("_", " "), text))
    return out


def explain_log(facts: Facts, path: Path, out: TableOutput) -> None:
    """Print the known error messages in a log, each with cause and fix.

    Raises InputError for a binary file without any.
    """
    from g4spec.advisor import logs

    found = logs.scan(facts, path)
    if not found and logs.is_binary(path):
        raise InputError(
            f"{path}: not a log",
            expected="text in UTF-8",
            found="a binary file without errors",
        )
    for hit in found:
        mark = "·" if hit.error.harmless else "✗"
        out.line(f"{mark} line {hit.line}: {hit.text}", None if hit.error.harmless else "bad")
        out.line(f"    cause: {hit.error.cause}")
        out.line(f"    fix: {hit.error.fix}")
        out.line(
            f"    seen in: {hit.error.versions}; {hit.count} time{'s' * (hit.count != 1)}"
            f"  [{hit.error.id}]",
            "dim",
        )
    if not found:
        out.line(
            "The log contains no error message that g4spec knows. The first error in a log is "
            "usually the cause; later ones follow from it."
        )
    out.result({"errors": [hit.json() for hit in found]})


def list_cards(facts: Facts, out: TableOutput) -> None:
    """Print the known cards, sorted by compute capability."""
    rows = sorted(facts.all(CardFact), key=lambda c: versions.parse(c.cc))
    table = [
        (c.name, c.cc, "/".join(f"{m}" for m in c.memory), "/".join(f"{b:g}" for b in c.bandwidth))
        for c in rows
    ]
    out.table("GPUs", ("GPU", "capability", "GB", "GB/s"), table)
    out.line(
        'Describe any other NVIDIA GPU by capability and memory: --assume "sm_86 24GB"; a '
        'machine without a GPU by its memory: --assume "CPU 64GB".'
    )
    out.result({"cards": [asdict(c) for c in rows]})


def run_self_test(out: TableOutput) -> None:
    """Run the self-test and print its results; raise CheckFailed if a check fails."""
    from g4spec.advisor import selftest

    results = selftest.run()
    for r in results:
        out.line(
            f"{'✓' if r.ok else '·' if r.ok is None else '✗'} {r.text}",
            {True: "good", False: "bad", None: "dim"}[r.ok],
        )
    out.result({"checks": [asdict(r) for r in results]})
    if bad := [r.text for r in results if r.ok is False]:
        raise CheckFailed(f"the self-test found a problem: {'; '.join(bad)}")


def watch_network(out: TableOutput) -> None:
    """Watch the error counters of network links for `network.SECONDS`; raise CheckFailed if one
    rises."""
    from g4spec.advisor import network

    out.note(f"watching link error counters for {network.SECONDS} s")
    found = network.watch()
    for line in found.lines:
        out.line(f"{'✗' if line.rising else '·'} {line.text}", "bad" if line.rising else None)
    out.line(found.summary, "good" if found.ok else "bad")
    out.result(found.json())
    if not found.ok:
        raise CheckFailed("the error counters of a network link are rising", fix=network.FIX)
