"""Fuzzing of all commands and of the server: a pool of cases that keeps every case reaching new
lines.

    python -m tests.fuzz.campaign commands 1,2,3     run one case and show it
"""

from __future__ import annotations

import json
import lzma
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
from tests.fuzz import stand_ins
from tests.fuzz.cases import Case, Maker, Place, mutated
from tests.fuzz.coverage import Lines
from tests.fuzz.family import Family
from tests.fuzz.grammar import COMMANDS
from tests.fuzz.requests import BODIES, RandomHttpRequest, Serving
from tests.fuzz.watching import Outcome, run

CORPUS = Path(__file__).parent / "corpus" / "cases.json.xz"
SURFACES = ("commands", "requests")
ADDRESS_SPACE = 3 << 30
"""Limit of additional address space per case, in bytes: a case that allocates more is reported and
does not exhaust the machine."""


@dataclass
class Totals:
    """Totals over many cases.

    Attributes:
        by: command -> exit code -> number of cases.
        kinds: kind of input -> number of cases.
        kept: cases that reached new lines, and these lines.
        broken: violation -> the cases that caused it.
    """

    ran: int = 0
    by: dict[str, Counter[str]] = field(default_factory=dict)
    kinds: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0
    growth: int = 0
    kept: list[tuple[tuple[int, ...], list[str]]] = field(default_factory=list)
    broken: dict[str, list[str]] = field(default_factory=dict)

    def add(self, ran: CaseResult) -> None:
        outcome = ran.outcome
        self.ran += 1
        self.by.setdefault(ran.name, Counter())[str(outcome.code)] += 1
        self.kinds.update(ran.kinds or {"as in the grammar"})
        self.slowest = max(self.slowest, outcome.seconds)
        self.growth = max(self.growth, outcome.growth)
        for what in outcome.broken:
            self.broken.setdefault(sort(what), []).append(f"{what} <- {ran.shown}"[:1500])

    def json(self) -> dict[str, Any]:
        return {
            "cases": self.ran,
            "by_command": {n: dict(c) for n, c in sorted(self.by.items())},
            "by_input": dict(sorted(self.kinds.items())),
            "slowest_cpu_seconds": round(self.slowest, 2),
            "largest_growth_mb": self.growth >> 20,
            "broken": {what: len(cases) for what, cases in self.broken.items()},
        }


def sort(what: str) -> str:
    """Return the message with numbers removed, so that equal failures have one name."""
    return re.sub(r"0x[0-9a-f]+|\d{3,}", "N", what)[:160]


@dataclass(frozen=True)
class CaseResult:
    """A case that was run, its description and its outcome."""

    name: str
    shown: str
    kinds: set[str]
    outcome: Outcome


@contextmanager
def one_parser() -> Iterator[None]:
    """Build the command line parser once instead of once per case, which takes 15 ms."""
    made, before = typer.main.get_command(cli.app()), cli.app
    cli.app = lambda *_: made  # type: ignore[assignment]
    try:
        yield
    finally:
        cli.app = before


