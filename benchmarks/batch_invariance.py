"""Test batch invariance with thousands of random requests; write the results as dated JSON.

    python benchmarks/batch_invariance.py [--answers 10000] [--seed 1] [--workers 8]
    python benchmarks/batch_invariance.py --device cuda -m TARGET.gguf [-md DRAFT.gguf ...]

A round submits random requests to an engine without a draft or with one of the drafts. Without
`-m`, models are small and random, and drafts are of every kind; with `-m`, drafts are those of
`-md`. Requests have random temperatures, filters, penalties, bias, masks, log-probabilities, stop
strings, and prompts of 1 to 600 tokens, some with a shared prefix of 512 or 1024 tokens. They
arrive, end and are cancelled at random, 1 to 32 at a time, in large and small pools.

Each request also runs alone, without prefix cache and draft. Texts, logits of chosen tokens and
log-probabilities must have the same bits. Proposals of all requests, or of one in
`--proposals-every`, are compared with a single run with the draft.
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
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

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
        def load(kind: str | None, **more: Any) -> Engine:
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


class Rounds:
    """Rounds of one process, which keeps its engines. An instance is set by `start()`."""

    this: Rounds

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._choices = args, KINDS
        self._engines: EngineFactory = IN_MEMORY
        if args.model:
            self._engines = FileEngineFactory(args.model, args.device, args.cache_type)
            self._choices = (None, *args.draft)
        self._reference = ReferenceRuns(engines=self._engines)

    @staticmethod
    def start(args: argparse.Namespace, gpus: SimpleQueue[int]) -> None:
        """Set `Rounds.this` in a new process. `gpus`: holds the index of the GPU to use, if any."""
        if not gpus.empty():
            os.environ["CUDA_VISIBLE_DEVICES"] = str(gpus.get())
        torch.set_num_threads(1)
        Rounds.this = Rounds(args)

    @staticmethod
    def run(number: int) -> tuple[str | None, Comparison]:
        """Run a round with a random draft and size; return its draft and its result."""
        this = Rounds.this
        seed = f"{this._args.seed}/{number}"
        rng = random.Random(seed)
        kind, parallel = rng.choice(this._choices), rng.choice(PARALLEL)
        return kind, compare_with_reference(
            kind,
            parallel,
            seed,
            3 + 3 * parallel // 2,
            this._args.longest,
            small_pool=rng.random() < 0.3,
            proposals_every=this._args.proposals_every,
            plain=this._reference,
            engines=this._engines,
        )


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
    parser.add_argument("--seconds", type=float, default=1e6, help="time limit in seconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--longest", type=int, default=200, help="maximum tokens of an output")
    parser.add_argument("--proposals-every", type=int, default=1, metavar="N", help="requests")
    parser.add_argument("--workers", type=int, default=1, help="number of processes")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    totals, began = Totals(), time.perf_counter()
    context = multiprocessing.get_context("spawn")
    gpus = context.SimpleQueue()
    if args.device.startswith("cuda"):
        for i in range(args.workers):
            gpus.put(i % torch.cuda.device_count())
    with context.Pool(args.workers, Rounds.start, (args, gpus)) as pool:
        results = pool.imap_unordered(Rounds.run, range(args.answers))
        # Rounds that run when time is up, or at Ctrl-C, do not count.
        with contextlib.suppress(KeyboardInterrupt, multiprocessing.TimeoutError):
            while totals.total["answers"] < args.answers:
                kind, result = results.next(began + args.seconds - time.perf_counter())
                totals.add(kind, result)
                for line in (*result.wrong, f"{totals.total['answers']} answers"):
                    print(line[:500], flush=True)
    total = totals.total
    write_result(
        args.out,
        f"batch-invariance-{args.device}",
        {
            "device": args.device,
            "seed": args.seed,
            "workers": args.workers,
            "longest": args.longest,
            "proposals_every": args.proposals_every,
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
