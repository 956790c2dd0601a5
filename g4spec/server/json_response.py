"""JSON output of responses, events and log lines, without raw control characters.

The json module escapes C0 only; DEL and C1 are escaped here, since terminals show output too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from starlette.responses import JSONResponse

_UNSHOWN = re.compile("[\x7f-\x9f]")


def dumps(value: Any, default: Callable[[Any], Any] | None = None) -> str:
    """Return compact JSON; raise ValueError for NaN and infinity.

    Args:
        default: converts values of unsupported types.
    """
    text = json.dumps(
        value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=default
    )
    return _UNSHOWN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class JsonResponse(JSONResponse):
    """A JSON response."""

    def render(self, content: Any) -> bytes:
        """See `starlette.responses.Response`."""
        return dumps(content).encode()
