"""How many tokens each text of a batch drafts in the next cycle.

One budget for the whole batch: drafted tokens of all texts are ranked by how likely they are to be
accepted, and as many of the best are admitted as give the most expected tokens per second, by a
table of what cycles cost. Texts with a draft length of their own (`--draft-max 4`) get it; the
others are planned around them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Literal

from g4spec.core import MAX_DRAFT

MARGIN = 0.02
"""Most that drafting may cost against plain decoding, as a share of it."""

CREDIT = 4
"""Plain steps of time that may at most be saved up and risked later: what a stretch of text can
lose beyond `MARGIN` where a good draft turns bad. With 4 `auto` is nearly as fast as without a
limit, with 2 it is not (`benchmarks/auto_lengths.py`)."""

RISK = 0.5
"""Share of what was saved up that one cycle may risk: a second failure must not end drafting."""

SPIKE = 1.5
"""A cycle counts for at most this many times its expected seconds: a machine that was busy with
something else would have held up plain decoding too."""

PROBE = 64
"""Steps without a draft after which a draft that was useless is tried again."""

PRIOR, PRIOR_WEIGHT = 0.6, 4.0
"""Acceptance of the first position before any was seen, and how many observations it is worth."""


class Costs:
    """Seconds of a cycle by texts and drafted tokens: what was measured first, straight lines in
    between, and how much slower or faster cycles have become since.

    Steps take longer as contexts grow. Cycles with a draft keep the shape of their table and share
    one factor, plain steps have another. Where one has become faster since the other was last
    measured, the other has too; what has become slower may have its own reasons.

    Args:
        measured: (texts, drafted tokens each) -> seconds; plain steps have 0 tokens.
        padded: every text pays for as many rows as the one that drafts most.
    """

    def __init__(self, measured: Mapping[tuple[int, int], float], padded: bool = False) -> None:
        self._tables: dict[int, dict[int, float]] = {}
        for (texts, count), seconds in measured.items():
            self._tables.setdefault(texts, {})[count] = seconds
        assert all(0 in t and len(t) > 1 for t in self._tables.values()), measured
        self._padded = padded
        self._plain = self._drafted = 1.0  # factors
        self._plain_then = self._drafted_then = 1.0  # each when the other was measured last

    def plain(self, texts: int) -> float:
        """Seconds of a step in which nobody drafts."""
        return self._measured(texts, 0) * self._plain_factor()

    def __call__(self, counts: Sequence[int]) -> float:
        """Seconds of a cycle in which text i drafts counts[i] tokens."""
        if not any(counts):
            return self.plain(len(counts))
        return self._cycle(counts) * self._drafted_factor()

    def update(self, counts: Sequence[int], seconds: float, weight: float = 0.2) -> None:
        """Take in what a cycle took."""
        change = 1 + weight * (seconds / self(counts) - 1)
        if any(counts):
            self._drafted = self._drafted_factor() * change
            self._plain_then = self._plain_factor()
        else:
            self._plain = self._plain_factor() * change
            self._drafted_then = self._drafted_factor()

    def _plain_factor(self) -> float:
        """Seconds of plain steps over those measured first."""
        return self._plain * min(1.0, self._drafted / self._drafted_then)

    def _drafted_factor(self) -> float:
        """Seconds of cycles with a draft over those measured first."""
        return self._drafted * min(1.0, self._plain / self._plain_then)

    def _cycle(self, counts: Sequence[int]) -> float:
        """Seconds measured for a cycle with a draft: of the longest proposal for all texts, or of
        a step for all and proposals for some."""
        if self._padded or len(counts) == 1:
            return self._measured(len(counts), max(counts))
        drafting = [n for n in counts if n]
        mean, some = sum(drafting) / len(drafting), len(drafting)
        return (self._measured(len(counts), 0) + self._measured(some, mean)
                - self._measured(some, 0))  # fmt: skip

    def _measured(self, texts: int, count: float) -> float:
        """Seconds by straight lines between the numbers of texts that were measured; beyond the
        last one, in proportion."""
        known = sorted(self._tables)
        at = bisect_left(known, texts)
        if at == len(known):
            return self._line(known[-1], count) * texts / known[-1]
        if known[at] == texts or at == 0:
            return self._line(known[at], count)
        low, high = known[at - 1], known[at]
        a, b = self._line(low, count), self._line(high, count)
        return a + (b - a) * (texts - low) / (high - low)

    def _line(self, texts: int, count: float) -> float:
        """Seconds by straight lines between the counts that were measured. 0 is plain decoding: it
        never takes part in the interpolation."""
        table = self._tables[texts]
        if not count:
            return table[0]
        counts = sorted(n for n in table if n)
        low = max((n for n in counts if n <= count), default=counts[0])
        high = min((n for n in counts if n >= count), default=counts[-1])
        if low >= high:
            return table[low]
        return table[low] + (table[high] - table[low]) * (count - low) / (high - low)


class Acceptance:
    """How often the drafted token of each position held, given that those before it did.

    Args:
        keep: weight that an observation has after one more.
    """

    def __init__(self, keep: float) -> None:
        self._keep = keep
        self._held = [0.0] * MAX_DRAFT
        self._tried = [0.0] * MAX_DRAFT

    def copy(self) -> Acceptance:
        """The same, to go on from."""
        other = Acceptance(self._keep)
        other._held, other._tried = list(self._held), list(self._tried)
        return other

    def observe(self, count: int, accepted: int) -> None:
        """Of `count` drafted tokens the first `accepted` held; rejection says nothing about later
        ones."""
        for i in range(min(accepted + 1, count)):
            self._tried[i] = self._tried[i] * self._keep + 1
            self._held[i] = self._held[i] * self._keep + (i < accepted)

    def survival(self, most: int) -> list[float]:
        """How likely the first 1, 2, ... `most` drafted tokens all hold."""
        out, reach, accept = [], 1.0, PRIOR
        for held, tried in zip(self._held[:most], self._tried, strict=False):
            # What is not known of a position yet is taken from the one before it.
            accept = (held + PRIOR_WEIGHT * accept) / (tried + PRIOR_WEIGHT)
            reach *= accept
            out.append(reach)
        return out


class Account:
    """Seconds that may be lost to drafting: never negative, at most CREDIT steps."""

    def __init__(self, balance: float = 0.0) -> None:
        self.balance = self._uncapped = balance

    def add(self, seconds: float, step: float) -> None:
        """Earn, or pay; `step`: seconds of a plain step."""
        self._uncapped = self.balance + seconds
        self.balance = min(self._uncapped, CREDIT * step)

    def correct(self, seconds: float, step: float) -> None:
        """Take back some of what was added last."""
        self._uncapped += seconds
        self.balance = min(self._uncapped, CREDIT * step)

    def covers(self, extra: float, count: int, step: float) -> bool:
        """Whether a cycle that costs `extra` beyond a plain step may be wasted."""
        saved = self.balance if count == 1 else RISK * self.balance
        return extra <= saved + MARGIN * step


class TextState:
    """What a policy knows of one text. Make one with `Lengths.text`."""

    def __init__(self, owner: Lengths, asked: int | Literal["auto"]) -> None:
        self.asked = asked
        self.acceptance = owner.acceptance.copy()
        self.account = Account(owner.account.balance)
        self.since_draft = 0
        self._owner = owner

    @property
    def auto(self) -> bool:
        return self.asked == "auto"

    def cut(self, tokens: int) -> None:
        """The last `tokens` of the newest cycle lie behind the end of the text: nobody needed
        them."""
        if tokens:
            self._owner._cut(self, tokens)


class Lengths:
    """Plans for all texts of an engine; what it learns and earns lives as long.

    Texts with `auto` share one budget: the plan with the most expected tokens per second that could
    be wasted as a whole. What a cycle costs beyond a plain step must be covered by the account of
    the engine and of every such text in the batch, whether it drafts or not. An account begins at
    0, earns MARGIN of every plain step's time and all time that drafts win, and pays for what they
    lose; a new text's begins with what the engine has. So at the end of every cycle decoding has
    taken at most 1 + MARGIN times what plain decoding would have, for the engine and, beyond what a
    text began with, for each text, whatever the draft does and as far as costs are known before a
    cycle; one that took longer is made up for before the next draft is asked for. An account never
    exceeds CREDIT steps, so any stretch of text costs at most MARGIN and that much.

    The bound has a price: where a draft of one token costs 1.2 steps, the first one of a new engine
    comes after 9 tokens, and no rule that keeps the bound can be earlier. Later texts begin with
    what was earned and learned.

    Args:
        padded: see `Costs`.
        memory: cycles after which an observation's weight has halved.

    Attributes:
        costs: None until they were measured; `auto` drafts nothing before.
    """

    def __init__(self, padded: bool = False, memory: int = 12) -> None:
        self.padded = padded
        self.costs: Costs | None = None
        self.acceptance = Acceptance(0.5 ** (1.0 / memory))
        self.account = Account()
        self._asked: list[list[int]] = []  # plans whose cycles have not been observed yet
        self._texts = 1  # of the newest cycle observed

    @property
    def wants_costs(self) -> bool:
        """Whether costs are to be measured before `auto` drafts anything."""
        return self.costs is None

    def measured(self, seconds: Mapping[tuple[int, int], float]) -> None:
        """Take over what cycles take: (texts, drafted tokens each) -> seconds."""
        self.costs = Costs(seconds, self.padded)

    def text(self, asked: int | Literal["auto"]) -> TextState:
        """A new text: drafts `asked` tokens in every cycle, or as many as pays."""
        return TextState(self, asked)

    def plan(self, texts: Sequence[TextState], most: Sequence[int]) -> list[int]:
        """Choose the tokens to draft for each text, at most most[i]."""
        counts = self._best(texts, most, 0.0)
        self._probe(texts, most, counts)
        self._commit(texts, counts)
        return counts

    def again(
        self, texts: Sequence[TextState], counts: Sequence[int], most: Sequence[int]
    ) -> bool:
        """True if the next plan for the same texts is certain to be `counts`, whatever is observed
        meanwhile, with room for `most` at least. Then it is the plan, and not asked for again.

        It is certain where it is the plan now, even if all of this cycle should be wasted. What
        would change the plan does so a cycle later then."""
        if any(t.auto and not n and t.since_draft >= PROBE
               for t, n in zip(texts, counts, strict=True)):  # fmt: skip
            return False
        lost = 0.0
        if self.costs is not None:  # if nothing is accepted
            lost = self.costs(counts) - (1 + MARGIN) * self.costs.plain(len(counts))
        if self._best(texts, most, lost) != list(counts):
            return False
        self._commit(texts, list(counts))
        return True

    def observe(
        self,
        texts: Sequence[TextState],
        counts: Sequence[int],
        accepted: Sequence[int],
        seconds: float,
    ) -> None:
        """Take in a cycle that drafted counts[i] tokens for texts[i], of which accepted[i] held."""
        asked = self._asked.pop(0) if self._asked else list(counts)
        for text, count, held in zip(texts, counts, accepted, strict=True):
            text.acceptance.observe(count, held)
            self.acceptance.observe(count, held)
        if self.costs is None:
            return
        # A draft that proposed nothing took its time all the same: not a plain step.
        tried = counts if any(counts) else asked
        seconds = min(seconds, SPIKE * self.costs(tried))
        if any(counts) or not any(asked):
            self.costs.update(counts, seconds)
        self._texts = len(texts)
        step = self.costs.plain(len(texts))
        for text, held in zip(texts, accepted, strict=True):
            worth = (held + 1) * step if any(asked) else seconds
            text.account.add((1 + MARGIN) * worth - seconds, step)
        mean = sum(accepted) / len(accepted) + 1
        worth = mean * step if any(asked) else seconds
        self.account.add((1 + MARGIN) * worth - seconds, step)

    def drop(self) -> None:
        """Cycles that were planned and not observed never will be."""
        self._asked.clear()

    def _commit(self, texts: Sequence[TextState], counts: list[int]) -> None:
        """The next cycle is of these counts."""
        for text, count in zip(texts, counts, strict=True):
            text.since_draft = 0 if count else text.since_draft + 1
        self._asked.append(counts)

    def _cut(self, text: TextState, tokens: int) -> None:
        if self.costs is not None:
            step = self.costs.plain(self._texts)
            text.account.correct(-(1 + MARGIN) * tokens * step, step)
            self.account.correct(-(1 + MARGIN) * tokens * step / self._texts, step)

    def _best(
        self, texts: Sequence[TextState], most: Sequence[int], lost: float
    ) -> list[int]:
        """The affordable plan with the most expected tokens per second, if every account held
        `lost` seconds less; drafted tokens are admitted by how likely they are to hold."""
        counts = [0 if t.asked == "auto" else min(t.asked, m)
                  for t, m in zip(texts, most, strict=True)]  # fmt: skip
        if self.costs is None or not any(t.auto for t in texts):
            return counts
        reaches = {i: t.acceptance.survival(m)
                   for i, (t, m) in enumerate(zip(texts, most, strict=True)) if t.auto}  # fmt: skip
        expected = float(len(texts)) + sum(
            sum(t.acceptance.survival(n)) for t, n in zip(texts, counts, strict=True)
        )
        best, rate = list(counts), expected / self.costs(counts)
        ranked = sorted(reaches, key=lambda i: -sum(reaches[i]))
        for some in _doubling(len(ranked)):  # a text that drafts at all costs more than one token
            plan, tokens = list(counts), expected
            slots = [(reach, -i) for i in ranked[:some] for reach in reaches[i]]
            for reach, i in sorted(slots, reverse=True):
                plan[-i] += 1
                tokens += reach
                found = tokens / self.costs(plan)
                if found > rate and self._affordable(texts, plan, lost):
                    best, rate = list(plan), found
        return best

    def _affordable(self, texts: Sequence[TextState], counts: Sequence[int], lost: float) -> bool:
        """Whether every account covers a cycle that is wasted as a whole."""
        assert self.costs is not None
        step = self.costs.plain(len(counts))
        extra, longest = self.costs(counts) - step, max(counts)
        accounts = [self.account, *(t.account for t in texts if t.auto)]
        return all(Account(a.balance - lost).covers(extra, longest, step) for a in accounts)

    def _probe(
        self, texts: Sequence[TextState], most: Sequence[int], counts: list[int]
    ) -> None:
        """Try a draft again that was useless for long."""
        for i, text in enumerate(texts):
            if self.costs is not None and text.auto and text.since_draft >= PROBE and not counts[i]:
                counts[i] = min(2, most[i])
                if not self._affordable(texts, counts, 0.0):
                    counts[i] = 0


def _doubling(most: int) -> list[int]:
    """1, 2, 4, ... below `most`, and `most`."""
    return [*(1 << i for i in range(most.bit_length()) if 1 << i < most), most] if most else []
