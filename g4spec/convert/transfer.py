"""Limits on what a hub server can do: size and duration of responses, and headers used in paths.

huggingface_hub uses `ETag` and `X-Repo-Commit` in paths of its cache, waits as long as
`Retry-After` says, prints `X-HF-Warning`, and reads responses without a limit. So each response is
checked here and reduced to ALLOWED_HEADERS before huggingface_hub sees it.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from g4spec.errors import EnvironmentProblem, InputError

HEADER_SECONDS = 120.0
"""Time limit in seconds for a listing or for the headers of a file."""
MIN_BYTES_PER_SECOND = 64 << 10
"""Minimum average speed of a download; a slower one is aborted."""
EXTRA_BYTES = 1 << 20
"""Allowance in bytes for bodies of redirects and errors, in addition to the file."""

ALLOWED_HEADERS = {
    "accept-ranges",
    "content-length",
    "content-range",
    "content-type",
    "etag",
    "location",
    "transfer-encoding",
    "x-error-code",
    "x-error-message",
    "x-linked-etag",
    "x-linked-size",
    "x-repo-commit",
}
XET_HEADERS = {"link", "x-xet-hash", "x-xet-refresh-route"}
"""Headers that redirect a download to the Xet client."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_ETAG = re.compile(r'(?:W/)?"?([0-9a-f]{40}|[0-9a-f]{64})"?')
_SIZE = re.compile(r"[0-9]{1,20}")


