"""Runs a sample of the cases of `benchmarks/fuzz_commands.py`, with every command and endpoint."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from g4spec import cli
from g4spec.server.endpoints import Endpoints, routes
from tests.fuzz import campaign, watching
from tests.fuzz.campaign import Commands, Requests
from tests.fuzz.cases import COMMANDS, mutated
from tests.fuzz.requests import BODIES, GETS


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Commands:
    return Commands(tmp_path_factory.mktemp("fuzz"))


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def part(surface: str, count: int, seed: int) -> list[tuple[int, ...]]:
    """Return `count` cases of the stored corpus, and as many new mutations of stored cases."""
    rng, kept = random.Random(seed), campaign.saved(surface)
    assert len(kept) > 50
    some = rng.sample(kept, min(count, len(kept)))
    return [*some, *(mutated(rng.choice(kept), rng) for _ in range(count))]


def test_no_command_violates_the_security_rules(commands: Commands) -> None:
    count = campaign.Totals()
    with commands.ready():
        for numbers in part("commands", 60, 1):
            count.add(commands.run(commands.make(numbers)))
    assert count.broken == {} and not commands.changed()
    codes = {code for row in count.by.values() for code in row}
    assert codes >= {"0", "1", "2", "3"}, "cases must reach several exit codes"
    assert len(count.by) >= 10


def test_no_request_violates_the_security_rules(commands: Commands) -> None:
    count, surface = campaign.Totals(), Requests(commands)
    with surface.ready():
        for numbers in part("requests", 80, 2):
            count.add(surface.run(surface.make(numbers)))
    assert count.broken == {}
    assert {"200", "400", "404"} <= {code for row in count.by.values() for code in row}
    assert len(count.by) >= len(BODIES)


def test_every_command_is_in_the_grammar() -> None:
    found = {*cli.names(), "compare", "chat --url", "serve --daemon"} - {"demo"}
    fuzzed = {*COMMANDS} - {"words"}  # `demo` reads no file, "words" is no command
    assert found == fuzzed, "COMMANDS of tests/fuzz/grammar.py"


NOT_FUZZED = {"--network", "--self-test", "--probe"}
"""A request to the hub, kernels of a GPU, and minutes of decoding."""


def test_every_option_is_in_the_grammar() -> None:
    """With at least one of its names, which may also be in one of the command's lines."""
    made: Any = typer.main.get_command(cli.app())
    for command, click in made.commands.items():
        fuzzed = [g for name, g in COMMANDS.items() if name.split()[0] == command]
        words = {word for g in fuzzed for word in (*g.options, *itertools.chain(*g.lines))}
        names = [n for p in click.params for n in (p.opts, p.secondary_opts) if n]
        missing = [n for n in names if n[0].startswith("-") and not {*n} & (words | NOT_FUZZED)]
        assert not fuzzed or missing == [], f"{command}: COMMANDS of tests/fuzz/grammar.py"


def test_every_endpoint_is_in_the_grammar() -> None:
    """At one of its paths; `/v1/live` ends with its client only."""
    fuzzed = [path.split("?")[0] for path in (*BODIES, *GETS)]
    served = {route.endpoint for route in routes(Endpoints)}
    known = {r.endpoint for r in routes(Endpoints) if any(map(r.path_regex.match, fuzzed))}
    assert served - known == {Endpoints.live}


def test_equal_numbers_give_equal_cases(commands: Commands) -> None:
    for numbers in part("commands", 20, 3):
        one, two = commands.maker.make(numbers), commands.maker.make(numbers)
        assert (one.argv, one.changed, one.terminal) == (two.argv, two.changed, two.terminal)


# ---- the fuzzer detects violations

HARM = {
    "AssertionError": "assert False",
    "hang": "while True: pass",
    "memory grew": "b'1' * (300 << 20)",
    "outside": "open('/tmp/g4spec-fuzz-outside', 'w').close()",
    "control character": "import sys; sys.stdout.write('\\x1b]0;x')",
    "exit code 7": "return 7",
    "socket.connect": "import socket\n"
    "    with socket.socket() as s: s.connect_ex(('127.0.0.1', 9))",
    "pickle.find_class": "import pickle, os; pickle.loads(pickle.dumps(os.getcwd))",
}


@pytest.mark.parametrize("what", HARM)
def test_violations_are_detected(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "SECONDS", 0.2 if what == "hang" else 10)
    monkeypatch.setattr(watching.tempfile, "tempdir", str(tmp_path))
    space: dict[str, object] = {}
    exec(f"def command(argv):\n    {HARM[what]}\n    return 0", space)
    outcome = watching.run(space["command"], [], tmp_path, tmp_path, terminal=True)  # type: ignore[arg-type]
    assert any(what in text for text in outcome.broken), outcome
    fine = watching.run(lambda argv: 3, [], tmp_path, tmp_path, terminal=True)
    assert fine.broken == [] and fine.code == 3


def test_a_changed_source_is_detected(commands: Commands) -> None:
    seed = commands.base / "seeds" / "p.txt"
    before = seed.read_bytes()
    assert commands.changed() == []
    seed.write_bytes(before[:-1] + b"x")
    assert commands.changed() == ["p.txt"] and seed.read_bytes() == before
    assert commands.changed() == []
