"""The parts of a diagnosis, and how they are printed."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from g4spec.advisor.machine import Machine
from g4spec.advisor.memory_needs import CardMemoryPlan
from g4spec.advisor.schema import Mark

SIGNS: dict[Mark, str] = {"good": "✓", "warn": "!", "bad": "✗", "note": "·"}
WITHOUT_DRAFT = "without the draft: "
"""Precedes a command that leaves out the requested draft."""
STYLES: dict[Mark, str | None] = {"good": "good", "warn": "warn", "bad": "bad", "note": "dim"}


class LineOutput(Protocol):
    """The methods of `cli.render.Output` used here."""

    def line(self, text: str = "", style: str | None = None) -> None: ...
    def command(self, before: str, text: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Line:
    """One statement.

    Attributes:
        mark: good, warn (works with a condition), bad (does not work), note.
        reason, fix: why, and what to do; may be empty.
        facts: ids of the facts it is based on, for `--why`.
        detail: True if shown only with --verbose.
    """

    mark: Mark
    text: str
    reason: str = ""
    fix: str = ""
    facts: tuple[str, ...] = ()
    detail: bool = False


@dataclass(slots=True)
class Section:
    """A heading with its lines. `brief`: True if also shown without --verbose after a summary."""

    title: str
    brief: bool = False
    lines: list[Line] = field(default_factory=list)

    @property
    def topic(self) -> str:
        """First words of the title."""
        return re.split(r":| \(| at |,| for | on ", self.title)[0].lower()

    def add(
        self,
        mark: Mark,
        text: str,
        reason: str = "",
        fix: str = "",
        facts: tuple[str, ...] = (),
        detail: bool = False,
    ) -> None:
        self.lines.append(Line(mark, text, reason, fix, facts, detail))


@dataclass(frozen=True, slots=True)
class Alternative:
    """A run that fits, in place of the requested one.

    Attributes:
        kind: what changes: cache, context, draft (none), ngram, type, split (layers in RAM) or
            size.
        text: model, draft, context and expected speed.
        command: the complete command to run next.
        drops_draft: True if it leaves out the requested draft.
    """

    kind: str
    text: str
    command: str
    drops_draft: bool = False

    @property
    def fix(self) -> str:
        """The command; if it leaves out the requested draft, with words before it that say so."""
        return f"{WITHOUT_DRAFT * self.drops_draft}{self.command}"


@dataclass(frozen=True, slots=True)
class Brief:
    """The summary of a diagnosis.

    Attributes:
        said: the engine that runs it, or why none does. `rows`: (name, text) in order.
        command: the command to run next, or "". It is that of the first alternative if the
            requested run does not fit.
        alternatives: other runs that fit, best first.
    """

    mark: Mark
    said: str
    rows: tuple[tuple[str, str], ...] = ()
    command: str = ""
    alternatives: tuple[Alternative, ...] = ()

    @property
    def step(self) -> str:
        """The command as a step of a diagnosis; "" without one."""
        return next((a.fix for a in self.alternatives if a.command == self.command), self.command)

    def show(self, out: LineOutput) -> None:
        """Print the summary."""
        out.line(f"{SIGNS[self.mark]} {self.said}", STYLES[self.mark])
        if self.mark != "bad":
            self._show_rows(out)
        for i, other in enumerate(self.alternatives):
            name = "or" if i or self.mark != "bad" else "instead"
            out.line(f"  {name:10}{other.text}")
            out.command(" " * 12, other.command)
        if self.mark == "bad":
            self._show_rows(out)
        if self.command and self.command not in [a.command for a in self.alternatives]:
            out.command("  command   ", self.command)

    def _show_rows(self, out: LineOutput) -> None:
        for name, text in self.rows:
            out.line(f"  {name:10}{text}")


@dataclass(slots=True)
class Diagnosis:
    """The result of `doctor`.

    Attributes:
        asked: True if the question names a model.
        works: True if the requested run can work, or none was requested.
        brief: the summary, if a run was requested.
        steps: what to do next, in order: commands, perhaps after WITHOUT_DRAFT, and sentences.
        plans: the memory plans that were shown.
    """

    machine: Machine
    question: str
    asked: bool = False
    works: bool = True
    brief: Brief | None = None
    sections: list[Section] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)
    plans: list[CardMemoryPlan] = field(default_factory=list)

    def section(self, title: str, brief: bool = False) -> Section:
        section = Section(title, brief)
        self.sections.append(section)
        return section

    def marks(self, mark: Mark) -> list[Line]:
        return [line for s in self.sections for line in s.lines if line.mark == mark]

    def json(self) -> dict[str, Any]:
        m = self.machine
        return {
            "question": self.question,
            "works": self.works,
            "brief": asdict(self.brief) if self.brief else None,
            "machine": {
                "title": m.title,
                "assumed": m.assumed,
                "nodes": m.nodes,
                "driver": m.driver,
                "cuda": m.cuda,
                "gpus": [asdict(g) for g in m.gpus],
                "ram": m.ram,
                "ram_free": m.ram_free,
                "disk_free": m.disk_free,
                "wsl": m.wsl,
                "container": m.container,
                "nvlink": m.nvlink,
                "tools": dict(m.tools),
                "torch_arches": m.torch_arches,
                "notes": m.notes,
            },
            "sections": [
                {"title": s.title, "lines": [asdict(line) for line in s.lines]}
                for s in self.sections
            ],
            "memory": [
                {
                    "engine": p.engine,
                    "format": p.format,
                    "kv": p.kv,
                    "context": p.context,
                    "steps": [asdict(s) for s in p.items],
                    "total": p.total,
                    "available": p.available,
                    "fits": p.fits,
                    "largest_context": p.largest,
                }
                for p in self.plans
            ],
            "next_steps": self.steps,
        }

    def show(self, out: LineOutput, verbose: bool = False) -> None:
        """Print the summary and the next steps; with `verbose`, everything."""
        out.line(self.question, "bold")
        if self.brief is not None:
            self.brief.show(out)
        hidden: list[str] = []
        for section in self.sections:
            brief = section.brief or self.brief is None
            shown = [x for x in section.lines if verbose or (brief and not x.detail)]
            if len(shown) < len(section.lines):
                hidden.append(section.topic)
            if not shown:
                continue
            out.line()
            out.line(section.title, "bold")
            for line in shown:
                _show(out, line, verbose)
        shown_step = self.brief.step if self.brief is not None and not verbose else ""
        steps = (
            [] if shown_step and self.works else [step for step in self.steps if step != shown_step]
        )
        if steps:
            out.line()
            out.line("Next steps", "bold")
            for i, step in enumerate(steps, 1):
                before, command = split_step(step)
                if command:
                    out.command(f"  {i}. {before}", command)
                else:
                    out.line(f"  {i}. {step}")
        if hidden:
            out.line()
            out.line(f"--verbose shows the rest: {', '.join(dict.fromkeys(hidden))}", "dim")


def split_step(step: str) -> tuple[str, str]:
    """Split a step into the words before its command and the command, "" if it has none."""
    before = WITHOUT_DRAFT if step.startswith(WITHOUT_DRAFT) else ""
    rest = step.removeprefix(before)
    return (before, rest) if rest.startswith("g4spec ") else (step, "")


def _show(out: LineOutput, line: Line, verbose: bool) -> None:
    ids = f"  [{', '.join(line.facts)}]" if line.facts and verbose else ""
    out.line(f"  {SIGNS[line.mark]} {line.text}{ids}", STYLES[line.mark])
    if not (line.reason or line.fix) or not (verbose or line.mark in ("bad", "warn")):
        return
    text = line.reason
    if line.fix:
        text += f"{'' if not text else ' ' if text.endswith('.') else '. '}Fix: {line.fix}"
    out.line(f"      {text}")
