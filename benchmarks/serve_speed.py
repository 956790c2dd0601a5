"""Measure the overhead of HTTP: tokens per second and time to first token against in-process.

    python benchmarks/serve_speed.py [-m target.gguf -md draft.gguf] [--device cuda] [--pairs 10]

`g4spec serve` runs as a process; the same files, by default the bundled family, are also loaded
here. Both generate the same texts, alternating which is first: one request, 16 at once, and prompts
of 512 tokens that neither has seen, until the first token. Prints the ratio of each pair and its
median. Required on a GPU: 97 % of in-process for one request, 95 % for 16, at most 5 ms more to the
first token; the exit code there is 1 if one is missed. The client reads events from a bare socket,
in a process that does nothing else.
"""

import argparse
import asyncio
import json
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from watch import write_result

sys.path.insert(0, str(Path(__file__).parent.parent))

from g4spec import convert
from g4spec.ops.sampling import Sampler
from g4spec.runtime.engine import Engine
from g4spec.runtime.request import Options

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "examples" / "tiny"
STREAMS, PROMPT = 16, 512
CTX = 2048
GOALS = {"one stream": 0.97, "16 streams": 0.95, "first token": 5.0}

Times = tuple[float, float]
"""Moments of the first and the last news of a text."""


def fields(prompt: list[int], tokens: int, seed: int) -> dict[str, Any]:
    """Return the body of a request."""
    return {
        "prompt": prompt,
        "max_tokens": tokens,
        "seed": seed,
        "temperature": 0.8,
        "ignore_eos": True,
        "stream": True,
    }


async def asked(port: int, body: dict[str, Any]) -> Times:
    """Send a request over its own connection."""
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(data), data)
    )
    first = last = 0.0
    async for line in reader:
        assert b'"error":' not in line, line
        if line.startswith(b"data: {"):
            last = time.perf_counter()
            first = first or last
        if line.startswith(b"data: [DONE]"):
            break
    writer.close()
    assert last, "no event came"
    return first, last


def over_http(port: int, bodies: list[dict[str, Any]]) -> list[Times]:
    """Send all requests at once."""

    async def all_of() -> list[Times]:
        return await asyncio.gather(*(asked(port, body) for body in bodies))

    return asyncio.run(all_of())


def in_process(engine: Engine, bodies: list[dict[str, Any]]) -> list[Times]:
    """Generate the same texts in this process."""
    requests = [
        engine.submit(
            body["prompt"],
            Options(
                n_predict=body["max_tokens"],
                ignore_eos=True,
                sampler=Sampler(temperature=0.8, seed=body["seed"]),
            ),
        )
        for body in bodies
    ]
    firsts = [0.0] * len(requests)

    def note(i: int) -> None:
        firsts[i] = firsts[i] or time.perf_counter()

    for i, request in enumerate(requests):
        request.listen(partial(note, i))
    out = []
    for i, request in enumerate(requests):
        list(request)
        assert len(request.ids) == bodies[i]["max_tokens"], request.stats.stop_reason
        out.append((firsts[i], time.perf_counter()))
    return out


def pair(engine: Engine, port: int, bodies: list[dict[str, Any]], turn: int) -> list[list[float]]:
    """Run both. Return for each the seconds to the first token, from it to the end, and in
    total."""
    out: dict[bool, list[float]] = {}
    for http in (False, True) if turn % 2 else (True, False):
        began = time.perf_counter()
        times = over_http(port, bodies) if http else in_process(engine, bodies)
        first, last = min(t[0] for t in times), max(t[1] for t in times)
        out[http] = [first - began, last - first, last - began]
    return [out[False], out[True]]


