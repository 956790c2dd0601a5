"""Prometheus metrics under the names of llama.cpp."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from g4spec.core import MAX_DRAFT
from g4spec.runtime.request import Stats
from g4spec.server.engine_client import EngineLike


@dataclass(slots=True)
class Throughput:
    """Tokens of the texts that ended, and the seconds spent on them.

    Attributes:
        timed: tokens that the seconds belong to: the first generated token of a text belongs to
            prefill.
    """

    tokens: int = 0
    timed: int = 0
    seconds: float = 0.0

    def add(self, tokens: int, timed: int, seconds: float) -> None:
        """Add a text."""
        self.tokens += tokens
        self.timed += timed
        self.seconds += seconds

    @property
    def per_second(self) -> float:
        """Timed tokens per second; 0 if there are none."""
        return self.timed / self.seconds if self.timed and self.seconds else 0.0


class LlamaCppMetrics:
    """A collector of llama.cpp's metrics. Texts count when they end.

    The averages `prompt_tokens_seconds` and `predicted_tokens_seconds` are, as in llama.cpp, those
    of the texts that ended since /metrics was last read.
    """

    def __init__(self, engine: EngineLike) -> None:
        self._engine = engine
        self._prompt, self._predicted = Throughput(), Throughput()
        self._cached = self._longest = 0
        self._drafts = self._drafted = self._accepted = 0
        self._accepted_at = [0] * MAX_DRAFT
        self.begin_window()

    def begin_window(self) -> None:
        """Begin a new window of the averages."""
        self._prompt_window, self._predicted_window = Throughput(), Throughput()

    def observe_end(self, stats: Stats) -> None:
        """Count a text that has ended."""
        computed = max(stats.read_tokens - stats.cached_tokens, 0)
        for prompt in (self._prompt, self._prompt_window):
            prompt.add(computed, computed, stats.prefill_seconds)
        for predicted in (self._predicted, self._predicted_window):
            predicted.add(stats.tokens, max(stats.tokens - 1, 0), stats.seconds)
        self._cached += stats.cached_tokens
        self._longest = max(self._longest, stats.prompt_tokens + stats.tokens)
        self._drafts += stats.drafted_by_position[0]
        self._drafted += stats.drafted
        self._accepted += stats.accepted
        for i, count in enumerate(stats.accepted_by_position):
            self._accepted_at[i] += count

    def longest_text(self) -> bytes:
        """Return the metric `n_tokens_max` as text: a counter without the suffix `_total`, which
        prometheus_client cannot write."""
        name = "llamacpp:n_tokens_max"
        return (
            f"# HELP {name} Largest number of prompt and generated tokens of a text.\n"
            f"# TYPE {name} counter\n{name} {float(self._longest)}\n"
        ).encode()

    def collect(self) -> Iterable[Metric]:
        """See `prometheus_client.registry.Collector`."""
        stats = self._engine.stats()
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens computed, without cached ones.", self._prompt.tokens),
            ("prompt_tokens_cached", "Prompt tokens found in the prefix cache.", self._cached),
            ("prompt_seconds", "Seconds of prefill.", self._prompt.seconds),
            ("tokens_predicted", "Generated tokens.", self._predicted.tokens),
            ("tokens_predicted_seconds", "Seconds of decoding.", self._predicted.seconds),
            ("n_decode", "Decode steps, without prefill.", stats.steps),
            ("spec_decode_num_drafts", "Draft proposals.", self._drafts),
            ("spec_decode_num_draft_tokens", "Drafted tokens.", self._drafted),
            ("spec_decode_num_accepted_tokens", "Accepted drafted tokens.", self._accepted),
        ):
            yield CounterMetricFamily(f"llamacpp:{name}", text, value)
        by_position = CounterMetricFamily(
            "llamacpp:spec_decode_num_accepted_tokens_per_pos",
            "Accepted drafted tokens by position.",
            labels=["position"],
        )
        for i, count in enumerate(self._accepted_at):
            by_position.add_metric([str(i)], count)
        yield by_position
        window = "of the texts that ended since the last request of /metrics"
        for name, text, gauge in (
            (
                "prompt_tokens_seconds",
                f"Prompt tokens per second {window}.",
                self._prompt_window.per_second,
            ),
            (
                "predicted_tokens_seconds",
                f"Generated tokens per second {window}.",
                self._predicted_window.per_second,
            ),
            ("requests_processing", "Running texts.", stats.running),
            ("requests_deferred", "Waiting texts.", stats.waiting),
            (
                "n_busy_slots_per_decode",
                "Mean number of texts per decode step.",
                stats.step_requests / stats.steps if stats.steps else 0.0,
            ),
        ):
            yield GaugeMetricFamily(f"llamacpp:{name}", text, gauge)
