"""A conversation in the terminal: reads messages and streams answers."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from contextlib import aclosing
from typing import TYPE_CHECKING

from g4spec.cli import render
from g4spec.cli._chat_input import HELP, ctrl_c_cancels, read_message
from g4spec.cli._text_stream import LEGEND, answer_stats_line
from g4spec.cli.render import Output
from g4spec.errors import G4Error

if TYPE_CHECKING:
    from g4spec.server.chat_client import ChatBackend, Reply, TextPiece

STYLES = {"accepted": "good", "rejected": "struck"}


class Conversation:
    """A conversation that reads messages and prints answers until end of input or /exit.

    Args:
        seed: random seed of the first answer, plus 1 (modulo 2^64) per answer. None: random ones.
        show: mark accepted and rejected draft tokens.

    Attributes:
        exit_code: that of the last answer that failed; 0 if none did.
    """

    def __init__(
        self, backend: ChatBackend, out: Output, *, system: str | None, seed: int | None, show: bool
    ) -> None:
        self._backend, self._out, self._system, self._seed = backend, out, system, seed
        self._messages: list[dict[str, str]] = []
        self._part, self._noted = "", set[str]()  # remarks that were shown
        self._failed = False  # the last message has no answer because of an error
        self.exit_code = 0
        if show:
            out.legend(LEGEND)

    def run(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run the conversation; answers are generated in `loop`."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (enables line editing)
        while (message := read_message(self._out)) is not None:
            text, is_command = message
            if is_command:
                name, _, argument = text[1:].strip().partition(" ")
                if not self._command(name, argument):
                    return
                if name != "regen" or not self._messages:
                    continue
            elif text.strip():
                if self._failed:
                    self._messages.pop()
                self._messages.append({"role": "user", "content": text})
            else:
                continue
            self._reply(loop)

    def _command(self, name: str, argument: str) -> bool:
        """Run a command such as /clear; return False to end the conversation."""
        if name == "clear":
            self._messages.clear()
            self._failed = False
        elif name == "system":
            self._system = argument.strip() or None
        elif name == "regen":
            while self._messages and self._messages[-1]["role"] == "assistant":
                self._messages.pop()
            if not self._messages:
                self._out.log("no message to answer yet")
        elif name != "exit":
            self._out.log(
                HELP if name == "help" else f"unknown command /{name}; /help lists all commands"
            )
        return name != "exit"

    def _reply(self, loop: asyncio.AbstractEventLoop) -> None:
        from g4spec.server.chat_client import Reply

        answer, self._failed = Reply(), False
        task = loop.create_task(self._stream_answer(answer))
        with ctrl_c_cancels(loop, task):
            try:
                loop.run_until_complete(task)
            except asyncio.CancelledError:
                answer.finish = "Ctrl-C"
            except G4Error as error:  # /regen tries again; the next message replaces this one
                self._failed = True
                self._out.stream("\n" if self._part else "")
                self.exit_code = render.error(str(error), error.exit_code)
                return
        if answer.content:
            self._messages.append({"role": "assistant", "content": answer.content})
        self._out.stream("\n")
        news = [note for note in answer.notes if note not in self._noted]
        self._noted.update(news)
        for note in [*news, answer_stats_line(answer)]:
            self._out.log(note)

    async def _stream_answer(self, answer: Reply) -> None:
        messages = [{"role": "system", "content": self._system}] if self._system else []
        messages += self._messages
        seed = secrets.randbits(63) if self._seed is None else self._seed
        self._seed = None if self._seed is None else (self._seed + 1) % 2**64
        self._part = ""
        async with aclosing(self._backend.answer(messages, seed, answer)) as pieces:
            async for piece in pieces:
                self._write(piece)

    def _write(self, piece: TextPiece) -> None:
        if piece.part == "mark":
            return
        if self._part == "thought" and piece.part == "text":
            self._out.stream_dim("\n\n")
        self._part = piece.part
        style = STYLES.get(piece.kind)
        if style is not None:
            self._out.stream_marked(piece.text, style)
        elif piece.part == "thought":
            self._out.stream_dim(piece.text)
        else:
            self._out.stream(piece.text)
