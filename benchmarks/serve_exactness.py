"""Compare answers over HTTP under load with the same requests alone.

    python benchmarks/serve_exactness.py [--requests 2000] [--distinct 500] [--seed 1]
        [--own-process] [--workers 16] [--device cuda]

Serves the bundled family with each of its drafts, with n-gram lookup, and with the prefix cache.
Requests are random (`tests/server/mixed_requests.py`): chat, tools, JSON schemas, grammars,
reasoning, log-probabilities, stop strings, several choices, penalties, three endpoints, with and
without streaming, any draft length. 1 to 32 are sent at once, in random order, while other clients
disconnect at random. Each text, tool call, log-probability and usage figure must equal that of the
same request alone, without prefix cache, at a server without a draft. `--own-process`: the engines
run in separate processes, as in `g4spec serve`. `--workers`: number of processes that share the
requests, each with its own seed and servers. Writes dated JSON; the exit code is 1 at a difference.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import torch
from watch import write_result
from workers import spread

sys.path.insert(0, str(Path(__file__).parent.parent))

from g4spec import convert
from g4spec.runtime.engine import Engine
from g4spec.server.engine_client import EngineClient
from g4spec.server.settings import Settings
from tests.server.mixed_requests import Answer, RandomRequest, ask, draw, hang_up
from tests.server.running_server import Served

TINY = Path(__file__).resolve().parents[1] / "examples" / "tiny"
DRAFTS = ("dflash", "assistant", "dflash-speculators", "ngram")
PATIENT = Settings("tiny", time_limit=36_000, send_limit=36_000)
"""Machines that run this may have other work."""

AT_ONCE = (1, 2, 4, 8, 16, 32)


def client(served: Served) -> httpx.AsyncClient:
    """Return an HTTP client without a limit of connections."""
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=served.url, timeout=None, limits=limits)


async def alone(served: Served, requests: list[RandomRequest]) -> list[Answer]:
    """Send each request by itself and return the answers."""
    async with client(served) as http:
        return [await ask(http, request.drafted(0, False)) for request in requests]


async def load(
    served: Served, todo: list[tuple[int, RandomRequest]], at_once: int, rng: random.Random
) -> list[tuple[int, RandomRequest, Answer]]:
    """Send all requests, `at_once` at a time, while a fifth as many other clients disconnect."""
    gate, out = asyncio.Semaphore(at_once), []
    async with client(served) as http:

        async def one(i: int, request: RandomRequest) -> None:
            async with gate:
                out.append((i, request, await ask(http, request)))

        async def gone(request: RandomRequest) -> None:
            async with gate:
                await hang_up(http, request, rng)

        jobs: list[Any] = [one(i, request) for i, request in todo]
        jobs += [gone(rng.choice(todo)[1]) for _ in range(len(todo) // 5)]
        rng.shuffle(jobs)
        await asyncio.gather(*jobs)
    return out


def rounds(
    count: int, requests: list[RandomRequest], rng: random.Random
) -> list[list[tuple[int, RandomRequest]]]:
    """Distribute `count` requests evenly over the distinct ones."""
    order = [i % len(requests) for i in range(count)]
    rng.shuffle(order)
    todo = [
        (i, requests[i].drafted(rng.choice(["auto", *range(9)]), rng.random() < 0.5)) for i in order
    ]
    return [todo[at : at + 50] for at in range(0, count, 50)]


def main() -> int:
    """Send all requests alone, then under load, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=2_000)
    parser.add_argument("--distinct", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--own-process", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--turn", type=int, default=0, help="of draft and number at once to begin")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.workers > 1:
        return share(args)
    torch.set_num_threads(1)
    rng, began = random.Random(args.seed), time.perf_counter()
    requests = [draw(rng) for _ in range(args.distinct)]
    with tempfile.TemporaryDirectory() as name:
        target, folder = Path(name) / "target.gguf", Path(name)
        convert.convert(TINY / "target", target)
        plain = Served(Engine.load(target, n_ctx=2048, device=args.device), PATIENT)
        wanted = asyncio.run(alone(plain, requests))
        plain.stop()
        print(f"{len(wanted)} answers alone, {time.perf_counter() - began:.0f} s", flush=True)
        servers = []
        for draft in DRAFTS:
            path: Path | str = draft
            if draft != "ngram":
                path = folder / f"{draft}.gguf"
                convert.convert(TINY / draft, path, target=target)
            make = EngineClient if args.own_process else Engine.load
            engine = make(
                target,
                path,
                n_ctx=2048,
                parallel=8,
                pool=8192,
                prefix_cache=32 << 20,
                device=args.device,
            )
            servers.append(Served(engine, PATIENT))
        wrong = 0
        todo = rounds(args.requests, requests, rng)
        for found in measure(servers, todo, wanted, rng, args.turn):
            wrong = len(found["wrong"])
            write_result(
                args.out,
                "serve-exactness",
                {
                    "distinct": args.distinct,
                    "seed": args.seed,
                    "own_process": args.own_process,
                    "device": args.device,
                    **found,
                    "seconds": round(time.perf_counter() - began),
                },
            )
        for served in servers:
            served.stop()
            served.engine.close()
    print(f"{args.requests} requests, {wrong} differ")
    return 1 if wrong else 0


