"""Test clients that disconnect, and malformed requests, against the server.

    python benchmarks/serve_aborts.py [--aborts 1000] [--seed 1]

Serves the bundled family with a draft. A thousand clients disconnect, with and without streaming,
in one of four phases: queued, prefill, decoding with a draft, and inside a tool call; with FIN or
RST. During each batch of them another client requests a text, which must equal the same request
alone. After each batch all slots and pages must be free and no request may be counted as open. Then
come malformed, deeply nested and 100 MB bodies, header floods, headers that never end, clients that
do not read, and a full queue. None may get a 500, or no answer. Writes dated JSON; the exit code is
1 if a check fails.
"""

import argparse
import asyncio
import contextlib
import json
import random
import socket
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import torch
from watch import write_result

sys.path.insert(0, str(Path(__file__).parent.parent))

from g4spec import convert
from g4spec.runtime.engine import Engine
from g4spec.server.settings import Settings
from tests.server.mixed_requests import CHAT, RAW, TOOLS, Answer, RandomRequest, ask
from tests.server.running_server import Served

TINY = Path(__file__).resolve().parents[1] / "examples" / "tiny"
SLOTS = 4
PHASES = ("queued", "prefill", "mid-draft", "mid-call")
CONCURRENT = RandomRequest(
    RAW,
    {
        "prompt": "def main(",
        "max_tokens": 12,
        "seed": 7,
        "temperature": 0.9,
        "draft_max": 3,
        "logprobs": 1,
    },
    "bystander",
)


