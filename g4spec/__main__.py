"""Entry point of `g4spec` and of `python -m g4spec`."""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command line.

    Ctrl-C during the imports ends the process silently: there is nothing to clean up yet.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    from g4spec import cli
    from g4spec.cli import _threads

    _threads.use_passive_wait()
    cli.main()


if __name__ == "__main__":
    main()
