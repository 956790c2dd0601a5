"""Keyboard input of a conversation: messages and Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from g4spec.cli.render import Output

HELP = """/regen          answer the last message again
/system TEXT    set the system message; without TEXT, remove it
/clear          start a new conversation
/help           show this list
/exit           quit (or Ctrl-D)
\"\"\"             begin and end a message of several lines
Ctrl-C          stop the answer; at the prompt, quit"""

BLOCK = '"""'


def read_message(out: Output) -> tuple[str, bool] | None:
    """Read a message; return it and whether it is a command, or None at the end of input.

    A message between \"\"\" is no command, whatever it begins with.
    """
    try:
        text = out.read_line("> ")
        if not text.startswith(BLOCK):
            return text, text.startswith("/")
        lines = [text.removeprefix(BLOCK)]
        with suppress(EOFError):  # the end of the input ends the block
            while not lines[-1].endswith(BLOCK):
                lines.append(out.read_line("... "))
        return "\n".join(lines).removesuffix(BLOCK).strip("\n"), False
    except EOFError:
        return None


@contextmanager
def ctrl_c_cancels(loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any]) -> Iterator[None]:
    """Make Ctrl-C cancel `task` inside this block."""
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, lambda *_: loop.call_soon_threadsafe(task.cancel))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
