"""Entry point of `g4spec` and of `python -m g4spec`."""

from __future__ import annotations

import atexit
import gc
import signal

YOUNG_OBJECTS = 20_000
"""New objects between two garbage collections: by default importing torch takes hundreds of them, a
third of its time with the last one, as the process ends."""


def main() -> None:
    """Run the command line.

    Ctrl-C during the imports ends the process silently: there is nothing to clean up yet.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    gc.set_threshold(YOUNG_OBJECTS)
    atexit.register(gc.freeze)
    from g4spec import cli
    from g4spec.cli import _threads

    _threads.use_passive_wait()
    cli.main()


if __name__ == "__main__":
    main()
