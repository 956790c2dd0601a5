"""Bounds what a hub can do while it is asked: size and time of answers, and headers that become
file names.

huggingface_hub joins `ETag` and `X-Repo-Commit` to paths in its cache, waits as long as
`Retry-After` says, writes down whatever `X-HF-Warning` says, and reads answers without an end. So
each response is checked here, and reduced to the headers of `ALLOWED_HEADERS`, before it sees one.
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
"""For an answer without its file: a listing, or the headers of a file."""
MIN_BYTES_PER_SECOND = 64 << 10
"""Bytes a second below which a download is given up."""
EXTRA_BYTES = 1 << 20
"""Bytes of bodies beside the file: pages of redirects and errors."""

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
"""Headers that move a download to the Xet client, which has bounds of its own."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_ETAG = re.compile(r'(?:W/)?"?([0-9a-f]{40}|[0-9a-f]{64})"?')
_SIZE = re.compile(r"[0-9]{1,20}")


class TransferGuard:
    """Checks all responses of huggingface_hub inside its `with` block.

    Args:
        what: what is asked for, for messages.
        limit: most bytes of the answer. `disk`: whether that is what the disk has room for.
        commit: of the file that is asked for; None for a listing.
        xet: whether the hub may move the download to its Xet storage.

    Attributes:
        digest: of the file, as its headers say: sha256, or git's sha1.

    Raises, out of the calls inside: InputError for an answer that cannot be a hub's,
    EnvironmentProblem for one that takes too long or more room than the disk has.
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

        self._set, self._before = hf.set_client_factory, _http._GLOBAL_CLIENT_FACTORY
        self._set(self._client)  # closes the client there was, so that all connections are seen
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._set(self._before)

    @property
    def expired(self) -> bool:
        return time.monotonic() >= self._deadline

    def timeout_error(self) -> EnvironmentProblem:
        """The error of an answer that does not end."""
        return EnvironmentProblem(
            f"{self.what}: the hub is too slow",
            expected=f"headers within {HEADER_SECONDS:.0f} s, "
            f"{MIN_BYTES_PER_SECOND >> 10} KiB/s or more",
            fix="try again, or download the files by other means",
        )

    def _client(self) -> Any:
        client = self._before()
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
        """Remember sockets: closing them ends a wait for a header that never comes."""
        if event.endswith(("connect_tcp.complete", "start_tls.complete")):
            self._sockets.append(info["return_value"].get_extra_info("socket"))

    def _watch(self) -> None:
        while not self._done.wait(max(0.0, self._deadline - time.monotonic())):
            if self.expired:
                for connection in self._sockets:
                    with suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)
                self._done.wait(0.1)  # those opened meanwhile come next

    # ---- after its headers

    def _response(self, response: Any) -> None:
        headers, method = response.headers, response.request.method
        if self.expired:
            raise self.timeout_error()
        if headers.get("Content-Encoding", "identity") != "identity":
            raise self._bad("compressed, though asked for as it is")
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
        """What the headers of a file say about it: its digest and its size."""
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
            # A download that is cut may begin again.
            self._room = 2 * self.limit + EXTRA_BYTES
            self._deadline = time.monotonic() + HEADER_SECONDS + self.limit / MIN_BYTES_PER_SECOND

    def _check_size(self, said: str) -> int:
        if not _SIZE.fullmatch(said):
            raise self._bad("size", "a number of bytes", f"{said!r:.80}")
        if int(said) <= self.limit:
            return int(said)
        if self.disk:
            raise EnvironmentProblem(
                f"{self.what}: no space left in the hub's cache",
                expected=f"{int(said):,} bytes",
                found=f"{self.limit:,} bytes",
                fix="free some, or set HF_HUB_CACHE",
            )
        raise self._bad("size", f"at most {self.limit:,} bytes", f"{int(said):,}")

    def _count(self, n: int) -> None:
        self._room -= n
        if self._room < 0:
            raise self._bad("more bytes than it said", f"{self.limit:,} at most")

    def _bad(self, what: str, expected: object = None, found: object = None) -> InputError:
        return InputError(
            f"{self.what}: the hub's answer makes no sense: {what}", expected=expected, found=found
        )


def _counted(stream: Any, count: Callable[[int], None]) -> Any:
    """`stream` with `count(bytes)` called before a chunk is given on. Its class is derived from
    that of `stream`, because the transport asks for one of its own."""

    def chunks(_: object) -> Iterator[bytes]:
        for chunk in stream:
            count(len(chunk))
            yield chunk

    methods = {"__init__": lambda _: None, "__iter__": chunks, "close": lambda _: stream.close()}
    return type("Counted", (type(stream),), methods)()
