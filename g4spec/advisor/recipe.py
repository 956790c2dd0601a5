"""Builds the complete commands for one pair on one machine, with the reason for every flag.

Every part is a row of `data/recipes.toml` whose condition holds.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from g4spec.advisor import alternatives, engines, format_choice
from g4spec.advisor.conditions import Situation, matches
from g4spec.advisor.engine_verdict import EngineVerdict
from g4spec.advisor.facts import Facts
from g4spec.advisor.format_choice import Question
from g4spec.advisor.machine import Machine, upgraded
from g4spec.advisor.memory_needs import GGUF
from g4spec.advisor.recipe_values import HEAD, recipe_values, weight_format
from g4spec.advisor.schema import FlagFact

SERVER = {
    "vllm": "vllm serve {model}",
    "sglang": "python -m sglang.launch_server --model-path {model}",
    "llama.cpp": "llama-server {named}",
    "g4spec": "g4spec serve -m {model}",
}


@dataclass(frozen=True, slots=True)
class RecipePart:
    """One flag, environment variable or command, with its reason and the id of its row.

    Attributes:
        part: as `FlagFact.part`. `versions`: as `FlagFact.versions`.
    """

    part: str
    text: str
    reason: str
    versions: str
    fact: str


@dataclass(slots=True)
class Recipe:
    """The commands to run a pair with one engine.

    Attributes:
        commands: complete start commands with environment variables, one per node.
        prepare, bench: commands to run before and after. `parts`: every flag with its reason.
        blocked: (what, why, fix) of every reason why it cannot work; then `commands` is empty.
        conditions: (what, why, fix) that the commands do not meet by themselves.
        instead: a g4spec command for an alternative that works, or "".
        unknown: what the facts do not cover. `image`: container image, or "".
        model: the target as passed to the engine.
    """

    engine: str
    title: str
    version: str
    installed: bool
    parts: list[RecipePart] = field(default_factory=list)
    prepare: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    bench: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    arguments: list[list[str]] = field(default_factory=list)
    blocked: list[tuple[str, str, str]] = field(default_factory=list)
    conditions: list[tuple[str, str, str]] = field(default_factory=list)
    instead: str = ""
    unknown: list[str] = field(default_factory=list)
    image: str = ""
    model: str = ""

    @property
    def works(self) -> bool:
        return bool(self.commands)

    def reasons(self) -> list[str]:
        """Return one line per part: text, reason, versions and id."""
        out = []
        for p in self.parts:
            limit = f" ({self._versions(p)})"
            if p.part in ("prepare", "bench"):
                # "# when and where: command" is for the reader to run
                text = p.text.partition(": ")[2] if p.text.startswith("#") else p.text
                out.append(f"{text.split(' -')[0]}: {p.reason}{limit}  [{p.fact}]")
            elif p.part != "image":
                text = p.text.replace("{rank}", "RANK")
                out.append(f"{text}: {p.reason}{limit}  [{p.fact}]")
        return out

    def _versions(self, p: RecipePart) -> str:
        """Return the versions that a part holds for, as text."""
        if p.versions in ("any", "unknown"):
            return "any version" if p.versions == "any" else "versions unknown"
        return f"{self.title} {p.versions}"

    def json(self) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "version": self.version,
            "installed": self.installed,
            "works": self.works,
            "prepare": self.prepare,
            "environment": self.env,
            "commands": self.commands,
            "bench": self.bench,
            "unknown": self.unknown,
            "flags": [asdict(p) for p in self.parts],
            "blocked": [{"what": a, "why": b, "fix": c} for a, b, c in self.blocked],
            "conditions": [{"what": a, "why": b, "fix": c} for a, b, c in self.conditions],
            "instead": self.instead,
            "image": self.image,
        }


def make(facts: Facts, machine: Machine, q: Question, engine: str) -> Recipe:
    """Return the recipe of one engine, or one with the reasons why there is none."""
    v = engines.judge(facts, machine, q, engine)
    r = Recipe(engine, v.engine.title, v.version, v.installed)
    r.blocked = [(p.title, p.says, p.fix) for p in v.blockers]
    if v.refusal:
        fix = alternatives.fix(facts, machine, q, v, f"g4spec recipe {engine}")
        r.blocked.append((v.refusal, "", fix))
    _nodes(r, machine, engine)
    _lacks(r, v)
    if r.blocked:
        r.instead = _instead(facts, machine, q, engine)
        return r
    values = recipe_values(facts, machine, q, v)
    r.model = shlex.split(values["model"])[0]
    if r.model.startswith("YOUR_"):
        r.unknown.append(
            f"the hub id of a checkpoint in {v.option.format if v.option else ''}: "
            f"put yours in place of {r.model}"
        )
    if v.option is not None and v.option.gguf == r.model and not v.option.fact:
        r.unknown.append(f"whether the hub has {r.model}: its type is not in the data")
    if v.uncounted:
        r.unknown.append("the memory of the draft, which is not counted: its size is not known")
    for flag in sorted(facts.all(FlagFact), key=lambda f: f.order):
        if flag.engine == engine and matches(flag.when, _situation(v, q, values)):
            _take(r, flag, values, q, v)
    _assemble(r, machine, values, engine)
    taken = {p.fact for p in r.parts}
    r.conditions = [(p.title, p.says, p.fix) for p in v.conditions if not taken & set(p.cured)]
    return r


def _nodes(r: Recipe, machine: Machine, engine: str) -> None:
    """Block several nodes for every engine except vLLM and SGLang."""
    if machine.nodes > 1 and engine in GGUF:
        why = {
            "llama.cpp": "Its own project calls its RPC between hosts fragile and insecure",
            "g4spec": "It runs on one machine",
        }[engine]
        r.blocked.append(
            (
                f"{r.title} is not for several nodes",
                why,
                f"g4spec recipe vllm --nodes {machine.nodes}, or sglang",
            )
        )


def _lacks(r: Recipe, v: EngineVerdict) -> None:
    """Block the recipe if it is unknown whether it works, and not known that it does not."""
    for p in v.conditions:
        if p.unknown and not v.blockers:
            r.unknown.append(f"{p.title}. {p.says}")
            r.blocked.append((p.title, p.says, p.fix))


def _instead(facts: Facts, machine: Machine, q: Question, engine: str) -> str:
    """Return the command for a working alternative: a newer version, or another engine; or ""."""
    if engine in machine.tools:
        newest, then = engines.engine_fact(facts, engine).newest, upgraded(machine, engine)
        if engines.judge(facts, then, q, engine).works:
            pair = format_choice.command_options(q, then, engine)
            return f"g4spec recipe {engine} {pair} --with {engine}={newest}"
    for name in ("vllm", "llama.cpp", "sglang", "g4spec"):
        if name == engine or (machine.nodes > 1 and name in GGUF):
            continue
        if engines.judge(facts, machine, q, name).works:
            return f"g4spec recipe {name} {format_choice.command_options(q, machine, name)}"
    return ""


def _situation(v: EngineVerdict, q: Question, values: dict[str, str]) -> Situation:
    return replace(
        v.situation, context=int(values["ctx"]), kv=values["kv"] if q.kv is None else q.kv
    )


def _skip(flag: FlagFact, q: Question, v: EngineVerdict) -> bool:
    """Return True for rows to leave out for reasons that their conditions cannot express."""
    local = q.draft is None or q.draft.is_local
    published = bool(format_choice.gguf_repository(q.target, weight_format(v, q.target)))
    return {
        "flag-vllm-tp": v.gpus < 2,
        "flag-sglang-tp": v.gpus < 2,
        "flag-lc-download": local,
        "flag-g4-download": local,
        "flag-lc-convert": q.draft is not None and q.draft.is_gguf,
        "flag-g4-convert": q.draft is not None and q.draft.is_gguf,
        "flag-lc-target": q.target.is_local or published,
        "flag-g4-target": q.target.is_local or published,
        "flag-lc-make-target": q.target.is_gguf or not q.target.is_local,
        "flag-g4-make-target": q.target.is_gguf or not q.target.is_local,
        "flag-lc-fa-cpu": v.situation.cc is not None,
        "flag-lc-ncmoe": not q.split.n_cpu_moe,
        "flag-g4-install-cpu": (v.situation.cc or ()) >= (7, 0),
        "flag-lc-build": v.installed,
        "flag-vllm-install": v.installed,
        "flag-sglang-install": v.installed,
    }.get(flag.id, False)


def _take(r: Recipe, flag: FlagFact, values: dict[str, str], q: Question, v: EngineVerdict) -> None:
    """Add one row to the recipe."""
    if _skip(flag, q, v):
        return
    if "{n}" in flag.text and values["n"] == "0":
        r.unknown.append(
            "the draft length: no source says how this engine counts it for this draft"
        )
        return
    text = flag.text.format_map(values | {"rank": "{rank}"})
    reason = flag.reason.format_map(values)
    r.parts.append(RecipePart(flag.part, text, reason, flag.versions, flag.id))
    if flag.part == "prepare":
        r.prepare.append(text)
    elif flag.part == "bench":
        r.bench.append(text)
    elif flag.part == "image":
        r.image = text
    elif flag.part == "env":
        name, _, value = text.partition("=")
        r.env[name] = value


def _assemble(r: Recipe, machine: Machine, values: dict[str, str], engine: str) -> None:
    """Assemble the start commands, one per node."""
    words = [w for p in r.parts if p.part == "arg" for w in _split(p.text)]
    spec: dict[str, object] = {}
    for p in r.parts:
        if p.part == "spec":
            key, _, value = p.text.partition("=")
            spec[key] = int(value) if value.isdigit() else value
    if spec:
        words += ["--speculative-config", shlex.quote(json.dumps(spec))]
    for rank in range(machine.nodes):
        mine = [w.replace("{rank}", str(rank)) for w in words]
        if machine.nodes > 1 and rank and engine == "vllm":
            mine.append("--headless")
        start = SERVER[engine].format_map(values)
        r.arguments.append(mine)
        env = [f"{k}={v}" for k, v in r.env.items()]
        r.commands.append(" \\\n  ".join([*env, start, *_joined(mine)]))
    if engine == "vllm" and machine.nodes > 1:
        r.parts.append(
            RecipePart(
                "note",
                f"{HEAD}: the address of the first node; every other node "
                "adds --headless and its own rank",
                "the same rank twice hangs",
                next(p.versions for p in r.parts if p.fact == "flag-vllm-nodes"),
                "flag-vllm-nodes",
            )
        )


def _split(text: str) -> list[str]:
    """Split a part into words, keeping each quoted for the shell."""
    return [shlex.quote(w) for w in shlex.split(text)] if "'" in text else text.split(" ")


def _joined(words: list[str]) -> list[str]:
    """Join each option with its values."""
    out: list[str] = []
    for w in words:
        if w.startswith("-") and not w.lstrip("-").isdigit():
            out.append(w)
        elif out:
            out[-1] += f" {w}"
    return out
