"""N-gram lookup: proposes what followed the last time these tokens were seen. Needs no file."""

from __future__ import annotations

from g4spec.models.spec import MAX_DRAFT, Chooser, Committed

ARCH = None
TITLE = "n-gram lookup"


class Drafter:
    """Copies the continuation of the latest earlier occurrence of the newest tokens.

    Args:
        longest, shortest: lengths of the suffix that is searched for, longest first.
    """

    name = "ngram"
    taps: tuple[int, ...] = ()
    max_tokens = MAX_DRAFT

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        self.longest, self.shortest = longest, shortest
        self.reset()

    def reset(self) -> None:
        """Forget the sequence."""
        self._ids: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}

    def commit(self, step: Committed) -> None:
        """Remember verified tokens, and where each short run of them ended."""
        for token in step.ids:
            for n in range(self.shortest, self.longest + 1):
                if len(self._ids) >= n:
                    self._ends[tuple(self._ids[-n:])] = len(self._ids)
            self._ids.append(token)

    def propose(self, anchor: int, position: int, count: int, chooser: Chooser) -> list[int]:
        """The tokens that followed; none when the suffix was never seen."""
        history = [*self._ids, anchor]
        for n in range(self.longest, self.shortest - 1, -1):
            end = self._ends.get(tuple(history[-n:]))
            if end is not None:
                return history[end : end + count]
        return []