def share(args: argparse.Namespace) -> int:
    """Run in several processes, which start with different drafts and concurrencies."""
    began, many = time.perf_counter(), args.workers
    more = ["--device", args.device, *(["--own-process"] if args.own_process else [])]
    found, failed = spread(
        __file__,
        [
            [
                "--requests",
                -(-args.requests // many),
                "--distinct",
                -(-args.distinct // many),
                "--seed",
                args.seed * 1000 + i,
                "--turn",
                3 * i,
                *more,
            ]
            for i in range(many)
        ],
    )
    write_result(
        args.out,
        "serve-exactness",
        {
            **{
                key: value
                for key, value in found.items()
                if key not in ("date", "machine", "commit")
            },
            "workers": many,
            "failed workers": failed,
            "seed": args.seed,
            "own_process": args.own_process,
            "seconds": round(time.perf_counter() - began),
        },
    )
    print(
        f"{found.get('requests', 0)} requests, {len(found.get('wrong', []))} differ, "
        f"{failed} workers failed"
    )
    return 1 if failed else 0


def measure(
    servers: list[Served],
    todo: list[list[tuple[int, RandomRequest]]],
    wanted: list[Answer],
    rng: random.Random,
    first: int = 0,
) -> Iterator[dict[str, Any]]:
    """Run all rounds, servers and numbers at once in turn; yields what was found so far after
    every fourth.

    Args:
        first: number of the first turn.
    """
    counts: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    wrong = []
    for turn, part in enumerate(todo):
        number = turn + first
        served, at_once = servers[number % len(servers)], AT_ONCE[number // 2 % len(AT_ONCE)]
        counts["hung up"] += len(part) // 5
        for i, request, answer in asyncio.run(load(served, part, at_once, rng)):
            kinds[request.kind] += 1
            counts["texts"] += len(answer.texts)
            counts["calls"] += sum(len(text["calls"]) for text in answer.texts)
            counts["streams"] += bool(request.body["stream"])
            counts["after a prefix hit"] += answer.cached > 0
            if answer.comparable != wanted[i].comparable:
                wrong.append(
                    {
                        "request": request.body,
                        "path": request.path,
                        "at_once": at_once,
                        "alone": wanted[i].comparable,
                        "found": answer.comparable,
                    }
                )
                print(json.dumps(wrong[-1])[:2000], flush=True)
        if turn % 4 < 3 and turn + 1 < len(todo):
            continue
        print(f"{sum(kinds.values())} requests, {len(wrong)} differ", flush=True)
        for name in ("drafted", "accepted", "preempted"):
            counts[name] = sum(
                int(m.value(getattr(m, name)))
                for m in (served.service.metrics for served in servers)
            )
        yield {
            "requests": sum(kinds.values()),
            **counts,
            "kinds": kinds,
            "at once": AT_ONCE,
            "drafts": DRAFTS,
            "wrong": wrong,
        }


if __name__ == "__main__":
    sys.exit(main())
