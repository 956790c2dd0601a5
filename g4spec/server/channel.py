"""Messages between the server and an engine's process: pickled tuples over a private socket pair.

Both ends are this program, so received data is trusted.
"""

from __future__ import annotations

import pickle
import queue
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

Message = tuple[Any, ...]
"""Name and arguments. Sent to an engine's process:

- "load", function, arguments: create the engine.
- "submit", number, prompt (array), Options (pickled): queue a request.
- "cancel", number. "close".

Sent by it:

- "loading", tensors read, total tensors. "ready", `EngineInfo`. "refused", G4Error: load failed.
- "begun", number, stats: the request has a slot, and its prefill has begun.
- "cycle", number, Cycle, Stats, length, text: `text` replaces what follows
  the first `length` characters.
- "done", number, Stats, notes, error, length, text.
- "figures", `EngineStats`. "lost", text: the engine failed; the process ends.
"""


class Channel:
    """One end of the connection. `send` never blocks: a thread writes queued messages in batches.

    Attributes:
        periodic: returns a message to add to each batch and to send every `PERIOD` seconds, or
            None for no message.
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
        """Queue a message; it is dropped if the other end is closed."""
        self._queue.put(message)

    def send_now(self, *message: Any) -> None:
        """Write a message now, ahead of the queue, so that it survives a crash of this process."""
        self._send([message])

    def _send(self, batch: list[Message]) -> bool:
        """Write messages; return False if the other end is closed."""
        try:
            with self._write_lock:
                self._connection.send_bytes(pickle.dumps(batch))
        except OSError:
            return False
        return True

    def messages(self) -> Iterator[Message]:
        """Yield received messages until the other end is closed."""
        while True:
            try:
                data = self._connection.recv_bytes()
            except (EOFError, OSError):
                return
            yield from pickle.loads(data)

    def finish(self, timeout: float = 5.0) -> None:
        """Write all queued messages, then stop the thread."""
        self._queue.put(None)
        self._thread.join(timeout)

    def close(self) -> None:
        """Write all queued messages and close the socket."""
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
        """Wait for messages and move all of them to `batch`; return False after the last one."""
        try:
            message = self._queue.get(timeout=self.PERIOD)
            while message is not None:
                batch.append(message)
                message = self._queue.get_nowait()
        except queue.Empty:
            return True
        return False
