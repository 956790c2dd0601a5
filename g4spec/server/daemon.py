"""The line protocol of lucebox' Gemma 4 daemon, for programs that drive the engine.

Each line on stdin is a request:

    PROMPT_BIN N_GEN [samp=TEMPERATURE,TOP_P,TOP_K,REPETITION_PENALTY[,SEED]]

PROMPT_BIN is a file of token ids (int32, little-endian). Generated tokens are written in the same
form to a file descriptor, followed by -1; a stop token is not sent. Seed 0 draws a random seed.
An invalid request is answered by -1 alone and an error on stderr.
"""

from __future__ import annotations

import re
import secrets
import struct
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from g4spec.errors import G4Error, InputError, UsageError
from g4spec.gguf.regular_files import open_regular
from g4spec.ops.sampling import Sampler
from g4spec.runtime.engine import Engine
from g4spec.runtime.request import Options

READY = "[daemon] ready"
"""Line on stdout that says that the daemon accepts requests."""

_LINE = re.compile(r"(?P<path>\S.*?)\s+(?P<count>\d{1,9})(?:\s+samp=(?P<samp>\S+))?")
_SAMP = "TEMPERATURE,TOP_P,TOP_K,REPETITION_PENALTY[,SEED]"


class Stream(Protocol):
    """An unbuffered binary file, as opened with `buffering=0`."""

    def write(self, data: bytes, /) -> int:
        """Write some of the bytes and return their number."""


def serve(
    engine: Engine,
    lines: Iterable[str],
    stream: Stream,
    sampler: Sampler,
    complain: Callable[[str], None],
) -> None:
    """Answer request lines until stdin ends or the stream is closed by its reader.

    Args:
        lines: request lines.
        stream: destination of the tokens.
        sampler: sampling parameters of lines without `samp`.
        complain: called with a message for each failed request.
    """
    try:
        for line in lines:
            if not line.strip():
                continue
            try:
                _answer(engine, line.strip(), stream, sampler)
            except (G4Error, OSError) as error:
                if isinstance(error, BrokenPipeError):
                    raise
                complain(f"[daemon] {error}")
            _send(stream, [-1])
    except BrokenPipeError:
        complain("[daemon] the token stream was closed by its reader")


def _answer(engine: Engine, line: str, stream: Stream, sampler: Sampler) -> None:
    found = _LINE.fullmatch(line)
    if found is None:
        raise UsageError(
            "unknown request line",
            expected="PROMPT_BIN N_GEN [samp=...]",
            found=repr(line[:200]),
        )
    count = int(found["count"])
    prompt = _prompt(Path(found["path"]), engine.n_ctx)
    if count < 1 or len(prompt) + count > engine.n_ctx:
        raise InputError(
            "N_GEN",
            found=count,
            expected=f"1 to {engine.n_ctx - len(prompt)} (context {engine.n_ctx}, "
            f"prompt {len(prompt)} tokens)",
        )
    if found["samp"] is not None:
        sampler = _sampler(found["samp"])
    sampler = sampler if sampler.seed else replace(sampler, seed=secrets.randbits(63))
    for cycle in engine.submit(prompt, Options(count, sampler)):
        _send(stream, cycle.tokens)


def _prompt(path: Path, n_ctx: int) -> list[int]:
    """Read token ids from a file, at most `n_ctx + 1`."""
    with open_regular(path) as file:
        data = file.read(4 * (n_ctx + 1))
    if not data or len(data) % 4:
        raise InputError(
            f"{path}: not a list of token ids",
            expected="at least one int32",
            found=f"{len(data)} bytes",
        )
    return [token for (token,) in struct.iter_unpack("<i", data)]


def _sampler(text: str) -> Sampler:
    parts = text.split(",")
    try:
        temperature, top_p, top_k, penalty, *seed = parts
        return Sampler(
            float(temperature),
            int(top_k),
            float(top_p),
            seed=int(*seed) % 2**64,
            repetition_penalty=float(penalty),
        )
    except (ValueError, TypeError):
        raise UsageError("samp", expected=_SAMP, found=repr(text[:80])) from None


def _send(stream: Stream, tokens: list[int]) -> None:
    data = struct.pack(f"<{len(tokens)}i", *tokens)
    while data:
        data = data[stream.write(data) :]
