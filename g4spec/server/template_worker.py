"""Main loop of the process that `templates.Renderer` starts."""

from __future__ import annotations

import json
import sys

from g4spec.errors import InputError
from g4spec.runtime.template import MEMORY_LIMIT, render_in_process


def work() -> None:
    """Read one JSON job per line of stdin; write one JSON result per line to stdout."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_LIMIT, MEMORY_LIMIT))
    except (ImportError, ValueError, OSError):
        pass  # not supported by this system
    sys.stdout.writelines(["ready\n"])
    sys.stdout.flush()
    for line in sys.stdin:
        job = json.loads(line)
        try:
            answer = {"text": render_in_process(job.pop("template"), **job)}
        except (InputError, MemoryError) as error:
            answer = {"error": getattr(error, "found", None) or "it uses too much memory"}
        sys.stdout.writelines([json.dumps(answer), "\n"])
        sys.stdout.flush()