def request(phase: str, rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Return the path and body of a request that stays in a phase long enough to be aborted."""
    long = {"max_tokens": 1500, "seed": rng.randrange(2**32), "draft_max": 4, "temperature": 0.8}
    if phase == "mid-call":
        return CHAT, {
            **long,
            "messages": [{"role": "user", "content": "weather"}],
            "tools": TOOLS,
            "tool_choice": "required",
        }
    body = {**long, "ignore_eos": True, "prompt": [2, *(rng.randrange(300, 400) for _ in range(9))]}
    if phase == "prefill":
        body["prompt"] = [2, *(rng.randrange(300, 400) for _ in range(1500))]
    return RAW, body | ({"n": 3} if phase == "queued" else {})


def reached(phase: str, served: Served) -> bool:
    """Return whether a request is in the phase now."""
    scheduler = served.engine.scheduler
    live = [task for task in list(scheduler.running) if not task.request.cancelled]
    if phase == "queued":
        return any(not task.request.cancelled for task in list(scheduler.waiting))
    if phase == "prefill":
        return any(task.n_prompt > 1000 and not task.request.stats.tokens for task in live)
    if phase == "mid-draft":
        return any(task.request.stats.drafted > 4 for task in live)
    return any(
        task.request.options.mask is not None and task.request.stats.tokens > 3 for task in live
    )


def send(served: Served, path: str, body: dict[str, Any]) -> socket.socket:
    """Send a request without reading its answer. Return its connection."""
    address = served.url.removeprefix("http://").split(":")
    link = socket.create_connection((address[0], int(address[1])), timeout=60)
    data = json.dumps(body).encode()
    link.sendall(
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(data)}\r\n\r\n".encode()
        + data
    )
    return link


def hang_up(link: socket.socket, reset: bool) -> None:
    """Close a connection with FIN or RST."""
    if reset:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    link.close()


async def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait for a condition. Return False at the time limit."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        await asyncio.sleep(0.001)
    return True


async def batch(
    served: Served, phase: str, count: int, rng: random.Random
) -> tuple[Counter[str], Answer]:
    """Let `count` clients disconnect in a phase while another client requests a text."""
    out: Counter[str] = Counter()
    async with httpx.AsyncClient(base_url=served.url, timeout=None) as client:
        asked = asyncio.ensure_future(ask(client, CONCURRENT))
        links = []
        for _ in range(count):
            path, body = request(phase, rng)
            stream = rng.random() < 0.5
            links.append(await asyncio.to_thread(send, served, path, {**body, "stream": stream}))
            out["streams"] += stream
        out["in the phase"] += await until(lambda: reached(phase, served), 60)
        for link in links:
            await asyncio.sleep(rng.choice([0, 0, 0.005, 0.02]))
            reset = rng.random() < 0.5
            hang_up(link, reset)
            out["resets"] += reset
        return out, await asked


async def aborts(served: Served, count: int, rng: random.Random) -> dict[str, Any]:
    """Run batches in all phases until `count` clients have disconnected."""
    engine = served.engine
    free, wrong = engine.pool.n_free, []
    async with httpx.AsyncClient(base_url=served.url, timeout=None) as client:
        wanted = await ask(client, CONCURRENT)
    total: Counter[str] = Counter()
    by: dict[str, Counter[str]] = {phase: Counter() for phase in PHASES}
    turn, longest = 0, 0.0
    while total["hung up"] < count:
        phase, many = PHASES[turn % len(PHASES)], min(rng.randint(4, 12), count - total["hung up"])
        found, said = await batch(served, phase, many, rng)
        began = time.monotonic()
        idle = await until(served.idle, 120)
        longest = max(longest, time.monotonic() - began)
        engine.prefix.clear()
        if said.comparable != wanted.comparable:
            wrong.append(f"{turn} {phase}: the bystander got another text")
        if not idle or engine.pool.n_free != free or len(engine.pool.free_slots) != SLOTS:
            wrong.append(
                f"{turn} {phase}: {engine.pool.n_free} of {free} pages, "
                f"{len(engine.pool.free_slots)} slots are free"
            )
        by[phase].update({**found, "hung up": many, "batches": 1})
        total["hung up"] += many
        turn += 1
        if turn % 10 == 0:
            print(f"{total['hung up']} hung up, {len(wrong)} wrong", flush=True)
    return {
        "hung up": total["hung up"],
        "phases": by,
        "wrong": wrong,
        "longest seconds until all was free": round(longest, 3),
    }


# ---- faults


def deep(depth: int) -> dict[str, bytes]:
    """Return bodies that are nested `depth` deep in different fields."""
    opened, closed = b'{"a":' * depth, b"}" * depth
    schema = b'{"type":"object","properties":{"a":' * depth + b"{}" + b"}}" * depth
    head = b'{"messages":[{"role":"user","content":"x"}],"max_tokens":1,'
    return {
        "messages": b'{"messages":' + b"[" * depth + b"]" * depth + b"}",
        "metadata": head + b'"metadata":' + opened + b"1" + closed + b"}",
        "schema": head + b'"response_format":{"type":"json_schema","json_schema":{"name":"x",'
        b'"schema":' + schema + b"}}}",
        "tools": head
        + b'"tools":[{"type":"function","function":{"name":"f","parameters":'
        + schema
        + b"}}]}",
    }


def status(served: Served, content: Any, path: str = CHAT, **headers: str) -> int:
    """Return the status of a request, or 0 if the connection was closed."""
    with contextlib.suppress(httpx.TransportError):
        return httpx.post(
            served.url + path, content=content, headers=headers, timeout=120
        ).status_code
    return 0


def chunks(size: int) -> Any:
    """Yield `size` bytes in chunks of one MiB."""
    for _ in range(size >> 20):
        yield b" " * (1 << 20)


def raw(served: Served, data: bytes, seconds: float) -> bytes:
    """Send bytes and return what arrives within some seconds."""
    address = served.url.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1])), timeout=seconds) as link:
        out = b""
        with contextlib.suppress(OSError):
            link.sendall(data)
            while piece := link.recv(65536):
                out += piece
        return out


def slow_reader(served: Served) -> float:
    """Request a long stream and do not read it. Return the seconds until its memory is free."""
    address = served.url.removeprefix("http://").split(":")
    link = socket.socket()
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    link.connect((address[0], int(address[1])))
    body = json.dumps(
        {
            "prompt": "x",
            "max_tokens": 600,
            "ignore_eos": True,
            "stream": True,
            "logprobs": 20,
            "draft_max": 0,
        }
    ).encode()
    link.sendall(
        f"POST {RAW} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
    )
    began = time.monotonic()
    asyncio.run(until(lambda: not served.engine.scheduler.idle, 60))
    asyncio.run(until(served.idle, 1200))
    link.close()
    reasons = next(iter(served.service.metrics.finished_texts.collect())).samples
    cut = any(s.labels["finished_reason"] == "abort" and s.value for s in reasons)
    return time.monotonic() - began if cut and served.idle() else -1.0


def full_queue(served: Served) -> list[Any]:
    """Fill slots and queue and send one more request. Return its status and Retry-After."""
    body = {"prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": True, "draft_max": 0}
    n = served.service.settings.queue + SLOTS
    links = [send(served, RAW, body) for _ in range(n)]
    asyncio.run(until(lambda: served.service.open == n, 60))
    answer = httpx.post(served.url + RAW, json={"prompt": "x", "max_tokens": 1}, timeout=60)
    for link in links:
        hang_up(link, reset=False)
    asyncio.run(until(served.idle, 120))
    return [answer.status_code, answer.headers.get("retry-after")]


def faults(served: Served) -> dict[str, Any]:
    """Send malformed requests and return the result of each."""
    out: dict[str, Any] = {}
    for depth in (100, 1000, 100_000):
        out |= {f"depth {depth}, {k}": status(served, v) for k, v in deep(depth).items()}
    out["100 MB, length said"] = status(
        served, chunks(100 << 20), **{"content-length": str(100 << 20)}
    )
    out["100 MB, in chunks"] = status(served, chunks(100 << 20))
    text = json.dumps({"prompt": "x" * (20 << 20), "max_tokens": 1}).encode()
    out["20 MB of prompt"] = status(served, text, RAW)
    out["bytes"] = status(served, random.Random(1).randbytes(1 << 16))
    flood = b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"x: y\r\n" * 200_000
    out["1.2 MB of headers"] = raw(served, flood, 20)[:15].decode()
    out["a line of 1 MB"] = raw(served, b"GET /" + b"a" * (1 << 20), 20)[:15].decode()
    out["no HTTP"] = raw(served, b"\x16\x03\x01\x00\xff" * 99 + b"\r\n\r\n", 20)[:15].decode()
    half, address = [], served.url.removeprefix("http://").split(":")
    for _ in range(200):  # headers that never end
        link = socket.create_connection((address[0], int(address[1])))
        link.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-a: ")
        half.append(link)
    out["beside 200 headers without end"] = httpx.get(served.url + "/health").status_code
    for link in half:
        link.close()
    out["full queue"] = full_queue(served)
    out["slow reader, seconds"] = round(slow_reader(served), 1)
    out["after all that"] = httpx.get(served.url + "/health").status_code
    return out


def wrong_faults(found: dict[str, Any]) -> list[str]:
    """Return the answers that are not allowed."""
    bad = [k for k, v in found.items() if v == 500 or str(v).startswith("HTTP/1.1 5")]
    bad += [k for k in found if k.startswith("depth") and found[k] not in (200, 400)]
    bad += [k for k in found if k.startswith("100 MB") and found[k] not in (413, 0)]
    bad += [
        k
        for k, v in (
            ("full queue", [429, "1"]),
            ("after all that", 200),
            ("beside 200 headers without end", 200),
        )
        if found[k] != v
    ]
    return bad + (["slow reader"] if found["slow reader, seconds"] < 0 else [])


def main() -> int:
    """Run the aborts, then the faults."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--aborts", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        target, draft = Path(name) / "target.gguf", Path(name) / "dflash.gguf"
        convert.convert(TINY / "target", target)
        convert.convert(TINY / "dflash", draft, target=target)
        engine = Engine.load(
            target, draft, n_ctx=2048, parallel=SLOTS, pool=8192, prefix_cache=32 << 20
        )
        settings = Settings("tiny", queue=64, time_limit=36_000, send_limit=3)
        served = Served(engine, settings)
        # Small buffers, so that it is soon felt that a client does not read.
        served.listeners[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        found = asyncio.run(aborts(served, args.aborts, random.Random(args.seed)))
        answers = faults(served)
        served.stop()
        engine.close()
    wrong = found.pop("wrong") + wrong_faults(answers)
    write_result(
        args.out,
        "serve-aborts",
        {
            "seed": args.seed,
            **found,
            "faults": answers,
            "wrong": wrong,
            "seconds": round(time.perf_counter() - began),
        },
    )
    print(f"{args.aborts} hung up, {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
