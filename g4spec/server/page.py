"""The chat page at `/`: one file, with a Content-Security-Policy that blocks all else."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from importlib import resources

from starlette.responses import Response


@functools.cache
def _page() -> tuple[bytes, dict[str, str]]:
    """Return the page and its headers."""
    text = resources.files("g4spec.server").joinpath("page.html").read_text(encoding="utf-8")
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src {_hash(text, 'script')}",
            f"style-src {_hash(text, 'style')}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",  # text can never become markup or a script
            "trusted-types 'none'",
        ]
    )
    return text.encode(), {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
        "cross-origin-opener-policy": "same-origin",
    }


def _hash(text: str, tag: str) -> str:
    """Return the CSP hash expression of the single <tag> element."""
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def response() -> Response:
    """Return the response with the page."""
    text, headers = _page()
    return Response(text, media_type="text/html", headers=headers)
