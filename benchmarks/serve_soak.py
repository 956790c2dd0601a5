"""Run a server with 16 streams for an hour and check memory, files, threads and answers.

    python benchmarks/serve_soak.py [--minutes 60] [--streams 16] [--seed 1] [--device cpu]

`g4spec serve` runs as a process, with the bundled family and a draft. Clients send all kinds of
requests of `tests/server/mixed_requests.py`, /v1/responses and /v1/messages, without a pause. Two
thirds stream; one in ten disconnects. Every 10 seconds the memory, threads and open files of the
server and its subprocesses are recorded. Errors are: an answer that differs from the first answer
to the same request, a status other than 200, and an error line in the server's log. Writes dated
JSON. The exit code is 1 for any error, or for growth: the median of the last quarter compared with
that of the second quarter (memory: by more than 3 % and 4 MB), or files and threads of the idle
server after the run compared with before.
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
from collections import Counter
from pathlib import Path
from typing import Any, TypeAlias

import httpx
from watch import write_result

sys.path.insert(0, str(Path(__file__).parent.parent))

from g4spec import convert
from tests.server.mixed_requests import QUESTIONS, RandomRequest, ask, draw, hang_up

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "examples" / "tiny"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
PERIOD = 10.0
Sample: TypeAlias = dict[str, dict[str, float]]
SAMPLED = ("resident_mb", "anonymous_mb", "threads", "files")


def processes(server: int) -> dict[str, int]:
    """Return the process ids of the server, of its engine (missing while none runs), and of
    the process that renders chat templates."""
    out = {"server": server}
    for path in Path(f"/proc/{server}/task").glob("*/children"):
        for child in path.read_text().split():
            command = Path(f"/proc/{child}/cmdline").read_text()
            out["engine" if "engine_process" in command else "templates"] = int(child)
    return out


def figures(process: int) -> dict[str, float]:
    """Return memory (megabytes, 10^6), threads and open files of a process."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    status = {key: value.split() for key, _, value in (line.partition(":") for line in lines)}
    return {
        "resident_mb": int(status["VmRSS"][0]) * 1024 / 1e6,
        "anonymous_mb": int(status["RssAnon"][0]) * 1024 / 1e6,
        "threads": int(status["Threads"][0]),
        "files": len(list(Path(f"/proc/{process}/fd").iterdir())),
    }


def other(rng: random.Random) -> RandomRequest:
    """Draw a request to an endpoint that `mixed.draw` leaves out."""
    question, most = rng.choice(QUESTIONS), rng.randint(1, 64)
    if rng.random() < 0.5:
        return RandomRequest(
            RESPONSES, {"input": question, "max_output_tokens": most, "temperature": 0}, "responses"
        )
    return RandomRequest(
        MESSAGES,
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": question}],
            "max_tokens": most,
            "temperature": 0,
        },
        "messages",
    )


