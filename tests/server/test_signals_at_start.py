"""One signal during the start of `serve`, or while other commands load a model, ends the command,
also if a library discards its exception."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.selection import sample

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import asyncio, signal, sys
from g4spec import cli
from g4spec.runtime import bpe_encoder
from g4spec.server import grammar
where, number = sys.argv[1], int(sys.argv[2])
sent = []
def signalled(function):
    def call(*args):
        if not sent:
            sent.append(number)
            signal.raise_signal(number)
        return function(*args)
    return call
for name, owner, method in [
    ("merges", bpe_encoder._MergePairs, "__len__"),  # its exceptions are discarded by tokenizers
    ("vocabulary", grammar._TokenizerAdapter, "__call__"),  # by llguidance
    ("event loop", asyncio.Handle, "_run"),  # one before the first step ended no step
]:
    if name == where:
        setattr(owner, method, signalled(getattr(owner, method)))
sys.argv[1:] = sys.argv[3:]
cli.main()
"""


@pytest.mark.parametrize(
    ("how", "where", "number", "codes"),
    [
        ("one model", "merges", signal.SIGTERM, (143,)),
        pytest.param("one model", "vocabulary", signal.SIGINT, (130, 0), marks=pytest.mark.slow),
        pytest.param("one model", "event loop", signal.SIGHUP, (0,), marks=pytest.mark.slow),
        ("folder", "event loop", signal.SIGINT, (0,)),
        ("daemon", "merges", signal.SIGINT, (130,)),
    ],
)
def test_one_signal_ends_the_server(
    how: str, where: str, number: int, codes: tuple[int, ...], family: Path
) -> None:
    """The exception was lost, and only the next signal ended the server."""
    model = ["-m", str(family / "target.gguf")]
    options = {
        "one model": [*model, "--port", "0"],
        "folder": ["--models", str(family), "--port", "0"],
        "daemon": [*model, "--daemon", "--stream-fd", "1"],
    }
    command = [sys.executable, "-c", PROGRAM, where, str(int(number)), "serve", *options[how]]
    with subprocess.Popen(
        [*command, "--device", "cpu"], cwd=ROOT, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        try:
            assert process.wait(40) in codes
        finally:
            process.kill()


@pytest.mark.parametrize("number", sample([signal.SIGINT, signal.SIGTERM], 1))
@pytest.mark.parametrize(
    "command",
    sample([("generate", "-p", "a"), ("verify", "-md", "ngram", "-p", "a"), ("chat",)], 1),
)
def test_one_signal_ends_a_command_that_loads_a_model(
    command: tuple[str, ...], number: int, family: Path
) -> None:
    """The exception was lost, and the command went on."""
    argv = [*command, "-m", str(family / "target.gguf"), "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "merges", str(int(number)), *argv],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        timeout=40,
    )
    assert (done.returncode, done.stdout) == (128 + number, b"")
    assert b"Traceback" not in done.stderr
