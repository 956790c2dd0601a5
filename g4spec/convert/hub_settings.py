"""Checks the environment variables that huggingface_hub and its transport read.

A malformed value otherwise ends in an exception of a library, or in an error that blames the hub.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from g4spec.errors import UsageError
from g4spec.ranges import is_header_text

HOME = "https://huggingface.co"
FOLDERS = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")
SECONDS = ("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT")
PROXY_SCHEMES = ("http", "https", "socks5", "socks5h")


def endpoint() -> str:
    """Return the base URL of the hub, without a slash at its end."""
    return os.environ.get("HF_ENDPOINT", HOME).rstrip("/")


def check_settings() -> None:
    """Raise UsageError, with the name of the variable, for a value that cannot work."""
    if "HF_ENDPOINT" in os.environ:
        _check_url("HF_ENDPOINT", os.environ["HF_ENDPOINT"], ("http", "https"))
    for scheme, url in getproxies().items():
        if scheme in ("http", "https", "all"):
            address = url if "://" in url else f"http://{url}"
            _check_url(f"{scheme}_proxy".upper(), address, PROXY_SCHEMES)
    for name in SECONDS:
        if not re.fullmatch(r"\s*0*[1-9][0-9]*\s*", value := os.environ.get(name, "10")):
            raise _malformed(name, "a whole number of seconds, 1 or more", repr(value))
    for name in FOLDERS:
        if value := os.environ.get(name, ""):
            _check_folder(name, Path(os.path.expandvars(value)).expanduser())
    if (path := os.environ.get("SSL_CERT_FILE")) and not os.path.isfile(path):
        raise _malformed("SSL_CERT_FILE", "a file of certificates", path)
    # huggingface_hub removes line breaks at any position of a token.
    token = re.sub(r"[\r\n]", "", os.environ.get("HF_TOKEN", "")).strip()
    if not is_header_text(token):
        raise _malformed("HF_TOKEN", "printable ASCII", "other characters")


def _check_url(name: str, url: str, schemes: tuple[str, ...]) -> None:
    try:
        parts = urlsplit(url)
        valid = parts.scheme in schemes and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid or " " in url or not url.isprintable():
        raise _malformed(name, f"an address such as {schemes[0]}s://HOST", repr(url))


def _check_folder(name: str, folder: Path) -> None:
    existing = next((p for p in (folder, *folder.parents) if os.path.lexists(p)), folder)
    if not existing.is_dir():
        raise _malformed(name, "a folder, which may be new", f"the file {existing}")


def _malformed(name: str, expected: str, found: str) -> UsageError:
    return UsageError(
        f"the environment variable {name}",
        expected=expected,
        found=found,
        fix="correct or unset it",
    )
