"""Messages between the server and the process of an engine: tuples, pickled, over a socket of
their own. Both ends are this program, so what comes is trusted."""

from __future__ import annotations

import pickle
import queue
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

Message = tuple[Any, ...]
"""What it is, and what belongs to it. To an engine's process:

- "load", function, arguments: make the engine.
- "submit", number, prompt (array), Options (pickled): queue a text.
- "cancel", number. "close".

From it:

- "loading", tensors read, tensors in all. "ready", `EngineInfo`. "refused", G4Error: load failed.
- "begun", number: a text has a slot, and its prompt is being read.
- "cycle", number, Cycle, Stats, length, text: `text` follows the first `length` characters.
- "done", number, Stats, notes, error, length, text.
- "figures", `EngineStats`. "lost", text: why the engine cannot go on; the process ends.
"""


class Channel:
    """One end. `send` never waits: a thread writes what has come together since it last did.

    Attributes:
        periodic: makes a message to send with others and every `PERIOD` seconds; None: no message.
    """

    PERIOD = 0.2

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._queue: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self.periodic: Callable[[], Message | None] = lambda: None
        self._write_lock = threading.Lock()
        self._thread = threading.Thread(target=self._write, name="g4spec channel", daemon=True)
        self._thread.start()

    def send(self, *message: Any) -> None:
        """Queue a message; it is lost if the other end is gone."""
        self._queue.put(message)

    def send_now(self, *message: Any) -> None:
        """Write a message before what is queued: it arrives even if this process crashes next."""
        self._send([message])

    def _send(self, batch: list[Message]) -> bool:
        """Write messages; False if the other end is gone."""
        try:
            with self._write_lock:
                self._connection.send_bytes(pickle.dumps(batch))
        except OSError:
            return False
        return True

    def messages(self) -> Iterator[Message]:
        """Yield what comes, until the other end is gone."""
        while True:
            try:
                data = self._connection.recv_bytes()
            except (EOFError, OSError):
                return
            yield from pickle.loads(data)

    def finish(self, timeout: float = 5.0) -> None:
        """Write what was queued, and no more."""
        self._queue.put(None)
        self._thread.join(timeout)

    def close(self) -> None:
        """Close the socket; the other end reads the end of it."""
        self.finish()
        self._connection.close()

    def _write(self) -> None:
        more = True
        while more:
            batch: list[Message] = []
            more = self._collect(batch)
            if (periodic := self.periodic()) is not None:
                batch.append(periodic)
            if batch and not self._send(batch):
                return

    def _collect(self, batch: list[Message]) -> bool:
        """Wait for messages and take all there are; False behind the last one."""
        try:
            message = self._queue.get(timeout=self.PERIOD)
            while message is not None:
                batch.append(message)
                message = self._queue.get_nowait()
        except queue.Empty:
            return True
        return False