async def words(client: httpx.AsyncClient, request: RandomRequest) -> str:
    """Send one of `other`'s requests and return the text of the answer."""
    if not request.body["stream"]:
        response = await client.post(request.path, json=request.body)
        assert response.status_code == 200, (response.status_code, response.text[:500])
        answer = response.json()
        parts = [part for item in answer.get("output", [answer]) for part in item["content"]]
        return "".join(part["text"] for part in parts)
    out = ""
    async with client.stream("POST", request.path, json=request.body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            event: Any = json.loads(line[6:]) if line.startswith("data: {") else {"type": ""}
            assert event["type"] not in ("error", "response.failed"), event
            if event["type"] == "response.output_text.delta":
                out += event["delta"]
            elif event["type"] == "content_block_delta" and event["delta"]["type"] == "text_delta":
                out += event["delta"]["text"]
    return out


class Clients:
    """The clients and their results."""

    def __init__(self, url: str, requests: list[RandomRequest], rng: random.Random) -> None:
        self._url, self._requests, self._rng = url, requests, rng
        self._first: dict[int, Any] = {}
        self.done: Counter[str] = Counter()
        self.errors: list[str] = []

    async def run(self, streams: int, end: float) -> None:
        """Send requests until a time of `time.monotonic`."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._url, timeout=None, limits=limits) as http:
            await asyncio.gather(*(self._loop(http, end) for _ in range(streams)))

    async def _loop(self, http: httpx.AsyncClient, end: float) -> None:
        rng = self._rng
        while time.monotonic() < end:
            i = rng.randrange(len(self._requests))
            asked = self._requests[i]
            request = RandomRequest(
                asked.path, {**asked.body, "stream": rng.random() < 2 / 3}, asked.kind
            )
            if asked.path not in (RESPONSES, MESSAGES):
                request = asked.drafted(rng.choice(["auto", *range(6)]), request.body["stream"])
            try:
                if rng.random() < 0.1:
                    await hang_up(http, request, rng)
                    self.done["hung up"] += 1
                    continue
                await self._answer(http, i, request)
            except (AssertionError, httpx.HTTPError) as error:
                self.errors.append(f"{request.kind}: {type(error).__name__}: {error}"[:600])
                print(self.errors[-1], flush=True)

    async def _answer(self, http: httpx.AsyncClient, i: int, request: RandomRequest) -> None:
        plain = request.path in (RESPONSES, MESSAGES)
        said = await words(http, request) if plain else (await ask(http, request)).comparable
        self.done[request.kind] += 1
        self.done["streams"] += bool(request.body["stream"])
        if self._first.setdefault(i, said) != said:
            self.errors.append(
                json.dumps({"differs": request.body, "first": self._first[i], "found": said})[:1500]
            )
            print(self.errors[-1], flush=True)


def orderly(line: str) -> bool:
    """Return whether a line of the server's log reports no error: JSON of level "info", or a
    line before it listens."""
    if not line.startswith("{"):
        return "Traceback" not in line and "error" not in line.lower()
    entry = json.loads(line)
    return entry["level"] == "info" and entry.get("status", 200) in (0, 200, 499)


async def soak(process: int, clients: Clients, streams: int, minutes: float) -> list[Sample]:
    """Run the clients and return one sample per period."""
    began, out = time.monotonic(), list[Sample]()
    asking = asyncio.ensure_future(clients.run(streams, began + minutes * 60))
    while not asking.done():
        await asyncio.wait({asking}, timeout=PERIOD)
        out.append({name: figures(number) for name, number in processes(process).items()})
        if len(out) % 30 == 0:
            print(
                f"{(time.monotonic() - began) / 60:.0f} minutes: {clients.done.total()} done, "
                f"{len(clients.errors)} errors, {out[-1]}",
                flush=True,
            )
    asking.result()
    return out


def grown(samples: list[Sample]) -> tuple[dict[str, Any], list[str]]:
    """Compare the quarters of a run. Return their medians, and the figures that grew."""
    quarter, medians, wrong = len(samples) // 4, {}, []
    for name in samples[-1]:
        rows = [sample.get(name, {}) for sample in samples]
        for key in SAMPLED:
            parts = [
                [row[key] for row in rows[i * quarter : (i + 1) * quarter] if row] for i in range(4)
            ]
            found = [round(statistics.median(part), 1) for part in parts]
            medians[f"{name} {key}"] = found
            _, second, _, last = found
            if key.endswith("_mb") and last > max(second * 1.03, second + 4):
                wrong.append(f"{name} {key} grows: {found}")
    return medians, wrong


def rest(url: str, process: int) -> Sample:
    """Return the figures when no request runs and keep-alive connections are closed."""
    end = time.monotonic() + 120
    while any(slot["is_processing"] for slot in httpx.get(url + "/slots").json()):
        assert time.monotonic() < end, "texts still run though nobody waits for them"
        time.sleep(1)
    time.sleep(35)  # of which 30 are the server's for connections that nobody uses
    return {name: figures(number) for name, number in processes(process).items()}


def main() -> int:
    """Start the server, run the clients, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    requests = [draw(rng, 64) for _ in range(200)] + [other(rng) for _ in range(40)]
    with tempfile.TemporaryDirectory() as name:
        target, draft = Path(name) / "tiny.gguf", Path(name) / "dflash.gguf"
        convert.convert(TINY / "target", target)
        convert.convert(TINY / "dflash", draft, target=target)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        url, log = f"http://127.0.0.1:{port}", Path(name) / "log"
        command = [
            sys.executable,
            "-m",
            "g4spec",
            "serve",
            "-m",
            target,
            "-md",
            draft,
            "--port",
            port,
            "-np",
            args.streams,
            "-c",
            2048,
            "--pool",
            16384,
            "--prefix-cache",
            32,
            "--timeout",
            3600,
            "--device",
            args.device,
            "--chat-template-file",
            ROOT / "tests" / "server" / "template.jinja",
        ]
        with log.open("wb") as file:
            server = subprocess.Popen(list(map(str, command)), stderr=file, cwd=ROOT)
        try:
            found, wrong = watch(server, url, requests, args, rng)
        finally:
            server.send_signal(signal.SIGTERM)
            code = server.wait(60)
        wrong += [line[:500] for line in log.read_text().splitlines() if not orderly(line)]
        wrong += [f"exit code {code} after SIGTERM"] if code else []
    write_result(
        args.out,
        "serve-soak",
        {
            "minutes": args.minutes,
            "streams": args.streams,
            "seed": args.seed,
            "device": args.device,
            **found,
            "wrong": wrong,
        },
    )
    print(f"{sum(found['done'].values())} done, {len(wrong)} wrong: {wrong[:5]}")
    return 1 if wrong else 0


def watch(
    server: "subprocess.Popen[bytes]",
    url: str,
    requests: list[RandomRequest],
    args: argparse.Namespace,
    rng: random.Random,
) -> tuple[dict[str, Any], list[str]]:
    """Run the soak against a running server. Return the result and its failures."""
    end = time.monotonic() + 300
    while True:
        assert server.poll() is None and time.monotonic() < end, "the server does not start"
        try:
            if httpx.get(url + "/health").status_code == 200:
                break
        except httpx.HTTPError:
            time.sleep(0.5)
    clients = Clients(url, requests, rng)
    asyncio.run(clients.run(2, time.monotonic() + 20))  # what is made at first use
    before = rest(url, server.pid)
    samples = asyncio.run(soak(server.pid, clients, args.streams, args.minutes))
    after = rest(url, server.pid)
    medians, wrong = grown(samples)
    for name, was in before.items():
        for key in ("threads", "files"):
            if after[name][key] > was[key] + (key == "threads") * 40:  # a pool that fills
                wrong.append(f"{name}: {after[name][key]:g} {key}, {was[key]:g} before")
    return {
        "done": dict(clients.done),
        "medians_by_quarter": medians,
        "before": before,
        "after": after,
        "samples": samples[:: max(1, len(samples) // 60)],
        "errors": len(clients.errors),
    }, [*wrong, *clients.errors]


if __name__ == "__main__":
    sys.exit(main())
