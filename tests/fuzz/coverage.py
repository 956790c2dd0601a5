"""Line coverage of g4spec, cheap enough to trace every case of a long run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

TIRED, RESTED = 40, 32
"""Calls of a function without a new line after which only every 32nd call is traced."""


class Lines:
    """Lines of g4spec that ran in this thread. `len` grows if a case reaches new lines, which are
    in `fresh`.

    Args:
        tired: see TIRED; infinite traces every call.
    """

    def __init__(self, tired: float = TIRED) -> None:
        self._tired = tired
        self._seen: dict[CodeType, set[int]] = {}
        self._idle: dict[CodeType, int] = {}
        self.fresh: list[str] = []
        self.count = 0

    def __len__(self) -> int:
        return self.count

    @contextmanager
    def watch(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(before)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        idle = self._idle.get(code)
        if idle is None:
            if "/g4spec/" not in code.co_filename:
                self._idle[code] = -1
                return None
            idle, self._seen[code] = 0, set()
        if idle < 0:
            return None
        self._idle[code] = idle + 1
        if idle > self._tired and idle % RESTED:
            return None
        seen = self._seen[code]

        def line(frame: FrameType, event: str, arg: Any) -> Any:
            if frame.f_lineno not in seen:
                seen.add(frame.f_lineno)
                self.count += 1
                self.fresh.append(f"{code.co_filename.rsplit('/g4spec/')[-1]}:{frame.f_lineno}")
                self._idle[code] = 0
            return line

        return line