class TransferGuard:
    """Context manager that checks all responses of huggingface_hub inside its `with` block.

    Args:
        what: description of the request for messages.
        limit: maximum size of the response in bytes.
        disk: the limit is the free disk space.
        commit: commit of the requested file; None for a listing.
        xet: allow the hub to redirect the download to its Xet storage.

    Attributes:
        digest: sha256 or git sha1 of the file according to its headers.

    Calls inside the block raise InputError for an invalid response, EnvironmentProblem for one
    that takes too long or does not fit on the disk.
    """

    def __init__(
        self,
        what: str,
        limit: int,
        *,
        disk: bool = False,
        commit: str | None = None,
        xet: bool = False,
    ) -> None:
        self.what, self.limit, self.disk, self.commit = what, limit, disk, commit
        self._kept = ALLOWED_HEADERS | XET_HEADERS if xet else ALLOWED_HEADERS
        self.digest: str | None = None
        self._deadline = time.monotonic() + HEADER_SECONDS
        self._room = limit + EXTRA_BYTES
        self._sockets: list[socket.socket] = []
        self._done = threading.Event()

    def __enter__(self) -> TransferGuard:
        import huggingface_hub as hf
        from huggingface_hub.utils import _http

        self._set_factory, self._old_factory = hf.set_client_factory, _http._GLOBAL_CLIENT_FACTORY
        self._set_factory(self._client)  # closes the old client, so that every connection is traced
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._set_factory(self._old_factory)

    @property
    def expired(self) -> bool:
        return time.monotonic() >= self._deadline

    def timeout_error(self) -> EnvironmentProblem:
        """Return the error for a response that exceeds its time limit."""
        return EnvironmentProblem(
            f"{self.what}: the hub is too slow",
            expected=f"headers within {HEADER_SECONDS:.0f} s, "
            f"{MIN_BYTES_PER_SECOND >> 10} KiB/s or more",
            fix="try again, or download the files by other means",
        )

    def _client(self) -> Any:
        client = self._old_factory()
        hooks = client.event_hooks
        client.event_hooks = {
            "request": [*hooks["request"], self._request],
            "response": [self._response, *hooks["response"]],
        }
        return client

    # ---- before a request

    def _request(self, request: Any) -> None:
        if self.expired:
            raise self.timeout_error()
        request.headers["Accept-Encoding"] = "identity"  # 1 MB of gzip may hold 1 GB
        request.extensions["trace"] = self._trace

    def _trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Collect sockets; shutting them down ends a blocked read."""
        if event.endswith(("connect_tcp.complete", "start_tls.complete")):
            self._sockets.append(info["return_value"].get_extra_info("socket"))

    def _watch(self) -> None:
        while not self._done.wait(max(0.0, self._deadline - time.monotonic())):
            if self.expired:
                for connection in self._sockets:
                    with suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)
                self._done.wait(0.1)  # then again, for sockets opened meanwhile

    # ---- after its headers

    def _response(self, response: Any) -> None:
        headers, method = response.headers, response.request.method
        if self.expired:
            raise self.timeout_error()
        if headers.get("Content-Encoding", "identity") != "identity":
            raise self._bad("compressed, although not requested")
        commit = headers.get("X-Repo-Commit")
        if commit is not None and not (_COMMIT.fullmatch(commit) and self.commit in (None, commit)):
            raise self._bad("X-Repo-Commit", self.commit or "a commit", f"{commit!r:.80}")
        if response.is_redirect:
            self._check_redirect(response.request.url.scheme, headers)
        if method == "HEAD" and response.status_code < 400:
            self._metadata(headers, response.is_redirect)
        elif method == "GET":
            self._check_size(headers.get("Content-Length", "0"))
        for name in set(headers) - self._kept:
            del headers[name]
        response.stream = _counted(response.stream, self._count)

    def _check_redirect(self, scheme: str, headers: Mapping[str, str]) -> None:
        if scheme == "https" and headers.get("Location", "").lower().startswith("http:"):
            raise self._bad("redirects to a connection without encryption")

    def _metadata(self, headers: Any, redirect: bool) -> None:
        """Read digest and size of a file from the headers of a HEAD request."""
        linked = headers.get("X-Linked-ETag")
        tag = linked if linked is not None else headers.get("ETag")
        found = _ETAG.fullmatch(tag or "")
        if found:
            self.digest = found[1]
        else:
            if not redirect or linked is not None:
                raise self._bad("ETag", "a sha1 or sha256 in hex", f"{tag!r:.80}")
            headers.pop("ETag", None)
        size = headers.get("X-Linked-Size")
        if size is None and not redirect:
            size = headers.get("Content-Length")
        if size is not None:
            self.limit = self._check_size(size)
            # An interrupted download may start again.
            self._room = 2 * self.limit + EXTRA_BYTES
            self._deadline = time.monotonic() + HEADER_SECONDS + self.limit / MIN_BYTES_PER_SECOND

    def _check_size(self, size: str) -> int:
        if not _SIZE.fullmatch(size):
            raise self._bad("size", "a number of bytes", f"{size!r:.80}")
        if int(size) <= self.limit:
            return int(size)
        if self.disk:
            raise EnvironmentProblem(
                f"{self.what}: no space left in the hub's cache",
                expected=f"{int(size):,} bytes",
                found=f"{self.limit:,} bytes",
                fix="free disk space, or set HF_HUB_CACHE",
            )
        raise self._bad("size", f"at most {self.limit:,} bytes", f"{int(size):,}")

    def _count(self, n: int) -> None:
        self._room -= n
        if self._room < 0:
            raise self._bad("more bytes than announced", f"{self.limit:,} at most")

    def _bad(self, what: str, expected: object = None, found: object = None) -> InputError:
        return InputError(
            f"{self.what}: invalid answer of the hub: {what}", expected=expected, found=found
        )


def _counted(stream: Any, count: Callable[[int], None]) -> Any:
    """Wrap a response stream to call `count(n_bytes)` before each chunk. The wrapper is a subclass
    of the stream's class, because the transport checks the type."""

    def chunks(_: object) -> Iterator[bytes]:
        for chunk in stream:
            count(len(chunk))
            yield chunk

    methods = {"__init__": lambda _: None, "__iter__": chunks, "close": lambda _: stream.close()}
    return type("Counted", (type(stream),), methods)()
