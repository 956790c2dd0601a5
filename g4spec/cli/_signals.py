"""What signals do to a command: at Ctrl-C and SIGTERM it unwinds, in silence; a file that is cut
while it is mapped (SIGBUS) is bad input."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from g4spec.cli import render
from g4spec.errors import InputError

NUMBERS = (signal.SIGINT, signal.SIGTERM)
_TOLD = threading.Lock()


@contextmanager
def handled() -> Iterator[None]:
    """Unwind at a signal in this block; end at once at a second one, and after it."""
    for number in NUMBERS:
        signal.signal(number, _asked_to_end)
    sys.unraisablehook = _unraisable
    if hasattr(signal, "SIGBUS"):
        ctypes.CDLL(None).signal(signal.SIGBUS, _CUT)
    try:
        yield
    finally:
        _end_at_once()  # nothing is left to clear away


def _cut(number: int) -> None:
    """Say that a mapped file lost its pages, and end the process at once.

    The C library calls this from the instruction that read the page. Python's own handlers run
    between instructions of Python, of which there is no next one: the read would be tried for ever.
    """
    if not _TOLD.acquire(blocking=False):
        time.sleep(60)  # another thread says it
    error = InputError(
        "a file became shorter while it was read",
        found="SIGBUS",
        fix="run the command again when nothing writes to its files",
    )
    try:
        if os.isatty(2):
            os.write(2, b"\n\x1b[?25h")  # behind a text, or a progress bar that hid the cursor
        render.error(str(error), error.exit_code, json="--json" in sys.argv)
    finally:
        os._exit(error.exit_code)


_CUT = ctypes.CFUNCTYPE(None, ctypes.c_int)(_cut)


def _asked_to_end(number: int, frame: object) -> NoReturn:
    """Unwind, so that half-written files are removed. Asked again, end at once and in silence:
    what is left then, the next run removes."""
    _end_at_once()
    if number == signal.SIGTERM:
        sys.exit(128 + number)
    raise KeyboardInterrupt


def _end_at_once() -> None:
    """Let the next signal end the process, in silence."""
    for number in NUMBERS:
        signal.signal(number, signal.SIG_DFL)


def _unraisable(what: sys.UnraisableHookArgs) -> None:
    """End in silence where a signal met code that can raise nothing (`__del__`, callbacks); two
    signals at once are one. Anything else is told as ever."""
    if isinstance(what.exc_value, (KeyboardInterrupt, SystemExit)):
        asked = isinstance(what.exc_value, KeyboardInterrupt)
        os.kill(os.getpid(), signal.SIGINT if asked else signal.SIGTERM)
    elif "ignored due to race condition" not in str(what.exc_value):
        sys.__unraisablehook__(what)
