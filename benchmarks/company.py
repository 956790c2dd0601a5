"""Answers in company against the same alone, by the thousand, from a seed: kept as dated JSON.

    python benchmarks/company.py [--answers 10000] [--seed 1] [--longest 200]
    python benchmarks/company.py --device cuda -m TARGET.gguf [-md DRAFT.gguf] [-md ngram] ...

Without `-m` small random models in memory, every kind of draft and none; with it files, each draft
and none. Requests are drawn with temperatures, filters, penalties, bias, masks, log-probabilities,
stop texts, prompts of 1 to 600 tokens and some that share 512 or 1024; they arrive, end and are
cancelled at random, 1 to 32 live, in pools that are large enough or not. Each text, each logit of a
chosen token, each log-probability and each proposal must be, bit for bit, that of the same request
alone, cold, without a draft (proposals: with it). Exit code 1 if one is not.
"""

import argparse
import random
import sys
import time
from collections import Counter
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

import torch
from watch import keep

sys.path.insert(0, str(Path(__file__).parent.parent))

from g4spec.runtime.engine import Engine
from tests.company import IN_MEMORY, KINDS, N_CTX, PARALLEL, Alone, Engines, judge, pool_of


class Files(Engines):
    """Engines over files. All are kept for further rounds, with their recorded cycles."""

    def __init__(self, target: Path, device: str, cache_type: str | None) -> None:
        def load(kind: str | None, **more: int) -> Engine:
            draft = Path(kind) if kind and kind != "ngram" else kind
            return Engine.load(target, draft, n_ctx=N_CTX, device=device, cache_type=cache_type,
                               **more)  # fmt: skip

        self._load = lru_cache(maxsize=None)(load)
        self.vocab = load(None).target.config.n_vocab

    def alone(self, kind: str | None) -> Engine:
        return self._load(kind)

    def crowded(self, kind: str | None, parallel: int, tight: bool) -> Engine:
        return self._load(kind, parallel=parallel, pool=pool_of(parallel, tight),
                          prefix_cache=1 << 28)  # fmt: skip


def main() -> int:
    """Rounds over all kinds and sizes until there are enough answers, or time is up."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", type=Path)
    parser.add_argument("-md", "--draft", action="append", default=[])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cache-type")
    parser.add_argument("--answers", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="when to stop")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--longest", type=int, default=200, help="most tokens of an answer")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    engines, choices = IN_MEMORY, KINDS
    if args.model:
        engines = Files(args.model, args.device, args.cache_type)
        choices = (None, *args.draft)
    rng, plain, began = random.Random(args.seed), Alone(engines=engines), time.perf_counter()
    total: Counter[str] = Counter()
    kinds: dict[str, Counter[str]] = {Path(str(kind)).stem: Counter() for kind in choices}
    wrong: list[str] = []
    turn = most_live = 0
    try:
        while total["answers"] < args.answers and time.perf_counter() - began < args.seconds:
            kind, parallel = choices[turn % len(choices)], rng.choice(PARALLEL)
            count = min(3 + 2 * parallel, args.answers - total["answers"])
            verdict = judge(kind, parallel, f"{args.seed}/{turn}", count, args.longest,
                            tight=rng.random() < 0.3, plain=plain, engines=engines)  # fmt: skip
            figures = {k: v for k, v in asdict(verdict).items() if isinstance(v, int)}
            most_live = max(most_live, figures.pop("most_live"))
            total.update(figures)
            kinds[Path(str(kind)).stem].update(figures)
            wrong += verdict.wrong
            for line in verdict.wrong:
                print(line[:500], flush=True)
            turn += 1
            if turn % len(choices) == 0:
                print(f"{total['answers']} answers, {len(wrong)} differ", flush=True)
    except KeyboardInterrupt:  # whole rounds are kept
        pass
    found = {"device": args.device, "seed": args.seed, "longest": args.longest, "rounds": turn,
             **total, "most_live": most_live, "wrong": wrong, "drafts": kinds,
             "seconds": round(time.perf_counter() - began)}  # fmt: skip
    keep(args.out, f"company-{args.device}", found)
    print(f"{total['answers']} answers, {total['tokens']} tokens, {len(wrong)} differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
