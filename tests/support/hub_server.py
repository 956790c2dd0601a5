"""A Hugging Face hub on loopback: the requests that a download makes, with faults on demand."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SHA = "0123456789abcdef0123456789abcdef01234567"
LARGE = 1 << 10
"""Size in bytes from which a file's ETag is its sha256; smaller files have git's sha1."""


def etag(data: bytes) -> str:
    if len(data) >= LARGE:
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class Hub:
    """A hub with repositories and planned faults.

    Attributes:
        repos: "org/name" -> file name -> content.
        faults: substring of "METHOD path" -> faults for the next requests that match, in order. A
            fault is called with the handler and returns True if it has sent the response.
        token: token that requests for gated repositories must send.
        seen: "METHOD path range" of every request.
        encodings: the Accept-Encoding header of every request.
        listing: changes the response to "list the files of this repository".
    """

    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    faults: dict[str, list[Callable[[Any], bool]]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    token: str = "hf_good"
    seen: list[str] = field(default_factory=list)
    encodings: list[str] = field(default_factory=list)
    listing: Callable[[dict[str, Any]], Any] = lambda answer: answer
    wrong_etag: set[str] = field(default_factory=set)

    def __enter__(self) -> Hub:
        handler = type("Handler", (_Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def downloads(self) -> list[str]:
        """Return the names of the files whose content was requested."""
        return [
            s.split()[1].split("/resolve/")[1].split("/", 1)[1]
            for s in self.seen
            if s.startswith("GET") and "/resolve/" in s
        ]


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        line = f"{self.command} {self.path} {self.headers.get('Range', '')}".strip()
        self.hub.seen.append(line)
        self.hub.encodings.append(self.headers.get("Accept-Encoding", ""))
        for part, faults in self.hub.faults.items():
            if part in line and faults and faults.pop(0)(self):
                return
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self._list("/".join(parts[2:4]), parts[5:] and parts[5])
        elif len(parts) > 4 and parts[2] == "resolve":
            self._file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            self.send(404, b"", {"X-Error-Code": "RepoNotFound"})

    def _refused(self, repo: str) -> bool:
        if repo not in self.hub.repos:
            self.send(401, b"Invalid username or password.", {"X-Error-Code": "RepoNotFound"})
            return True
        if repo in self.hub.gated:
            good = self.headers.get("Authorization") == f"Bearer {self.hub.token}"
            if not good:
                self.send(
                    401 if "Authorization" not in self.headers else 403,
                    b"gated",
                    {"X-Error-Code": "GatedRepo"},
                )
                return True
        return False

    def _list(self, repo: str, revision: str | list[str]) -> None:
        if self._refused(repo):
            return
        if revision and revision not in ("main", SHA, "v1"):
            self.send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            return
        files: list[dict[str, Any]] = [{"rfilename": name} for name in self.hub.repos[repo]]
        if "blobs=" in self.path:
            for file in files:
                file["size"] = len(self.hub.repos[repo][file["rfilename"]])
        answer = {
            "_id": "1",
            "id": repo,
            "modelId": repo,
            "sha": SHA,
            "private": False,
            "downloads": 0,
            "likes": 0,
            "tags": [],
            "siblings": files,
        }
        got = self.hub.listing(answer)
        body = got if isinstance(got, bytes) else json.dumps(got).encode()
        self.send(200, body, {"Content-Type": "application/json"})

    def _file(self, repo: str, revision: str, name: str) -> None:
        if self._refused(repo):
            return
        data = self.hub.repos[repo].get(name)
        if data is None or revision != SHA:
            self.send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": SHA})
            return
        tag = etag(b"other" if name in self.hub.wrong_etag else data)
        if name in self.hub.wrong_etag:
            tag = hashlib.sha256(b"other").hexdigest()
        headers = {"ETag": f'"{tag}"', "X-Repo-Commit": SHA, "Accept-Ranges": "bytes"}
        asked = self.headers.get("Range")
        if asked and self.command == "GET":
            start = int(asked.removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            self.send(206, data[start:], headers)
        else:
            self.send(200, data, headers)

    def send(self, status: int, body: bytes, headers: dict[str, str], length: int = -1) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body) if length < 0 else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def status(code: int, **headers: str) -> Callable[[Any], bool]:
    """Return a fault: a response with this status code and no body."""

    def fault(handler: Any) -> bool:
        handler.send(code, b"", {k.replace("_", "-"): v for k, v in headers.items()})
        return True

    return fault


def truncated(data: bytes, count: int) -> Callable[[Any], bool]:
    """Return a fault: all headers, then only `count` bytes, then the connection closes."""

    def fault(handler: Any) -> bool:
        tag = {"ETag": f'"{etag(data)}"', "X-Repo-Commit": SHA}
        handler.send(200, data[:count], tag, length=len(data))
        handler.close_connection = True
        return True

    return fault


def hang(seconds: float) -> Callable[[Any], bool]:
    """Return a fault: no response for some seconds, then the connection closes."""

    def fault(handler: Any) -> bool:
        time.sleep(seconds)
        handler.close_connection = True
        return True

    return fault


def redirect(url: str) -> Callable[[Any], bool]:
    """Return a fault: a redirect to `url`."""

    def fault(handler: Any) -> bool:
        handler.send(307, b"", {"Location": url})
        return True

    return fault


def altered(body: bytes | None = None, **headers: str) -> Callable[[Any], bool]:
    """Return a fault: the normal response with another body and some headers replaced (removed if
    empty)."""

    def fault(handler: Any) -> bool:
        plain = handler.send

        def send(code: int, data: bytes, given: dict[str, str], length: int = -1) -> None:
            own = {k.replace("_", "-"): v for k, v in headers.items()}
            given = {k: v for k, v in given.items() if k not in own}
            length_header = own.pop("Content-Length", None)
            content = data if body is None else body
            plain(
                code,
                content,
                given | own,
                len(content) if length_header is None else int(length_header),
            )

        handler.send = send
        return False

    return fault


def dripping(what: str, body: int) -> Callable[[Any], bool]:
    """Return a fault: a response whose "headers" or "body" are sent one byte at a time."""

    def fault(handler: Any) -> bool:
        handler.close_connection = True
        if what == "body":
            handler.send_response(200)
            handler.send_header("Content-Length", str(body))
            handler.end_headers()
        drop = b"X: " + b"a" * 10000 if what == "headers" else b"["
        if what == "headers":
            handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
        try:
            for i in range(10000):
                handler.wfile.write(drop[i % len(drop) : i % len(drop) + 1])
                threading.Event().wait(0.05)  # `time.sleep` is patched by tests
        except OSError:
            pass
        return True

    return fault


def endless(handler: Any) -> bool:
    """Return a fault: a body without a length and without an end."""
    handler.send_response(200)
    handler.send_header("ETag", f'"{etag(b"")}"')
    handler.send_header("X-Repo-Commit", SHA)
    handler.end_headers()
    handler.close_connection = True
    try:
        while handler.command != "HEAD":
            handler.wfile.write(bytes(1 << 16))
    except OSError:
        pass
    return True
