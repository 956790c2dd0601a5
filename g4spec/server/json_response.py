"""JSON that goes out: answers, events and log lines, without a raw control character.

Clients parse it, and people read it in a terminal: DEL and C1 are escaped as JSON escapes the other
ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from starlette.responses import JSONResponse

_UNSHOWN = re.compile("[\x7f-\x9f]")


def dumps(value: Any, default: Callable[[Any], Any] | None = None) -> str:
    """Write compact JSON. ValueError for numbers that JSON has not; `default` makes something of
    what it does not know."""
    text = json.dumps(
        value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=default
    )
    return _UNSHOWN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class JsonResponse(JSONResponse):
    """A response of JSON."""

    def render(self, content: Any) -> bytes:
        """See `starlette.responses.Response`."""
        return dumps(content).encode()
