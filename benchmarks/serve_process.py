"""Measure the cost of running the engine in a process of its own, and test its failures.

    python benchmarks/serve_process.py [--pairs 20] [--faults 60] [--seed 1] [--device cpu]

Serves the bundled family with a draft. Speed: one stream over HTTP, with the engine in the server's
process and in its own, alternating; the ratio of each pair. Faults: an engine that raises or
crashes (SIGSEGV) during prefill or in a step, and one that is killed at a random moment. Running
streams must end with an error event; queued requests must be answered as if alone. Writes dated
JSON; the exit code is 1 if a check fails.
"""

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import torch
from watch import write_result

sys.path.insert(0, str(Path(__file__).parent.parent))

from g4spec import convert
from g4spec.runtime.engine import Engine
from g4spec.runtime.request import Options
from g4spec.server.engine_client import EngineClient
from tests.server import faulty_engines as faulty
from tests.server.running_server import Served

TINY = Path(__file__).resolve().parents[1] / "examples" / "tiny"
PATH, SLOTS, WAITING = "/v1/completions", 3, 5
PHASES = {
    "a step raises": [2, 9, faulty.RAISES],
    "a step crashes": [2, 9, faulty.CRASHES],
    "reading raises": [2, faulty.READING, faulty.RAISES],
    "reading crashes": [2, faulty.READING, faulty.CRASHES],
    "killed": [2, 31],
}
SHORT = Options(n_predict=12, ignore_eos=True, draft_max=3)


def seconds(served: Served, tokens: int, seed: int) -> float:
    """Time one stream, from its first token to its last."""
    body = {
        "prompt": "def area(r):",
        "max_tokens": tokens,
        "ignore_eos": True,
        "seed": seed,
        "draft_max": 4,
        "stream": True,
        "temperature": 0.8,
    }
    first = last = 0.0
    with served.http.stream("POST", PATH, json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                last = time.perf_counter()
                first = first or last
    return last - first


def speed(pairs: int, here: Served, there: Served, tokens: int) -> dict[str, Any]:
    """Compare both in alternation."""
    rows = []
    for i in range(pairs + 1):
        order = (here, there) if i % 2 else (there, here)
        took = {id(served): seconds(served, tokens, i) for served in order}
        rows.append((took[id(here)], took[id(there)]))
    rows = rows[1:]  # the first one measures
    ratios = sorted(a / b for a, b in rows)
    return {
        "pairs": pairs,
        "tokens": tokens,
        "in_process_tokens_per_second": tokens / statistics.median(a for a, _ in rows),
        "own_process_tokens_per_second": tokens / statistics.median(b for _, b in rows),
        "ratio": statistics.median(ratios),
        "ratio_quartiles": statistics.quantiles(ratios, n=4)[::2],
    }


def until(what: Any, limit: float = 300) -> None:
    """Wait for a condition."""
    end = time.monotonic() + limit
    while not what():
        if time.monotonic() > end:
            raise SystemExit("it takes too long")
        time.sleep(0.01)


def stream(url: str, lines: list[str]) -> None:
    """Read a long stream to its end."""
    body = {"prompt": "The cat", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", url + PATH, json=body, timeout=300) as response:
        lines.extend(response.iter_lines())


def fault(
    phase: str, served: Served, client: EngineClient, plain: Engine, rng: random.Random
) -> tuple[list[str], float]:
    """Make the engine fail once. Return what is wrong, and the seconds until it worked again."""
    until(lambda: client.stats().idle and client.is_healthy(60))
    before, lines, wrong = client.process, list[str](), []
    long = Options(n_predict=1500, ignore_eos=True)
    thread = threading.Thread(target=stream, args=(served.url, lines))
    thread.start()
    until(lambda: client.stats().running == 1)
    running = [client.submit(prompt, long) for prompt in ([2, 30], PHASES[phase])]
    prompts = [[2, rng.randrange(300, 400), rng.randrange(300, 400)] for _ in range(WAITING)]
    waiting = [client.submit(prompt, SHORT) for prompt in prompts]
    if phase == "killed":
        time.sleep(rng.random() * 0.4)
        os.kill(before or -1, signal.SIGKILL)
    until(lambda: client.process != before or not client.is_healthy(60))
    began = time.monotonic()
    red = httpx.get(served.url + "/health").status_code
    for request, prompt in zip(waiting, prompts, strict=True):
        text = list(request.tokens())
        if text != list(plain.submit(prompt, SHORT).tokens()):
            wrong.append(f"{phase}: another text")
    until(lambda: httpx.get(served.url + "/health").status_code == 200)
    took = time.monotonic() - began
    thread.join(60)
    if not any("engine_failed" in line for line in lines):
        wrong.append(f"{phase}: a stream without an error event")
    if red != 503:
        wrong.append(f"{phase}: /health said {red}")
    for request in running:
        until(lambda request=request: request.done)
        # What was not in a slot yet when the process was killed goes on in the next one.
        if request.error is None and not (phase == "killed" and len(request.ids) == 1500):
            wrong.append(f"{phase}: a text that ran ended in order")
    return wrong, took


def main() -> int:
    """Measure the speed, then inject the faults."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    rng, by, wrong, took = random.Random(args.seed), Counter[str](), [], []
    with tempfile.TemporaryDirectory() as name:
        target, draft = Path(name) / "target.gguf", Path(name) / "dflash.gguf"
        convert.convert(TINY / "target", target)
        convert.convert(TINY / "dflash", draft, target=target)
        setup: dict[str, Any] = {"n_ctx": 2048, "parallel": SLOTS, "device": args.device}
        engine = Engine.load(target, draft, **setup)
        with EngineClient(target, draft, make=faulty.load, **setup) as client:
            here, there = Served(engine), Served(client)
            found = speed(args.pairs, here, there, 200) if args.pairs else {}
            print(json.dumps(found), flush=True)
            for i in range(args.faults):
                phase = list(PHASES)[i % len(PHASES)]
                bad, seconds_ = fault(phase, there, client, engine, rng)
                by[phase] += 1
                wrong += bad
                took.append(seconds_)
            here.stop()
            there.stop()
        engine.close()
    write_result(
        args.out,
        "serve-process",
        {
            "seed": args.seed,
            "device": args.device,
            "speed": found,
            "faults": dict(by),
            "waiting_texts": WAITING * args.faults,
            "wrong": wrong,
            "seconds_until_waiting_texts_ended": statistics.quantiles(took, n=10)[::4]
            if took
            else [],
        },
    )
    print(f"{args.faults} faults, {len(wrong)} wrong: {wrong[:5]}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
