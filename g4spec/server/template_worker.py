"""Main loop of the process that `templates.Renderer` starts."""

from __future__ import annotations

import json
import sys

from g4spec.runtime.template import limit_memory, render_job


def work() -> None:
    """Read one JSON job per line of stdin; write one JSON result per line to stdout."""
    limit_memory()
    sys.stdout.writelines(["ready\n"])
    sys.stdout.flush()
    for line in sys.stdin:
        sys.stdout.writelines([json.dumps(render_job(json.loads(line))), "\n"])
        sys.stdout.flush()
