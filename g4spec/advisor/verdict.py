"""What a diagnosis consists of, and how it reads."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from g4spec.advisor.machine import Machine
from g4spec.advisor.memory_needs import Plan
from g4spec.advisor.schema import Mark

SIGNS: dict[Mark, str] = {"good": "✓", "warn": "!", "bad": "✗", "note": "·"}
STYLES: dict[Mark, str | None] = {"good": "good", "warn": "warn", "bad": "bad", "note": "dim"}


class Out(Protocol):
    """The part of `cli.render.Output` that a verdict needs."""

    def line(self, text: str = "", style: str | None = None) -> None: ...


@dataclass(frozen=True, slots=True)
class Line:
    """One statement.

    Attributes:
        mark: good, warn (works with a condition), bad (does not work), note.
        reason, fix: why, and what to do; empty where there is nothing to add.
        facts: ids of the rows behind it, for `--why`.
        detail: shown only when everything is asked for.
    """

    mark: Mark
    text: str
    reason: str = ""
    fix: str = ""
    facts: tuple[str, ...] = ()
    detail: bool = False


@dataclass(slots=True)
class Section:
    """A heading with its lines."""

    title: str
    lines: list[Line] = field(default_factory=list)

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


@dataclass(slots=True)
class Diagnosis:
    """The whole answer.

    Attributes:
        asked: whether a run was asked for at all.
        works: whether the run that was asked for can work; true when none was asked for.
        conditions: what the engine shown in detail needs beside that.
        steps: what to do next, in order.
        plans: the memory arithmetic that was shown.
    """

    machine: Machine
    question: str
    asked: bool = False
    works: bool = True
    conditions: int = 0
    sections: list[Section] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)

    def section(self, title: str) -> Section:
        made = Section(title)
        self.sections.append(made)
        return made

    def marks(self, mark: Mark) -> list[Line]:
        return [line for s in self.sections for line in s.lines if line.mark == mark]

    def summary(self) -> str:
        """The last line."""
        if not self.works:
            return "This run cannot work as asked; see the next steps."
        n = self.conditions
        return f"It can work, with {n} condition{'s' * (n != 1)}." if n else "It can work."

    def json(self) -> dict[str, Any]:
        m = self.machine
        return {
            "question": self.question,
            "works": self.works,
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
                    "steps": [asdict(s) for s in p.steps],
                    "total": p.total,
                    "available": p.available,
                    "fits": p.fits,
                    "largest_context": p.largest,
                }
                for p in self.plans
            ],
            "next_steps": self.steps,
        }

    def show(self, out: Out, verbose: bool = False) -> None:
        """As text: one screen, or everything with `verbose`."""
        out.line(self.question, "bold")
        for section in self.sections:
            shown = [line for line in section.lines if verbose or not line.detail]
            if not shown:
                continue
            out.line()
            out.line(section.title, "bold")
            for line in shown:
                _show(out, line, verbose)
        if self.steps:
            out.line()
            out.line("Next steps", "bold")
            for i, step in enumerate(self.steps, 1):
                out.line(f"  {i}. {step}")
        if self.asked:
            out.line()
            out.line(self.summary(), "good" if self.works else "bad")


def _show(out: Out, line: Line, verbose: bool) -> None:
    ids = f"  [{', '.join(line.facts)}]" if line.facts and verbose else ""
    out.line(f"  {SIGNS[line.mark]} {line.text}{ids}", STYLES[line.mark])
    if not (line.reason or line.fix) or not (verbose or line.mark in ("bad", "warn")):
        return
    text = line.reason
    if line.fix:
        text += f"{'' if not text else ' ' if text.endswith('.') else '. '}Fix: {line.fix}"
    out.line(f"      {text}")
