"""Stream generated text to the terminal, and format the statistics line after it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from g4spec.cli.render import Output

if TYPE_CHECKING:
    from g4spec.core import Cycle
    from g4spec.runtime.request import Stats
    from g4spec.runtime.tokenizer import Tokenizer
    from g4spec.server.chat_client import Reply

Marking = Literal["", "first", "all"]
"""Drafted tokens to mark: "": none; "first": accepted ones and the first rejected one of each
proposal; "all": accepted and rejected ones."""

LEGEND = (("accepted", "good"), ("rejected", "struck"), ("the target's own", None))


class Writer:
    """A writer that prints text as soon as it cannot be part of a stop string.

    Args:
        marking: which drafted tokens to mark as accepted or rejected. A rejected token is printed
            before its correction.
    """

    def __init__(
        self, out: Output, tokenizer: Tokenizer, stops: Sequence[str], marking: Marking
    ) -> None:
        self.out, self._tokenizer, self._stops = out, tokenizer, stops
        self._marking = marking
        self._stream = tokenizer.stream()
        self._waiting: deque[tuple[str, str | None]] = deque()
        self._written = 0
        if marking:
            out.legend(LEGEND)

    def cycle(self, cycle: Cycle, text: str) -> None:
        """Add the tokens of a cycle, after which the whole text is `text`."""
        from g4spec.runtime.request import stop_prefix_length

        accepted, own = cycle.tokens[: cycle.accepted], cycle.tokens[cycle.accepted :]
        self._waiting.append((self._stream.push(accepted), "good" if self._marking else None))
        wrong = cycle.drafted[cycle.accepted :] if self._marking and own else []
        for id in wrong if self._marking == "all" else wrong[:1]:
            self._waiting.append((self._tokenizer.decode([id], special=True), "struck"))
        self._waiting.append((self._stream.push(own), None))
        self._write(len(text) - stop_prefix_length(text, self._stops))

    def finish(self, text: str) -> None:
        """Print the rest of `text`, which is now complete."""
        self._waiting.append((self._stream.finish(), None))
        self._write(len(text))
        self.out.stream("\n")

    def _write(self, end: int) -> None:
        """Print until `end` characters of text are printed; rejected tokens do not count."""
        while self._waiting and (self._written < end or self._waiting[0][0] == ""):
            piece, style = self._waiting.popleft()
            if style == "struck":
                self.out.stream_marked(piece, style)
                continue
            now, later = piece[: end - self._written], piece[end - self._written :]
            if later:
                self._waiting.appendleft((later, style))
            self._written += len(now)
            self.out.stream(now) if style is None else self.out.stream_marked(now, style)


REPORTED_STEPS = 8, 150
"""`auto_note` returns a note only for texts of this minimum to this maximum number of steps."""


def auto_note(stats: Stats) -> str | None:
    """Return a note if `auto` drafted in less than half of the steps of a short text, or None.

    A new process has no measurements of the pair, and `auto` may lose at most 2 % of the time by
    drafting. So it drafts rarely at first.
    """
    drafted, (least, most) = stats.drafted_by_position[0], REPORTED_STEPS
    if not least <= stats.cycles <= most or 2 * drafted >= stats.cycles:
        return None
    return (
        f"auto drafted in {drafted} of {stats.cycles} steps: it has not measured this pair yet. "
        "--draft-max 5 drafts from the start"
    )


def stats_line(stats: Stats, drafting: bool) -> str:
    """Return one line about a run. `drafting`: True if a draft was used."""
    parts = [f"{stats.tokens} token{'s' * (stats.tokens != 1)}"]
    if stats.tokens_per_second:
        parts[0] += f", {stats.tokens_per_second:.1f} tok/s"
    if stats.drafted:
        share = 100 * stats.accepted / stats.drafted
        parts.append(f"{stats.committed_per_cycle:.2f} tokens per step, {stats.cycles} steps")
        parts.append(f"drafted {stats.drafted}, accepted {stats.accepted} ({share:.0f} %)")
    elif drafting:
        parts.append("drafted 0")
    rate = stats.prompt_tokens / stats.prefill_seconds if stats.prefill_seconds else 0.0
    parts.append(f"prompt {stats.prompt_tokens} tokens, {rate:.0f} tok/s")
    parts.append(f"ended by {stats.stop_reason}")
    return " | ".join(parts)


def answer_stats_line(answer: Reply) -> str:
    """Return one line about an answer in a conversation."""
    t, parts = answer.timings, []
    if "predicted_n" in t:
        parts.append(f"{t['predicted_n']} tokens, {t.get('predicted_per_second', 0):.1f} tok/s")
    if t.get("draft_n"):
        parts.append(f"drafted {t['draft_n']}, accepted {t.get('draft_n_accepted', 0)}")
    if t.get("cache_n"):
        parts.append(f"{t['cache_n']} prompt tokens cached")
    return " | ".join([*parts, f"ended by {answer.finish or 'the server'}"])
