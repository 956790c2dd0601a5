"""Render chat templates in the process that `templates.Renderer` starts."""

from __future__ import annotations

import json
import sys

from g4spec.errors import InputError
from g4spec.runtime.template import MEMORY, expand


def work() -> None:
    """Render a text for each line of stdin, a job as JSON, and answer with a line of JSON."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    except (ImportError, ValueError, OSError):
        pass  # a system without such limits
    sys.stdout.writelines(["ready\n"])
    sys.stdout.flush()
    for line in sys.stdin:
        job = json.loads(line)
        try:
            answer = {"text": expand(job.pop("template"), **job)}
        except (InputError, MemoryError) as error:
            answer = {"error": getattr(error, "found", None) or "it uses too much memory"}
        sys.stdout.writelines([json.dumps(answer), "\n"])
        sys.stdout.flush()
