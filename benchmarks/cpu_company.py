"""Answers in company against the same alone, by the thousand, from a seed: kept as dated JSON.

    python benchmarks/cpu_company.py [--answers 10000] [--seed 1] [--longest 200]

Small random models, every kind of draft and none. Requests are drawn with temperatures, filters,
penalties, bias, masks, log-probabilities, stop texts, prompts of 1 to 600 tokens and some that
share 512 or 1024; they arrive, end and are cancelled at random, 1 to 32 live, in pools that are
large enough or not. Each text, each logit of a chosen token, each log-probability and each proposal
must be, bit for bit, that of the same request alone, cold, without a draft (proposals: with it).
Exit code 1 if one is not.
"""

import argparse
import random
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import torch
from watch import keep

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.company import KINDS, PARALLEL, Alone, judge


def main() -> int:
    """Rounds over all kinds and sizes until there are enough answers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--answers", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--longest", type=int, default=200, help="most tokens of an answer")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rng, plain, began = random.Random(args.seed), Alone(), time.perf_counter()
    total: Counter[str] = Counter()
    kinds: dict[str, Counter[str]] = {str(kind): Counter() for kind in KINDS}
    wrong: list[str] = []
    turn = most_live = 0
    while total["answers"] < args.answers:
        kind, parallel = KINDS[turn % len(KINDS)], rng.choice(PARALLEL)
        count = min(3 + 2 * parallel, args.answers - total["answers"])
        verdict = judge(kind, parallel, f"{args.seed}/{turn}", count, args.longest,
                        tight=rng.random() < 0.4, plain=plain)  # fmt: skip
        figures = {k: v for k, v in asdict(verdict).items() if isinstance(v, int)}
        most_live = max(most_live, figures.pop("most_live"))
        total.update(figures)
        kinds[str(kind)].update(figures)
        wrong += verdict.wrong
        for line in verdict.wrong:
            print(line[:500], flush=True)
        turn += 1
        if turn % len(KINDS) == 0:
            print(f"{total['answers']} answers, {len(wrong)} differ", flush=True)
    found = {"seed": args.seed, "longest": args.longest, "rounds": turn, **total,
             "most_live": most_live, "wrong": wrong, "drafts": kinds,
             "seconds": round(time.perf_counter() - began)}  # fmt: skip
    keep(args.out, "company", found)
    print(f"{total['answers']} answers, {total['tokens']} tokens, {len(wrong)} differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