def measure(engine: Engine, port: int, pairs: int, tokens: int, seed: int) -> dict[str, Any]:
    """Run all pairs; the first of each kind is a warm-up."""
    rng = random.Random(seed)
    n_vocab = min(engine.config.n_vocab, 4000)
    rows: dict[str, list[list[list[float]]]] = {name: [] for name in GOALS}
    for turn in range(pairs + 1):
        for name in GOALS:
            count, new = (STREAMS if name == "16 streams" else 1), tokens
            length = PROMPT if name == "first token" else 32
            if name == "first token":
                new = 2
            bodies = [
                fields(
                    [2, *(rng.randrange(300, n_vocab) for _ in range(length - 1))],
                    new,
                    turn * 100 + i,
                )
                for i in range(count)
            ]
            rows[name].append(pair(engine, port, bodies, turn))
    out: dict[str, Any] = {}
    for name, found in rows.items():
        here, there = zip(*found[1:], strict=True)
        if name == "first token":
            more = [(b[0] - a[0]) * 1e3 for a, b in zip(here, there, strict=True)]
            out[name] = {
                "in_process_ms": statistics.median(a[0] for a in here) * 1e3,
                "http_ms": statistics.median(b[0] for b in there) * 1e3,
                "more_ms": statistics.median(more),
                "all_ms": more,
            }
            continue
        at, written = (1, tokens - 1) if name == "one stream" else (2, tokens * STREAMS)
        ratios = [a[at] / b[at] for a, b in zip(here, there, strict=True)]
        out[name] = {
            "in_process_tokens_per_second": written / statistics.median(a[at] for a in here),
            "http_tokens_per_second": written / statistics.median(b[at] for b in there),
            "ratio": statistics.median(ratios),
            "ratios": ratios,
        }
    return out


def missed(found: dict[str, Any]) -> list[str]:
    """Return the requirements that were missed."""
    ratios = {name: found[name]["ratio"] for name in ("one stream", "16 streams")}
    out = [
        f"{name}: {ratio:.3f} of in-process, required {GOALS[name]}"
        for name, ratio in ratios.items()
        if ratio < GOALS[name]
    ]
    more = found["first token"]["more_ms"]
    return out + ([f"first token: {more:.1f} ms more"] if more > GOALS["first token"] else [])


def main() -> int:
    """Start the server, load the files, and measure in alternation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", type=Path, help="default: the bundled family")
    parser.add_argument("-md", "--draft", help="a file, or ngram; default: none with -m")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        target, draft = args.model, args.draft
        if target is None:
            target, draft = Path(name) / "tiny.gguf", str(Path(name) / "dflash.gguf")
            convert.convert(TINY / "target", target)
            convert.convert(TINY / "dflash", Path(draft), target=target)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [
            sys.executable,
            "-m",
            "g4spec",
            "serve",
            "-m",
            target,
            "--port",
            port,
            "-np",
            STREAMS,
            "-c",
            CTX,
            "--pool",
            STREAMS * 512,
            "--prefix-cache",
            0,
            "-q",
            "--device",
            args.device,
            *(["-md", draft] if draft else []),
        ]
        log = Path(name) / "log"
        with log.open("wb") as file:
            server = subprocess.Popen(list(map(str, command)), stderr=file, cwd=ROOT)
        try:
            path = Path(draft) if draft and draft != "ngram" else draft
            with Engine.load(
                target, path, n_ctx=CTX, parallel=STREAMS, pool=STREAMS * 512, device=args.device
            ) as engine:
                ready(server, port, log)
                found = measure(engine, port, args.pairs, args.tokens, args.seed)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)
    bad = missed(found)
    write_result(
        args.out,
        "serve-speed",
        {
            "model": target.name,
            "draft": Path(draft).name if draft else None,
            "device": args.device,
            "pairs": args.pairs,
            "tokens": args.tokens,
            "seed": args.seed,
            **found,
            "missed": bad,
        },
    )
    print(
        json.dumps(
            {
                name: {k: v for k, v in each.items() if not isinstance(v, list)}
                for name, each in found.items()
            },
            indent=1,
        ),
        bad,
    )
    return 1 if bad and args.device.startswith("cuda") else 0


def ready(server: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    """Wait until the server answers."""
    end = time.monotonic() + 300
    while True:
        assert server.poll() is None and time.monotonic() < end, log.read_text()[-2000:]
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)


if __name__ == "__main__":
    sys.exit(main())
