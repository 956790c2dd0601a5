"""Starts engine processes as copies of one that has imported torch, which takes each start 3 s."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from multiprocessing.connection import Connection
from typing import Any

from g4spec.server import engine_process
from g4spec.server.channel import Channel

_CONTEXT = multiprocessing.get_context("forkserver")


class Process:
    """Stand in for a `subprocess.Popen`."""

    def __init__(self, process: Any) -> None:
        self._process, self.pid = process, process.pid

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> int:
        self._process.join()
        code: int = self._process.exitcode
        return code


def _work(connection: Connection) -> None:
    """Do in the copy what `engine_process.main` does, but for the end with its parent."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os._exit(engine_process.Worker(connection).run())


def start_process() -> tuple[Process, Channel]:
    """Start a copy; see `engine_process.start_process`."""
    _CONTEXT.set_forkserver_preload([__name__, "tests.server.faulty_engines"])
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connection = Connection(theirs.detach())
        process = _CONTEXT.Process(target=_work, args=(connection,), daemon=True)
        process.start()
        connection.close()
        return Process(process), Channel(Connection(ours.detach()))
