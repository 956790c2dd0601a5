"""Measure tokens per second of many requests in one engine, with the published shapes on a GPU.

    python benchmarks/gpu_streams.py [--model 31b] [plain] [long] [draft] [tail] [gap]

Weights are random, Q4_K_M; engine, scheduler and draft length policy are those of every command.

plain: 1, 16, 32 and 64 requests without a draft. long: 16 requests of 4,096 tokens. draft: 1, 2, 4,
8 and 16 requests with a DFlash draft of which `--accepted` tokens of each proposal are accepted,
then none, with a fixed length of 15, with `auto`, and without drafting. tail: 64 requests with the
same draft, and the one that is left when the others have ended. gap: the longest time
between two tokens of 4 streams while a prompt of 32,768 tokens is read. Writes
`results/<date>-gpu-streams.json` after each part. Fails if a request ends while tokens are counted.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import watch
from g4spec.core import PAGE
from g4spec.measure import synthetic
from g4spec.measure import synthetic_bench as steps
from g4spec.runtime import devices
from g4spec.runtime.cuda.step.graph_runner import GraphRunner
from g4spec.runtime.draft_length import DraftLengthPolicy
from g4spec.runtime.engine import Engine
from g4spec.runtime.memory import MemoryPlan
from g4spec.runtime.request import Options, Request

Drafted = int | Literal["auto"]
SHORT, PROMPT = 64, 32768
PLAIN_CTX = 4096  # without a draft, one request makes up to 700 tokens a second
DRAFT_CTX = 8192  # with one, about 850
WARM, SECONDS, DRAFT_SECONDS = 3.0, 1.5, 3.0
"""How long requests run, first to record graphs and learn what is accepted, and then, others, to be
counted; with a draft longer, because `auto` tries one that is not accepted every second or so."""


class NoText:
    """Tokenizer without text: tokens are only counted."""

    template = None
    stop_ids: frozenset[int] = frozenset()
    suppress_ids: tuple[int, ...] = ()

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Return the same text for all tokens."""
        return ""

    def stream(self) -> NoText:
        """Return a decoder."""
        return self

    def push(self, ids: Iterable[int]) -> str:
        """Take tokens."""
        return ""

    def finish(self) -> str:
        """Return the remaining text."""
        return ""


class Streams:
    """An engine with random weights."""

    def __init__(self, model: str, texts: int, n_ctx: int, drafted: bool) -> None:
        backend: Any = devices.select("cuda", "q8_0")
        pool = texts * (n_ctx + PAGE)
        self.target = synthetic.make_target(model, "q4_k_m", backend, n_ctx, texts, pool)
        draft: Any = synthetic.make_draft(model, "q8_0", self.target) if drafted else None
        tokenizer: Any = NoText()
        plan = MemoryPlan(n_ctx, 0, 0, 0, 0, 0)
        self.engine = Engine(self.target, draft, tokenizer, plan)

    def accept(self, tokens: int) -> None:
        """Accept this many tokens of each proposal from now on, whatever they are."""
        engine = self.engine
        engine.scheduler.cycles.runners = (GraphRunner(self.target, engine.draft, forced=tokens),)
        engine.lengths = engine.scheduler.cycles.length = DraftLengthPolicy(engine.backend.padded)

    def submit(self, tokens: int, drafted: Drafted = 0) -> Request:
        """Submit a random prompt whose output does not end."""
        prompt = steps.random_tokens(self.target, tokens)
        return self.engine.submit(prompt, Options(100_000, draft_max=drafted, ignore_eos=True))

    def running(self, texts: int, tokens: int, drafted: Drafted = 0) -> list[Request]:
        """Submit requests and return when all are decoding."""
        requests = [self.submit(tokens, drafted) for _ in range(texts)]
        while not all(len(r.ids) > 8 for r in requests):
            self.step(requests)
        return requests

    def step(self, requests: list[Request]) -> None:
        """Run a step of the engine and read what is new, as clients do."""
        self.engine.step()
        for request in requests:
            for _ in request.drain():
                pass

    def stop(self, requests: list[Request]) -> None:
        """Cancel the requests."""
        for request in requests:
            request.cancel()
        while self.engine.step():
            pass

    def count(self, requests: list[Request], seconds: float) -> float:
        """Measure tokens per second over running requests."""
        before, began = sum(len(r.ids) for r in requests), time.perf_counter()
        while time.perf_counter() - began < seconds:
            self.step(requests)
        rate = (sum(len(r.ids) for r in requests) - before) / (time.perf_counter() - began)
        assert not any(r.done for r in requests), "a request ended: the context is too short"
        return rate

    def rate(self, texts: int, tokens: int, drafted: Drafted = 0) -> float:
        """Measure tokens per second over all requests, the second time they run."""
        for seconds in (WARM, DRAFT_SECONDS if self.engine.draft else SECONDS):
            requests = self.running(texts, tokens, drafted)
            rate = self.count(requests, seconds)
            self.stop(requests)
        return rate

    def rest(self, texts: int, tokens: int, drafted: Drafted) -> tuple[float, float]:
        """Measure tokens per second over all requests and, after all others have been cancelled, of
        one, the second time they run."""
        for seconds in (WARM, DRAFT_SECONDS):
            requests = self.running(texts, tokens, drafted)
            before = self.count(requests, seconds)
            for request in requests[1:]:
                request.cancel()
            self.count(requests[:1], 0.5)  # learns what is accepted
            after = self.count(requests[:1], SECONDS)
            self.stop(requests[:1])
        return before, after

    def gap(self, texts: int) -> dict[str, float]:
        """Measure the time between tokens of streams while a long prompt is read."""
        requests = self.running(texts, SHORT)
        long = self.submit(PROMPT)
        times = [time.perf_counter()]
        requests[0].listen(lambda: times.append(time.perf_counter()))
        while not long.ids:
            self.engine.step()
        gaps = [after - before for before, after in itertools.pairwise(times)]
        found = {
            "longest_ms": 1e3 * max(gaps),
            "mean_ms": 1e3 * sum(gaps) / len(gaps),
            "prompt_seconds": time.perf_counter() - times[0],
        }
        self.stop([*requests, long])
        return found

    def close(self) -> None:
        """Free the GPU memory."""
        self.engine.close()
        self.engine = self.target = None  # type: ignore[assignment]
        torch.cuda.empty_cache()


