"""Runs one case and reports violations of the rules of SECURITY.md.

A case may end in an exit code or a response. It must not raise, hang, grow, write outside its
folder, open a connection, load a pickle, or send a control character to a terminal.
"""

from __future__ import annotations

import gc
import io
import json
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

from tests.fuzz.grammar import COMMANDS, NONE

SECONDS, WALL, GROWTH, WRITTEN = 10, 100, 200 << 20, 200 << 20
"""Limits: CPU seconds; elapsed seconds; bytes of memory; bytes of output."""
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
OWN = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")
"""Escape sequences of g4spec itself: colours, and cursor movements of progress bars."""


class Hang(BaseException):
    """A case took longer than SECONDS of CPU time or WALL in all."""


class Terminal(io.StringIO):
    """A stream whose `isatty` can be set."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal, self.buffer = terminal, io.BytesIO()

    def isatty(self) -> bool:
        return self._terminal

    def fileno(self) -> int:
        raise io.UnsupportedOperation("fileno")


@dataclass
class Outcome:
    """The outcome of a case. `code`: exit code or HTTP status; `broken`: violations."""

    code: int | None = None
    out: str = ""
    err: str = ""
    seconds: float = 0.0
    growth: int = 0
    broken: list[str] = field(default_factory=list)


# ---- actions of the process


class Sentry:
    """Records through an audit hook what a case opens, renames, connects to or unpickles."""

    WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    NAMED: ClassVar = {
        "os.rename": 2,
        "os.remove": 1,
        "os.mkdir": 1,
        "os.rmdir": 1,
        "os.link": 2,
        "os.symlink": 2,
        "os.chmod": 1,
        "os.truncate": 1,
        "shutil.rmtree": 1,
        "shutil.move": 2,
        "shutil.copyfile": 2,
    }
    FORBIDDEN = ("socket.connect", "pickle.find_class", "os.system", "os.exec")

    def __init__(self) -> None:
        self.allowed: tuple[str, ...] = ()
        self.seen: list[str] | None = None
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        seen = self.seen
        if seen is None:
            return
        if event == "open":
            path, _, flags = args
            if isinstance(flags, int) and flags & self.WRITES and isinstance(path, (str, bytes)):
                self._place(event, path)
        elif event in self.NAMED:
            for path in args[: self.NAMED[event]]:
                if isinstance(path, (str, bytes, os.PathLike)):
                    self._place(event, path)
        elif event in self.FORBIDDEN:
            seen.append(f"{event} {str(args)[:100]}")

    def _place(self, event: str, path: Any) -> None:
        seen, self.seen = self.seen, None  # ignore the lookups of this function
        try:
            text = os.fsdecode(path)
            real = os.path.join(
                os.path.realpath(os.path.dirname(text) or "."), os.path.basename(text)
            )
            there = event == "os.mkdir" and os.path.isdir(real)  # mkdir of an existing folder
            device = real in ("/dev/null", "/dev/full", "/dev/tty")
            fine = there or device or real.startswith(self.allowed)
            if not fine and seen is not None:
                seen.append(f"{event} outside: {real}")
        except (ValueError, OSError):  # an impossible name
            pass
        finally:
            self.seen = seen


SENTRY = Sentry()


def memory() -> dict[str, int]:
    """Return VmRSS and VmHWM of this process in bytes."""
    found = re.findall(
        r"^(VmRSS|VmHWM):\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE
    )
    return {name: int(size) << 10 for name, size in found}


def forget_peak() -> int:
    """Reset VmHWM and return the memory in use."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory()["VmRSS"]


