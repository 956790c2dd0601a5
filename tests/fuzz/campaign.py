"""Fuzzing of all commands and of the server: a pool of cases that grows by those that reach new
lines.

    python -m tests.fuzz.campaign commands 1,2,3     run one case and show it
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer

from g4spec import cli
from tests.fuzz.cases import Case, Maker, Place, longer
from tests.fuzz.coverage import Lines
from tests.fuzz.family import Family
from tests.fuzz.requests import BODIES, Serving
from tests.fuzz.watching import Outcome, run

CORPUS = Path(__file__).parent / "corpus"
SURFACES = ("commands", "requests")
ADDRESS_SPACE = 3 << 30
"""Bytes beyond what the process has: a case that allocates more is told, not the machine."""


@dataclass
class Count:
    """What came of many cases.

    Attributes:
        by: command -> exit code -> cases. `broken`: what went wrong -> the cases that did it.
    """

    ran: int = 0
    by: dict[str, Counter[str]] = field(default_factory=dict)
    slowest: float = 0.0
    growth: int = 0
    kept: list[tuple[int, ...]] = field(default_factory=list)
    broken: dict[str, list[str]] = field(default_factory=dict)

    def add(self, name: str, shown: str, outcome: Outcome) -> None:
        self.ran += 1
        self.by.setdefault(name, Counter())[str(outcome.code)] += 1
        self.slowest = max(self.slowest, outcome.seconds)
        self.growth = max(self.growth, outcome.growth)
        for what in outcome.broken:
            cases = self.broken.setdefault(re.sub(r"0x[0-9a-f]+|\d{3,}", "N", what)[:160], [])
            if len(cases) < 3:
                cases.append(f"{what} <- {shown}"[:1500])

    def json(self) -> dict[str, Any]:
        return {
            "cases": self.ran, "by_command": {n: dict(c) for n, c in sorted(self.by.items())},
            "slowest_cpu_seconds": round(self.slowest, 2), "largest_growth_mb": self.growth >> 20,
            "broken": {what: len(cases) for what, cases in self.broken.items()},
        }  # fmt: skip


@dataclass(frozen=True)
class Ran:
    """A case that was run: what it was, in words, and what came of it."""

    name: str
    shown: str
    outcome: Outcome


@contextmanager
def one_parser() -> Iterator[None]:
    """Build the parser of the command line once, not for each case: it takes 15 ms."""
    made, before = typer.main.get_command(cli.app()), cli.app
    cli.app = lambda: made  # type: ignore[assignment,return-value]
    try:
        yield
    finally:
        cli.app = before


class Commands:
    """All commands, in a folder of their own. A case is run by its numbers."""

    def __init__(self, base: Path) -> None:
        self.base = base
        (base / "made").mkdir()
        self.family = Family(base / "made")
        self.maker, self.place = Maker(self.family), Place(self.family, base)

    @contextmanager
    def ready(self) -> Iterator[None]:
        """The environment, limits and parser of a run, and what was before it afterwards."""
        saved, here = dict(os.environ), os.getcwd()
        os.environ.update(self.place.environment())
        os.environ.pop("NO_COLOR", None)
        limits = {k: resource.getrlimit(k) for k in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE)}
        now = int(re.findall(r"\d+", Path("/proc/self/statm").read_text())[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (now + ADDRESS_SPACE, limits[resource.RLIMIT_AS][1]))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, limits[resource.RLIMIT_FSIZE][1]))
        try:
            with one_parser(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            for kind, limit in limits.items():
                resource.setrlimit(kind, limit)
            os.chdir(here)
            os.environ.clear()
            os.environ.update(saved)

    def run(self, numbers: tuple[int, ...], lines: Lines | None = None) -> Ran:
        case = self.maker.make(numbers)
        self.place.lay(case)

        def command(argv: list[str]) -> int:
            if lines is None:
                return cli.run(argv)
            with lines.watch():
                return cli.run(argv)

        outcome = run(command, case.argv, self.base, self.place.work, case.terminal, "a line\n")
        name = name_of(case)
        if name == "verify" and "changed the text" in outcome.err:
            outcome.broken.append("verify found a difference")
        return Ran(name, case.show(), outcome)

    def changed(self) -> list[str]:
        """Sources that cases have changed, which none may."""
        return self.place.damaged()


def name_of(case: Case) -> str:
    words = [a for a in case.argv[:2] if a.isalpha()]
    return "bench compare" if words == ["bench", "compare"] else (words[0] if words else "none")


class Requests:
    """The server, over the engine of a target and a draft."""

    def __init__(self, commands: Commands) -> None:
        seeds = commands.base / "seeds"
        self._serving = Serving(commands.base, seeds / "t.gguf", seeds / "z.gguf")
        self.changed = commands.changed

    @contextmanager
    def ready(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._serving.close()

    def run(self, numbers: tuple[int, ...], lines: Lines | None = None) -> Ran:
        sent, outcome = self._serving.run(numbers, lines)
        name = sent.path if sent.path in BODIES else "other paths"
        return Ran(f"serve {name}", sent.show(), outcome)


def fuzz(
    surface: Commands | Requests,
    seconds: float,
    cases: int,
    seed: int,
    corpus: list[tuple[int, ...]],
    tell: Callable[[Count, int], None] | None = None,
    watched: float = 1.0,
) -> Count:
    """Run cases until there were so many or the time is over; new lines make a case a parent.

    Args:
        watched: share of the cases whose lines are looked at, which takes most of their time.
    """
    rng, count, lines = random.Random(seed), Count(), Lines()
    pool, end, told = list(corpus), time.monotonic() + seconds, time.monotonic()
    waiting = list(corpus)
    with surface.ready():
        while count.ran < cases and time.monotonic() < end:
            if waiting:
                numbers = waiting.pop()
            elif not pool or rng.random() < 0.15:
                numbers = (rng.randrange(1 << 30),)
            else:  # younger parents are nearer to what has not been reached
                at = int(len(pool) * max(rng.random(), rng.random()))
                numbers = longer(pool[at], rng)
            before = len(lines)
            looked = numbers in corpus or rng.random() < watched
            ran = surface.run(numbers, lines if looked else None)
            count.add(ran.name, f"{numbers} {ran.shown}", ran.outcome)
            if len(lines) > before and numbers not in corpus:
                pool.append(numbers)
                count.kept.append(numbers)
            if count.ran % 200 == 0 and (wrong := surface.changed()):
                count.broken.setdefault("a source was changed", []).append(f"{wrong} {numbers}")
            if tell is not None and time.monotonic() - told > 60:
                told = time.monotonic()
                tell(count, len(lines))
    return count


def saved(surface: str) -> list[tuple[int, ...]]:
    """The kept corpus of a surface."""
    path = CORPUS / f"{surface}.json"
    return [tuple(entry) for entry in json.loads(path.read_text())] if path.is_file() else []


def save(surface: str, corpus: list[tuple[int, ...]]) -> None:
    """Keep a corpus, one case a line."""
    entries = ",\n".join(json.dumps(list(numbers)) for numbers in corpus)
    (CORPUS / f"{surface}.json").write_text(f"[{entries}]\n")


def main() -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        commands = Commands(Path(folder))
        surface = commands if sys.argv[1] == "commands" else Requests(commands)
        with surface.ready():
            for text in sys.argv[2:]:
                ran = surface.run(tuple(json.loads(f"[{text.strip('()')}]")))
                print(ran.shown, ran.outcome, sep="\n", file=sys.__stdout__)


if __name__ == "__main__":
    main()