def plain(model: str, found: dict[str, Any]) -> None:
    """Measure short requests without a draft."""
    streams = Streams(model, 64, PLAIN_CTX, False)
    for texts in (1, 16, 32, 64):
        found[f"plain {texts}"] = tell(f"{texts} texts", streams.rate(texts, SHORT))
    streams.close()


def long(model: str, found: dict[str, Any]) -> None:
    """Measure requests of 4,096 tokens without a draft."""
    streams = Streams(model, 16, 5120, False)
    found["long 16"] = tell("16 texts of 4,096 tokens", streams.rate(16, 4096))
    streams.close()


def draft(model: str, accepted: int, found: dict[str, Any]) -> None:
    """Measure short requests with a draft that is always accepted, or never."""
    streams = Streams(model, 16, DRAFT_CTX, True)
    for held in (accepted, 0):
        streams.accept(held)
        for texts in (1, 2, 4, 8, 16):
            for drafted in (0, 15, "auto"):
                if held or drafted != 15:
                    name = f"draft {drafted}, {held} hold, {texts}"
                    found[name] = tell(name, streams.rate(texts, SHORT, drafted))  # type: ignore[arg-type]
    streams.close()


def tail(model: str, accepted: int, found: dict[str, Any]) -> None:
    """Measure 64 short requests, and one that is left of them, with and without drafting."""
    streams = Streams(model, 64, PLAIN_CTX, True)
    for held in (accepted, 0):
        streams.accept(held)
        drafts: tuple[Drafted, ...] = (0, "auto") if held else ("auto",)
        for drafted in drafts:
            rates = streams.rest(64, SHORT, drafted)
            for texts, rate in zip(("64", "1 of 64"), rates, strict=True):
                name = f"tail {drafted}, {held} hold, {texts}"
                found[name] = tell(name, rate)
    streams.close()


def gap(model: str, found: dict[str, Any]) -> None:
    """Streams beside a long prompt."""
    streams = Streams(model, 5, PROMPT + 2048, False)
    streams.stop(streams.running(1, 1024 + SHORT))  # compiles kernels of prompts
    found["gap"] = [streams.gap(4) for _ in range(3)]
    print("gap", found["gap"], flush=True)
    streams.close()


def tell(name: str, rate: float) -> float:
    """Print tokens per second."""
    print(f"{name}: {rate:.0f} tokens/s", flush=True)
    return round(rate, 1)


def main() -> None:
    """Run the selected measurements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=["plain", "long", "draft", "gap"])
    parser.add_argument("--model", default="31b", choices=[*synthetic.TARGETS])
    parser.add_argument("--accepted", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found: dict[str, Any] = {}
    for part in args.parts:
        print(part, flush=True)
        if part in ("draft", "tail"):
            (draft if part == "draft" else tail)(args.model, args.accepted, found)
        else:
            {"plain": plain, "long": long, "gap": gap}[part](args.model, found)
        watch.write_result(
            args.out, "gpu-streams", {"model": args.model, "tokens_per_second": found}
        )


if __name__ == "__main__":
    main()