@contextmanager
def limited(seconds: float, wall: float) -> Iterator[None]:
    """Raise Hang after this much CPU time of the process, or this much elapsed time."""

    over = False

    def ring(number: int, frame: FrameType | None) -> None:
        if not over:
            raise Hang(f"after {seconds} s of work" if number == signal.SIGPROF else f"{wall} s")

    before = {n: signal.signal(n, ring) for n in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, wall)
    try:
        yield
    finally:
        over = True
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def where(error: BaseException) -> str:
    """Return the last line in g4spec that an exception passed through."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "/g4spec/" in f.filename]
    if not ours:
        return "outside g4spec"
    return f"{ours[-1].filename.rsplit('/g4spec/')[-1]}:{ours[-1].lineno}"


@contextmanager
def watched(outcome: Outcome, allowed: Path, root: Path) -> Iterator[None]:
    """Run a block and check all rules except those on its output.

    Args:
        allowed: folder that may be written to.
        root: folder whose new files are counted.
    """
    gc.collect(0)
    idle, start = forget_peak(), time.process_time()
    SENTRY.allowed, SENTRY.seen = (f"{os.path.realpath(allowed)}/", tempfile.gettempdir()), []
    try:
        with limited(SECONDS, WALL):
            yield
    except Hang as error:
        outcome.broken.append(f"hang: {where(error)} {error}")
    except BaseException as error:  # noqa: BLE001  whatever it is, it is what is looked for
        text = " ".join(str(error).split())
        outcome.broken.append(f"{where(error)}: {type(error).__name__}: {text}"[:240])
    finally:
        seen, SENTRY.seen = SENTRY.seen, None
    outcome.broken += sorted(set(seen or ()))
    outcome.seconds = time.process_time() - start
    outcome.growth = memory()["VmHWM"] - idle
    if outcome.growth > GROWTH:
        outcome.broken.append(f"memory grew by {outcome.growth >> 20} MB")
    written = sum(p.lstat().st_blocks * 512 for p in root.rglob("*"))
    if written > WRITTEN:
        outcome.broken.append(f"{written >> 20} MB were written")


def run(
    command: Callable[[list[str]], int],
    argv: list[str],
    allowed: Path,
    root: Path,
    terminal: bool = False,
    given: str = "",
) -> Outcome:
    """Run one command line; `given`: its standard input."""
    outcome = Outcome()
    out, err = Terminal(terminal), Terminal(terminal)
    saved = sys.stdout, sys.stderr, sys.stdin
    sys.stdout, sys.stderr = out, err
    sys.stdin = io.TextIOWrapper(io.BytesIO(given.encode("utf-8", "replace")))
    try:
        with watched(outcome, allowed, root):
            outcome.code = command(argv)
    finally:
        sys.stdout, sys.stderr, sys.stdin = saved
    outcome.out, outcome.err = out.getvalue(), err.getvalue()
    if outcome.code not in (0, 1, 2, 3, 4, None):
        outcome.broken.append(f"exit code {outcome.code}")
    outcome.broken += output_of(outcome, argv, terminal)
    return outcome


FLAGS = {
    option
    for command in COMMANDS.values()
    for option, value in command.options.items()
    if value is NONE
}
"""Options without a value; a `--json` after any other option is that option's value."""


def wants_json(argv: list[str]) -> bool:
    """Return True if `--json` is given as an option and no other output was requested."""
    places = [i for i, a in enumerate(argv) if a == "--json"]
    other = {"--help", "--version", "--"} & set(argv)
    other |= {"help"} & set(argv[:1])
    return not other and any(argv[i - 1][:1] != "-" or argv[i - 1] in FLAGS for i in places if i)


def output_of(outcome: Outcome, argv: list[str], terminal: bool) -> Iterator[str]:
    """Yield what is wrong with the output of a command."""
    if "out of memory" in outcome.err:
        yield "out of memory"
    if "panicked at" in outcome.err:
        yield "a panic of a library was printed"
    streams, as_json = [("stderr", outcome.err)], wants_json(argv)
    if terminal or as_json:
        streams.append(("stdout", outcome.out))
    for name, text in streams:
        if found := CONTROL.search(OWN.sub("", text)):
            yield f"control character {found[0]!r} on {name}"
    if as_json and outcome.out and outcome.code in (0, 1, 3, 4):
        try:
            json.loads(outcome.out)
        except ValueError:
            yield "--json printed something else"
