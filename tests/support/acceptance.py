"""Recorded acceptance: for every position of a text, how many drafted tokens would be accepted. A
policy of draft lengths is replayed over these texts.

`data/acceptance.json` was recorded with the bundled family by `benchmarks/auto_record.py`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tests.support.one_text import CycleCosts, Fixed, Policy

LENGTHS = (0, 1, 2, 3, 4, 6, 8, 12, 15)
"""Fixed draft lengths that `auto` is compared with."""

MACHINES = {  # seconds by drafted tokens, as measured on real machines
    "31B on an H200, llama.cpp": {0: 0.0125, 1: 0.0150, 15: 0.0297},
    "26B-A4B on an H200, llama.cpp": {0: 0.0045, 1: 0.0060, 15: 0.0163},
    "two cores, fixed 16-row steps": {0: 0.0105, 1: 0.0140, 15: 0.0146},
    "chain draft on two cores": {0: 0.0105, 1: 0.0120, 15: 0.0330},
}


@dataclass(frozen=True, slots=True)
class Recording:
    """Recording of one draft of the family: longest proposal, seconds per cycle by drafted tokens,
    and texts by category."""

    longest: int
    seconds: dict[int, float]
    texts: dict[str, list[str]]


def recordings() -> dict[str, Recording]:
    """Return the recordings by the name of the draft."""
    data = json.loads((Path(__file__).parents[1] / "data" / "acceptance.json").read_text())
    found = {}
    for name, draft in data["drafts"].items():
        texts: dict[str, list[str]] = {}
        for prompt, held in draft["held"].items():
            texts.setdefault(prompt.rpartition("-")[0], []).append(held)
        seconds = {int(n): s for n, s in draft["seconds"].items()}
        found[name] = Recording(draft["longest"], seconds, texts)
    return found


@dataclass(slots=True)
class OverheadTracker:
    """Seconds and tokens of a run. `over`: largest excess over 1.02 times plain decoding at the end
    of any cycle, in seconds; `stretch`: the same over any sequence of cycles."""

    plain: float
    seconds: float = 0.0
    tokens: int = 0
    over: float = 0.0
    stretch: float = 0.0
    _lowest: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Count one cycle."""
        self.tokens, self.seconds = self.tokens + tokens, self.seconds + seconds
        beyond = self.seconds - 1.02 * self.tokens * self.plain
        self.over, self._lowest = max(self.over, beyond), min(self._lowest, beyond)
        self.stretch = max(self.stretch, beyond - self._lowest)


def replay(
    policy: Policy,
    costs: CycleCosts,
    held: str,
    most: int,
    bill: OverheadTracker,
    ahead: bool = False,
) -> None:
    """Decode one recorded text. The policy does not know where it ends.

    Args:
        held: one hexadecimal digit per position, the number of drafted tokens accepted there.
        most: largest draft length.
        ahead: ask for the next length before the result of a cycle is known, as a GPU runner does.
    """
    policy.begin()
    at = 0
    while at < len(held):
        count = policy.next(most)
        if ahead:
            policy.plan_ahead(count, most)
        accepted = min(count, int(held[at], 16))
        policy.observe(count, accepted, costs[count])
        bill.add(accepted + 1, costs[count])
        at += accepted + 1


def best_fixed(costs: CycleCosts, texts: list[str], most: int, delay: int = 0) -> float:
    """Return tokens per second of the best fixed length. `delay`: tokens of each text that are
    decoded before the first draft."""
    rates = []
    for count in (n for n in LENGTHS if n <= most):
        bill = OverheadTracker(costs[0])
        for held in texts:
            wait = min(delay, len(held))
            bill.add(wait, wait * costs[0])
            replay(Fixed(count), costs, held[wait:], most, bill)
        rates.append(bill.tokens / bill.seconds)
    return max(rates)
