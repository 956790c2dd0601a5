"""Test batch invariance with thousands of random requests; write the results as dated JSON.

    python benchmarks/batch_invariance.py [--answers 10000] [--seed 1] [--workers 8]
    python benchmarks/batch_invariance.py --device cuda -m TARGET.gguf [-md DRAFT.gguf ...]

A round submits random requests to an engine without a draft or with one of the drafts. Without
`-m`, models are small and random, and drafts are of every kind; with `-m`, drafts are those of
`-md`. Requests have random temperatures, filters, penalties, bias, masks, log-probabilities, stop
strings, and prompts of 1 to 600 tokens, some with a shared prefix of 512 or 1024 tokens. They
arrive, end and are cancelled at random, 1 to 32 at a time, in large and small pools.

Each request also runs alone, without prefix cache and draft. Texts, logits of chosen tokens and
log-probabilities must have the same bits; proposals are compared with a single run with the draft.
The exit code is 1 if any differs.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path

import torch
from watch import write_result

sys.path.insert(0, str(Path(__file__).parent.parent))

from g4spec.runtime.engine import Engine
from tests.support.batch_invariance import (
    IN_MEMORY,
    KINDS,
    N_CTX,
    PARALLEL,
    Comparison,
    EngineFactory,
    ReferenceRuns,
    compare_with_reference,
    pool_tokens,
)


class FileEngineFactory(EngineFactory):
    """EngineFactory for files. Engines and their CUDA graphs are reused by later rounds."""

    def __init__(self, target: Path, device: str, cache_type: str | None) -> None:
        def load(kind: str | None, **more: int) -> Engine:
            draft = Path(kind) if kind and kind != "ngram" else kind
            return Engine.load(
                target, draft, n_ctx=N_CTX, device=device, cache_type=cache_type, **more
            )

        self._load = lru_cache(maxsize=None)(load)
        self.vocab = load(None).target.config.n_vocab

    def single(self, kind: str | None) -> Engine:
        return self._load(kind)

    def batched(self, kind: str | None, parallel: int, small_pool: bool) -> Engine:
        return self._load(
            kind, parallel=parallel, pool=pool_tokens(parallel, small_pool), prefix_cache=1 << 28
        )


@dataclass
class Totals:
    """Sums over all rounds."""

    rounds: int = 0
    most_live: int = 0
    total: Counter[str] = field(default_factory=Counter)
    drafts: dict[str, Counter[str]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def add(self, kind: str | None, result: Comparison) -> None:
        """Add a round. `kind`: kind or file of the draft, or None."""
        figures = {k: v for k, v in asdict(result).items() if isinstance(v, int)}
        self.rounds += 1
        self.most_live = max(self.most_live, figures.pop("most_live"))
        self.total.update(figures)
        self.drafts.setdefault(Path(str(kind)).stem, Counter()).update(figures)
        self.wrong += result.wrong

    def merge(self, other: Totals) -> None:
        """Add the totals of another process."""
        self.rounds += other.rounds
        self.most_live = max(self.most_live, other.most_live)
        self.total.update(other.total)
        for kind, figures in other.drafts.items():
            self.drafts.setdefault(kind, Counter()).update(figures)
        self.wrong += other.wrong


def rounds(args: argparse.Namespace, seed: int, answers: int, gpu: int | None) -> Totals:
    """Run rounds with random drafts and sizes until there are `answers` outputs or time is up.
    Ctrl-C ends the rounds early. `gpu`: index of the GPU to use."""
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
    torch.set_num_threads(1)
    engines, choices = IN_MEMORY, KINDS
    if args.model:
        engines = FileEngineFactory(args.model, args.device, args.cache_type)
        choices = (None, *args.draft)
    rng, reference, began = random.Random(seed), ReferenceRuns(engines=engines), time.perf_counter()
    totals = Totals()
    try:
        while totals.total["answers"] < answers and time.perf_counter() - began < args.seconds:
            kind, parallel = rng.choice(choices), rng.choice(PARALLEL)
            count = min(3 + 3 * parallel // 2, answers - totals.total["answers"])
            result = compare_with_reference(
                kind,
                parallel,
                f"{seed}/{totals.rounds}",
                count,
                args.longest,
                small_pool=rng.random() < 0.3,
                plain=reference,
                engines=engines,
            )
            totals.add(kind, result)
            for line in result.wrong:
                print(line[:500], flush=True)
            print(f"seed {seed}: {totals.total['answers']} answers", flush=True)
    except KeyboardInterrupt:
        pass
    return totals


def main() -> int:
    """Run rounds in one or more processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", type=Path, help="target")
    parser.add_argument(
        "-md", "--draft", action="append", default=[], help="draft or ngram; repeatable"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cache-type")
    parser.add_argument("--answers", type=int, default=10_000, help="number of outputs")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time limit in seconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--longest", type=int, default=200, help="maximum tokens of an output")
    parser.add_argument(
        "--workers", type=int, default=1, help="number of processes, each with its own seed"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    totals, began = Totals(), time.perf_counter()
    gpus = torch.cuda.device_count() if args.device.startswith("cuda") else 0
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.workers, mp_context=context) as pool:
        answers_per_worker = -(-args.answers // args.workers)
        jobs = [
            pool.submit(rounds, args, args.seed + i, answers_per_worker, i % gpus if gpus else None)
            for i in range(args.workers)
        ]
        for job in jobs:
            with contextlib.suppress(KeyboardInterrupt):  # the workers get Ctrl-C too, and return
                job.exception()
            totals.merge(job.result())
    total = totals.total
    write_result(
        args.out,
        f"batch-invariance-{args.device}",
        {
            "device": args.device,
            "seed": args.seed,
            "workers": args.workers,
            "longest": args.longest,
            "rounds": totals.rounds,
            **total,
            "most_live": totals.most_live,
            "wrong": totals.wrong,
            "drafts": totals.drafts,
            "seconds": round(time.perf_counter() - began),
        },
    )
    print(
        f"{total['answers']} answers, {total['tokens']} tokens, {total['preempted']} preempted, "
        f"{len(totals.wrong)} differ"
    )
    return 1 if totals.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
