"""Compare `--draft-max auto` with the best fixed draft length by replaying recorded texts.

    python benchmarks/auto_lengths.py

Texts, acceptance and cycle costs of the bundled family come from `auto_record.py`; costs of other
machines are added. No clock is read: the time of a policy is the sum of the costs of its cycles.
Two situations:

- one engine: all texts twice, one after another, as in `bench` and in a server;
- new engine: every text is the first one. The 2 % bound allows a cycle with a draft only after
  enough plain steps; `bound` is plain decoding until then and the best fixed length afterwards.

A share is tokens per second divided by those of the category's best fixed length, averaged over
the categories. `lost` is the largest cost of any stretch of text beyond 2 %, in plain steps.
"""

import sys
from pathlib import Path
from typing import Any

from watch import write_result

sys.path.insert(0, str(Path(__file__).parent.parent))

from g4spec.runtime import draft_length
from g4spec.runtime.draft_length import MARGIN
from tests.support.acceptance import (
    MACHINES,
    OverheadTracker,
    Recording,
    best_fixed,
    recordings,
    replay,
)
from tests.support.one_text import Auto, CycleCosts

CREDITS = (1, 2, 3, 4, 8, 16, 1000)


def one_engine(table: dict[int, float], recording: Recording) -> dict[str, float]:
    """Return the shares with one policy for all texts, in two rounds."""
    auto, costs, all_texts = Auto(table), CycleCosts(table), OverheadTracker(table[0])
    shares = []
    for _ in range(2):
        for texts in recording.texts.values():
            bill = OverheadTracker(table[0])
            for text in texts:
                replay(auto, costs, text, recording.longest, bill)
            all_texts.add(bill.tokens, bill.seconds)
            all_texts.stretch = max(all_texts.stretch, bill.stretch)
            best = best_fixed(costs, texts, recording.longest)
            shares.append(bill.tokens / bill.seconds / best)
    return {
        "share": sum(shares) / len(shares),
        "lowest": min(shares),
        "lost": all_texts.stretch / table[0],
    }


def new_engine(table: dict[int, float], recording: Recording) -> dict[str, float]:
    """Return the shares with a new policy for each text."""
    costs, shares, bounds, lost = CycleCosts(table), [], [], 0.0
    extra = min(costs[n] for n in range(1, recording.longest + 1)) / costs[0] - 1
    delay = max(0, int(extra / MARGIN))
    for texts in recording.texts.values():
        bill = OverheadTracker(table[0])
        for text in texts:
            own = OverheadTracker(table[0])
            replay(Auto(table), costs, text, recording.longest, own)
            bill.add(own.tokens, own.seconds)
            lost = max(lost, own.over)
        best = best_fixed(costs, texts, recording.longest)
        shares.append(bill.tokens / bill.seconds / best)
        bounds.append(best_fixed(costs, texts, recording.longest, delay) / best)
    return {
        "share": sum(shares) / len(shares),
        "bound": sum(bounds) / len(bounds),
        "first_draft_after": delay,
        "lost": lost / table[0],
    }


def rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in figures.items()}


def main() -> None:
    """Print the shares of every draft on every machine, then the averages for other credit
    limits."""
    rows: list[dict[str, Any]] = []
    for name, recording in recordings().items():
        # How many tokens n-gram lookup proposes is in no recording: only where they cost nothing.
        machines = {} if name == "ngram" else MACHINES
        for machine, table in {"recorded": recording.seconds, **machines}.items():
            rows.append(
                {
                    "draft": name,
                    "costs": machine,
                    "one engine": rounded(one_engine(table, recording)),
                    "new engine": rounded(new_engine(table, recording)),
                }
            )
            print(rows[-1])
    credits: dict[int, dict[str, float]] = {}
    chosen = draft_length.CREDIT
    for credit in CREDITS:
        draft_length.CREDIT = credit
        found = [
            one_engine(t, r)
            for name, r in recordings().items()
            if name != "ngram"
            for t in (r.seconds, *MACHINES.values())
        ]
        credits[credit] = rounded(
            {
                "share": sum(f["share"] for f in found) / len(found),
                "lost": max(f["lost"] for f in found),
            }
        )
        print("credit", credit, credits[credit])
    draft_length.CREDIT = chosen
    write_result(None, "auto-lengths", {"credit": chosen, "rows": rows, "by credit": credits})


if __name__ == "__main__":
    main()
