"""Objects of engines that full garbage collections leave out.

A full collection of what a model consists of takes 0.1 s, a pause of all requests. `gc.freeze` and
`gc.unfreeze` act on all objects of the process, so that the engines in it are counted.
"""

from __future__ import annotations

import gc
import threading


class FrozenObjects:
    """Freezes the objects of the process while an engine needs it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._engines, self._others = 0, False

    def freeze(self) -> None:
        """Freeze all objects for one more engine."""
        with self._lock:
            if not self._engines:
                self._others = gc.get_freeze_count() > 0
            self._engines += 1
            gc.collect()
            gc.freeze()

    def release(self) -> None:
        """Invert one `freeze`. Objects stay frozen for other engines, and if the program had frozen
        its own before the first: `gc.unfreeze` cannot leave these out."""
        with self._lock:
            self._engines -= 1
            if not self._engines and not self._others:
                gc.unfreeze()


FROZEN = FrozenObjects()
"""The objects of this process."""
