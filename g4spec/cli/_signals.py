"""What Ctrl-C and SIGTERM do to a command: it unwinds, in silence."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

NUMBERS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def handled() -> Iterator[None]:
    """Unwind at a signal in this block; end at once at a second one, and after it."""
    for number in NUMBERS:
        signal.signal(number, _asked_to_end)
    sys.unraisablehook = _unraisable
    try:
        yield
    finally:
        _end_at_once()  # nothing is left to clear away


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
