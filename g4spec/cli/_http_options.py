"""Options of `serve` about HTTP: addresses, TLS, access and endpoints."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from g4spec import ranges
from g4spec.cli import _inputs
from g4spec.cli._serve_options import split_commas
from g4spec.cli.render import Output
from g4spec.errors import InputError, UsageError

if TYPE_CHECKING:
    import socket

    from g4spec.server.addresses import ServerAddress

Host = Annotated[
    str, typer.Option("--host", help="Addresses or Unix sockets (*.sock), separated by commas.")
]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 picks a free one.")]
ApiKey = Annotated[
    list[str] | None,
    typer.Option(
        "--api-key",
        help="API key that requests must send; may be repeated. Default: that of the environment "
        "variable G4SPEC_API_KEY; if it is not set, no key is needed.",
    ),
]
KeyFile = Annotated[Path | None, typer.Option("--api-key-file", help="API keys, one per line.")]
Origin = Annotated[
    list[str] | None,
    typer.Option(
        "--cors-origin",
        help="Origin of web pages that may send requests (CORS); may be repeated. `localhost`: "
        "pages of this machine; `*`: all.",
    ),
]
Slots = Annotated[
    bool, typer.Option("--slots/--no-slots", help="Answer GET /slots; without it, with 501.")
]
Metrics = Annotated[
    bool, typer.Option("--metrics/--no-metrics", help="Answer GET /metrics; without it, with 501.")
]
Page = Annotated[
    bool, typer.Option("--ui/--no-ui", help="Serve the chat page at /; without it, 404.")
]
Certificate = Annotated[
    Path | None, typer.Option("--ssl-cert-file", help="TLS certificate (PEM); enables HTTPS.")
]
Key = Annotated[
    Path | None, typer.Option("--ssl-key-file", help="Private key of the certificate (PEM).")
]


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """Addresses, TLS files (PEM) and access rules of a server.

    Attributes:
        disabled: see `g4spec.server.middleware.DisabledPathsMiddleware`.
    """

    hosts: tuple[str, ...]
    port: int
    certificate: Path | None
    key: Path | None
    origins: Sequence[str]
    keys: Sequence[str]
    disabled: Mapping[str, str]

    def address(self, out: Output) -> ServerAddress:
        """Return the address to listen on; show a warning if everybody can use the server."""
        from g4spec.server import addresses

        address = addresses.ServerAddress(self.hosts, self.port, self.certificate, self.key)
        addresses.check_certificate(address)
        if addresses.is_exposed(address) and not self.keys:
            hosts = ", ".join(self.hosts)
            out.note(f"everybody who can reach {hosts} can use this server: set an --api-key")
        return address

    @property
    def access(self) -> dict[str, Any]:
        """Arguments of `g4spec.server.middleware.create_middleware`."""
        return {"keys": self.keys, "origins": self.origins, "disabled": self.disabled}


@contextmanager
def listening(address: ServerAddress) -> Iterator[list[socket.socket]]:
    """Listen on all hosts of `address`; close the sockets at the end."""
    from g4spec.server import addresses

    with ExitStack() as stack:
        yield [stack.enter_context(listener) for listener in addresses.listen(address)]


def hosts(text: str) -> tuple[str, ...]:
    """Return the hosts of --host."""
    found = split_commas([text])
    if not found:
        raise UsageError("--host", expected="at least one address", found=repr(text))
    return tuple(host.strip("[]") for host in found)  # [::1]: as in an address


def disabled_paths(*, slots: bool, metrics: bool, page: bool) -> dict[str, str]:
    """Return the disabled paths of the server, each with the option that disables it."""
    paths = {"/slots": ("--no-slots", slots), "/metrics": ("--no-metrics", metrics)}
    paths["/"] = ("--no-ui", page)
    return {path: option for path, (option, enabled) in paths.items() if not enabled}


def keys(given: list[str] | None, file: Path | None) -> list[str]:
    """Return all API keys: those of the command line, and the lines of `file`.

    Raises an error if keys are asked for and there is none: a server without keys is open.
    """
    # Not by click, which would split the variable at spaces.
    variable = os.environ.get("G4SPEC_API_KEY")
    given = given or ([variable] if variable else [])
    lines = _inputs.read_text(file).split("\n") if file is not None else []
    found = [key.strip() for key in [*given, *lines] if key.strip()]
    if file is not None and not any(line.strip() for line in lines):
        raise InputError(f"{file}: no API key", expected="at least one line with a key")
    if given and not found:
        raise UsageError("`api_key`", expected="a key", found="only spaces")
    for key in found:
        ranges.check_key(key)
    return found


def origins(given: list[str] | None) -> list[str]:
    """Return the origins of --cors-origin; raise UsageError for text that no browser sends."""
    for origin in given or []:
        if origin not in ("*", "localhost") and not re.fullmatch(r"\w[\w.+-]*://[^/\s]+", origin):
            raise UsageError(
                "--cors-origin",
                expected="http://HOST:PORT, https://HOST:PORT, localhost or *",
                found=origin,
            )
    return given or []
