"""Signal handling: Ctrl-C, SIGTERM and the end of the terminal (SIGHUP) unwind a command, silently
unless it is `noted`. SIGBUS, of a file truncated while it is mapped, is reported as bad input.
"""

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

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_received: list[int] = []
"""The signal that is unwinding the command, if any."""
_REPORTED = threading.Lock()


@contextmanager
def handled() -> Iterator[None]:
    """Raise an exception at the first signal in this block; later ones end the process at once.

    An extension module may replace that exception by one of its own (a signal in a callback from
    Rust became a TypeError); it is replaced back.
    """
    _received.clear()
    for number in _caught():
        signal.signal(number, _unwind)
    sys.unraisablehook = _unraisable
    if hasattr(signal, "SIGBUS"):
        ctypes.CDLL(None).signal(signal.SIGBUS, _BUS_HANDLER)
    try:
        yield
    except Exception:
        if received():
            _raise(_received[0])
        raise
    finally:
        _end_at_once()  # nothing is left to clean up


def received() -> bool:
    """Return whether a signal is unwinding the command."""
    return bool(_received)


@contextmanager
def repeated() -> Iterator[None]:
    """Unwind again, once a second and at the end of the block, if an extension module discarded the
    exception of a signal. Only for code that does not catch that exception itself."""
    before = signal.signal(signal.SIGALRM, _unwind_again)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    if received():
        _raise(_received[0])


@contextmanager
def noted(out: render.Output, left: str) -> Iterator[None]:
    """Say what is left if Ctrl-C ends the command in this block: "nothing was measured"."""
    try:
        yield
    except KeyboardInterrupt:
        out.note(f"interrupted: {left}")
        raise


def _truncated(number: int) -> None:
    """Report that a mapped file lost its pages, and end the process at once.

    The C library calls this from the instruction that read the page. A Python handler would run
    only after that instruction, which would be retried for ever.
    """
    if not _REPORTED.acquire(blocking=False):
        time.sleep(60)  # another thread is reporting it
    error = InputError(
        "a file became shorter while it was read",
        found="SIGBUS",
        fix="run the command again when no other program writes to its files",
    )
    try:
        if os.isatty(2):
            os.write(2, b"\n\x1b[?25h")  # after text, or after a progress bar that hid the cursor
        render.error(str(error), error.exit_code, json="--json" in sys.argv)
    finally:
        os._exit(error.exit_code)


_BUS_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)(_truncated)


def _unwind(number: int, frame: object) -> NoReturn:
    """Unwind, so that incomplete files are removed.

    A second signal ends the process at once; the next run removes what is left.
    """
    _end_at_once()
    _received.append(number)
    if signal.getsignal(signal.SIGALRM) is _unwind_again:
        signal.setitimer(signal.ITIMER_REAL, 1, 1)
    _raise(number)


def _unwind_again(number: int, frame: object) -> None:
    """Raise the exception again, or give the signal to a server that has replaced the handlers."""
    if sys.exc_info()[1] is None:  # otherwise the command is unwinding
        if signal.getsignal(_received[0]) is signal.SIG_DFL:
            _raise(_received[0])
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.raise_signal(_received[0])


def _raise(number: int) -> NoReturn:
    if number != signal.SIGINT:
        raise SystemExit(128 + number) from None
    raise KeyboardInterrupt from None


def _end_at_once() -> None:
    """Let the next signal end the process silently."""
    for number in _caught():
        signal.signal(number, signal.SIG_DFL)


def _caught() -> list[signal.Signals]:
    """Return the signals that unwind: all, but not SIGHUP under `nohup`, which ignores it."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [n for n in NUMBERS if n != signal.SIGHUP or not ignored]


def _unraisable(event: sys.UnraisableHookArgs) -> None:
    """End silently if a signal arrived in code that cannot raise (`__del__`, callbacks).

    Two simultaneous signals count as one. All other exceptions are reported as usual.
    """
    if isinstance(event.exc_value, (KeyboardInterrupt, SystemExit)):
        ctrl_c = isinstance(event.exc_value, KeyboardInterrupt)
        os.kill(os.getpid(), signal.SIGINT if ctrl_c else signal.SIGTERM)
    elif "ignored due to race condition" not in str(event.exc_value):
        sys.__unraisablehook__(event)
