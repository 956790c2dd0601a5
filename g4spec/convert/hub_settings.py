"""Checks the environment variables that huggingface_hub and its transport read, and its token.

A malformed value otherwise ends in an exception of a library, or in an error that blames the hub.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from g4spec.errors import EnvironmentProblem, UsageError

HOME = "https://huggingface.co"
FOLDERS = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")
SECONDS = ("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT")
TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
TOKEN_FORM = "a token of printable ASCII"
TOKEN_FIX = "write the token again with `hf auth login`, or remove the file"
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


def check_token(file: Path) -> None:
    """Raise UsageError, without the token, if no request can contain the hub's token.

    huggingface_hub sends the first of the environment's variables and `file` that is not empty. It
    removes line breaks at any position, so that two lines become a token that does not exist.

    Raises EnvironmentProblem if `file` cannot be read.
    """
    for name in TOKENS:
        token = os.environ.get(name, "").strip()
        if fault := _token_fault(token):
            raise _malformed(name, TOKEN_FORM, fault)
        if token:
            return
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return
    except OSError as problem:
        raise EnvironmentProblem(
            f"{file}, the token file of the hub, cannot be read: {problem.strerror}",
            fix=TOKEN_FIX,
        ) from problem
    if fault := _token_fault(content.decode(errors="replace").strip()):
        raise UsageError(
            f"{file}, the token file of the hub", expected=TOKEN_FORM, found=fault, fix=TOKEN_FIX
        )


def _token_fault(token: str) -> str:
    """Return what a token contains that it must not, or ""."""
    wrong = re.search(r"[^!-~]", token)
    if wrong is None:
        return ""
    if wrong[0] in "\r\n":
        return "a line break in it"
    return "a space in it" if wrong[0] in " \t" else "other characters"


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
