"""The addresses that a server listens on: hosts with a port, and Unix sockets."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import ssl
import sys
from dataclasses import dataclass
from pathlib import Path

from g4spec.errors import EnvironmentProblem, InputError, UsageError

UNREAD_SECONDS = 60
"""Time after which a connection ends whose client accepts nothing of a response (Linux only)."""

BACKLOG = 2048
"""Connections that may wait to be accepted, per socket."""


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Hosts, port and TLS files (PEM) of the server; plain HTTP without a certificate.

    A host that ends in `.sock` is the path of a Unix socket, as in llama.cpp's server.
    """

    hosts: tuple[str, ...] = ("127.0.0.1",)
    port: int = 8080
    certificate: Path | None = None
    key: Path | None = None


def check_certificate(address: ServerAddress) -> None:
    """Raise UsageError for a key without a certificate, InputError for unusable files."""
    if address.certificate is None:
        if address.key is not None:
            raise UsageError("`key` needs a certificate", fix="pass it with `certificate`")
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            address.certificate, address.key, lambda: ""
        )
    except OSError as error:
        files = " and ".join(map(str, filter(None, (address.certificate, address.key))))
        raise InputError(
            f"{files}: not a usable certificate and key for HTTPS",
            found=error,
            expected="PEM files of a matching certificate and key, without a password",
        ) from None


def listen(address: ServerAddress) -> list[socket.socket]:
    """Bind and return one listening socket per host, all on the same port.

    Raises:
        EnvironmentProblem: a socket cannot be bound; none is left open.
    """
    port, listeners = address.port, list[socket.socket]()
    for host in address.hosts:
        where, fix = f"{host}:{port}", "choose another `port` or `host`"
        if _is_path(host):
            where, fix = host, "choose another `host`"
        try:
            if _is_path(host):
                listeners.append(_UnixListener(host))
            else:
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                listeners.append(socket.create_server((host, port), family=family, backlog=BACKLOG))
                _set_tcp_options(listeners[-1])
                port = listeners[-1].getsockname()[1]
        except (OSError, OverflowError) as error:
            for listener in listeners:
                listener.close()
            raise EnvironmentProblem(
                f"cannot listen on {where}",
                found=(error.strerror or str(error)).partition(" (while")[0]
                if isinstance(error, OSError)
                else error,
                fix=fix,
            ) from None
    return listeners


def is_exposed(address: ServerAddress) -> bool:
    """Return True unless all hosts are loopback addresses or Unix sockets."""
    return not all(_is_path(host) or is_loopback(host) for host in address.hosts)


def is_loopback(host: str) -> bool:
    """Return True for `localhost` and for addresses that only this machine can reach."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def url(address: ServerAddress, listeners: list[socket.socket]) -> str:
    """Return the URL of the first listening socket, or `unix:PATH`."""
    if isinstance(listeners[0], _UnixListener):
        return f"unix:{listeners[0].path}"
    host, port = listeners[0].getsockname()[:2]
    scheme = "https" if address.certificate else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _is_path(host: str) -> bool:
    return host.endswith(".sock")


def _set_tcp_options(listener: socket.socket) -> None:
    """Set options that accepted connections inherit."""
    # asyncio sets this one only if it knows that they are of TCP, which sockets of
    # `create_server` do not say.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sys.platform == "linux":
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_SECONDS * 1000)


class _UnixListener(socket.socket):
    """A listening Unix socket, whose file is removed when it is closed.

    Who may write to the file may connect: with the usual umask, its owner.
    """

    def __init__(self, path: str) -> None:
        if _is_abandoned(path):
            os.unlink(path)
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM)
        self.path = os.path.abspath(path)
        try:
            self.bind(path)
        except OSError:
            super().close()
            raise
        self.listen(BACKLOG)

    def close(self) -> None:
        """Close the socket and remove its file."""
        if self.fileno() != -1:
            Path(self.path).unlink(missing_ok=True)
        super().close()


def _is_abandoned(path: str) -> bool:
    """Return True for the file of a socket that no process listens on, such as one that was
    killed."""
    if not Path(path).is_socket():
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(path) == errno.ECONNREFUSED