class Commands:
    """All commands, run in their own folder. A case is given by its numbers."""

    def __init__(self, base: Path) -> None:
        self.base = base
        (base / "made").mkdir()
        self.family = Family(base / "made")
        self.maker, self.place = Maker(self.family), Place(self.family, base)

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Set environment, limits and parser for a run, and restore them afterwards."""
        saved, here = dict(os.environ), os.getcwd()
        os.environ.update(self.place.environment())
        os.environ.pop("NO_COLOR", None)
        limits = {k: resource.getrlimit(k) for k in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE)}
        now = int(re.findall(r"\d+", Path("/proc/self/statm").read_text())[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (now + ADDRESS_SPACE, limits[resource.RLIMIT_AS][1]))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, limits[resource.RLIMIT_FSIZE][1]))
        try:
            with one_parser(), stand_ins.installed(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            for kind, limit in limits.items():
                resource.setrlimit(kind, limit)
            os.chdir(here)
            os.environ.clear()
            os.environ.update(saved)

    def make(self, numbers: tuple[int, ...]) -> Case:
        return self.maker.make(numbers)

    def packed(self, case: Case) -> dict[str, Any]:
        """Return a case as data; see `read`."""
        return case.json(self.family)

    def read(self, tree: dict[str, Any]) -> Case:
        return Case.of_json(tree)

    def run(self, case: Case, lines: Lines | None = None) -> CaseResult:
        self.place.lay(case)

        def command(argv: list[str]) -> int:
            if lines is None:
                return cli.run(argv)
            with lines.watch():
                return cli.run(argv)

        outcome = run(command, case.argv, self.base, self.place.work, case.terminal, case.given)
        name = name_of(case)
        if name == "verify" and "changed the text" in outcome.err:
            outcome.broken.append("verify found a difference")
        return CaseResult(name, f"{case.made_by} {case.show()}", case.kinds, outcome)

    def changed(self) -> list[str]:
        """Return source files that cases have changed, although none may."""
        return self.place.damaged()


def name_of(case: Case) -> str:
    """Return the command of a case, if it has one."""
    if case.argv[:2] == ["bench", "compare"]:
        return "bench compare"
    if case.argv[:1] == ["chat"] and "--url" in case.argv:
        return "chat --url"
    if case.argv[:1] == ["serve"] and "--daemon" in case.argv:
        return "serve --daemon"
    return case.argv[0] if case.argv and case.argv[0] in COMMANDS else "no command"


class Requests:
    """The server, over an engine with a target and a draft."""

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

    def make(self, numbers: tuple[int, ...]) -> RandomHttpRequest:
        return RandomHttpRequest(numbers)

    def packed(self, case: RandomHttpRequest) -> dict[str, Any]:
        """Return a case as data; see `read`."""
        return case.json()

    def read(self, tree: dict[str, Any]) -> RandomHttpRequest:
        return RandomHttpRequest.of_json(tree)

    def run(self, case: RandomHttpRequest, lines: Lines | None = None) -> CaseResult:
        outcome = self._serving.run(case, lines)
        name = case.path if case.path in BODIES else "other paths"
        return CaseResult(f"serve {name}", f"{case.made_by} {case.show()}", case.kinds, outcome)


@dataclass
class ProgressListener:
    """Callbacks of a long run: `begun` before each case, `failed` after a case with violations,
    `told` with the totals now and then."""

    begun: Callable[[tuple[int, ...]], None] = lambda numbers: None
    failed: Callable[[Any, CaseResult], None] = lambda case, ran: None
    told: Callable[[Totals], None] = lambda count: None


def fuzz(
    surface: Any,
    seconds: float,
    cases: int,
    seed: int,
    corpus: list[tuple[int, ...]],
    watch: ProgressListener | None = None,
    watched: float = 1.0,
    first: list[tuple[int, ...]] | None = None,
) -> Totals:
    """Run cases until the number or the time is reached. Cases that reach new lines become parents
    of others.

    Args:
        surface: Commands or Requests.
        watched: fraction of cases whose lines are traced, which takes most of their time.
        first: cases of the corpus to run unchanged before new ones; default: all.
    """
    rng, count, lines, watch = random.Random(seed), Totals(), Lines(), watch or ProgressListener()
    pool, end, last_report = list(corpus), time.monotonic() + seconds, time.monotonic()
    waiting = list(corpus if first is None else first)
    with surface.ready():
        while count.ran < cases and time.monotonic() < end:
            if looked := bool(waiting):
                numbers = waiting.pop()
            elif not pool or rng.random() < 0.15:
                numbers = (rng.randrange(1 << 30),)
            else:  # newer parents are closer to unreached lines
                at = int(len(pool) * max(rng.random(), rng.random()))
                numbers = mutated(pool[at], rng)
            known = looked
            looked = looked or rng.random() < watched
            watch.begun(numbers)
            case = surface.make(numbers)
            ran = surface.run(case, lines if looked else None)
            count.add(ran)
            if ran.outcome.broken:
                watch.failed(case, ran)
            if lines.fresh:
                count.kept.append((numbers, lines.fresh))
                lines.fresh = []
                if not known:
                    pool.append(numbers)
            if count.ran % 200 == 0 and (wrong := surface.changed()):
                count.broken.setdefault("a source was changed", []).append(f"{wrong} {numbers}")
            if time.monotonic() - last_report > 10:
                last_report = time.monotonic()
                watch.told(count)
    return count


def saved(surface: str) -> list[tuple[int, ...]]:
    """Return the stored corpus of a surface."""
    if not CORPUS.is_file():
        return []
    return [tuple(entry) for entry in json.loads(lzma.decompress(CORPUS.read_bytes()))[surface]]


def save(corpus: dict[str, list[tuple[int, ...]]], to: Path) -> None:
    """Store a corpus: surface -> cases."""
    to.write_bytes(lzma.compress(json.dumps(corpus).encode(), preset=9))


def main() -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        commands = Commands(Path(folder))
        surface: Any = commands if sys.argv[1] == "commands" else Requests(commands)
        with surface.ready():
            for text in sys.argv[2:]:
                ran = surface.run(surface.make(tuple(json.loads(f"[{text.strip('()')}]"))))
                print(ran.shown, ran.outcome, sep="\n", file=sys.__stdout__)


if __name__ == "__main__":
    main()
