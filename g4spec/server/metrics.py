"""Prometheus metrics, under the names of vLLM and llama.cpp, and g4spec's own."""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from starlette.responses import Response

from g4spec.core import MAX_DRAFT
from g4spec.runtime.request import Stats
from g4spec.server.engine_client import EngineLike
from g4spec.server.llamacpp_metrics import LlamaCppMetrics

LATENCY_BUCKETS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
)
TOKEN_LATENCY_BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.015,
    0.02,
    0.03,
    0.04,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
)


class RouterMetrics:
    """The counter of a server of several models for requests that reach none of them."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._errors = Counter(
            "g4spec:router_request_refused",
            "Requests answered with an error before a model was chosen, by status.",
            ("status",),
            registry=self._registry,
        )

    def count_error(self, status: int) -> None:
        """See `Metrics.count_error`."""
        self._errors.labels(str(status)).inc()

    def text(self) -> bytes:
        """Return the counter in Prometheus' text format."""
        return generate_latest(self._registry)


class Metrics:
    """Counters, histograms and gauges of one model.

    Args:
        engine: source of the gauges.
        model: value of the label `model_name` of vLLM's metrics.
    """

    def __init__(self, engine: EngineLike, model: str) -> None:
        self.registry = CollectorRegistry()
        self._label = (model,)
        names = ("model_name",)

        def counter(name: str, text: str, *more: str) -> Counter:
            return Counter(f"vllm:{name}", text, (*names, *more), registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"vllm:{name}", text, names, buckets=buckets, registry=self.registry)

        self.drafts = counter("spec_decode_num_drafts", "Number of draft proposals.")
        self.drafted = counter("spec_decode_num_draft_tokens", "Number of drafted tokens.")
        self.accepted = counter(
            "spec_decode_num_accepted_tokens", "Number of accepted drafted tokens."
        )
        self.accepted_at = counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Accepted drafted tokens by position.",
            "position",
        )
        self.prompt = counter("prompt_tokens", "Number of prompt tokens.")
        self.generated = counter("generation_tokens", "Number of generated tokens.")
        self.queries = counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
        )
        self.hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self.preempted = counter("num_preemptions", "Number of preemptions.")
        self.finished_texts = counter(
            "request_success", "Finished texts by finish reason.", "finished_reason"
        )
        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "Seconds until the first token.", LATENCY_BUCKETS
        )
        self.inter_token_latency = histogram(
            "inter_token_latency_seconds", "Seconds between tokens.", TOKEN_LATENCY_BUCKETS
        )
        self.request_latency = histogram(
            "e2e_request_latency_seconds", "Seconds until the last token.", LATENCY_BUCKETS
        )
        self.queue_time = histogram(
            "request_queue_time_seconds", "Seconds spent waiting for a slot.", LATENCY_BUCKETS
        )
        self._register_own(names)
        for i in range(MAX_DRAFT):
            self.accepted_at.labels(*self._label, str(i))
        for each in (
            self.drafts,
            self.drafted,
            self.accepted,
            self.prompt,
            self.generated,
            self.queries,
            self.hits,
            self.preempted,
        ):
            each.labels(*self._label)
        self._llama = self._register_others(engine, names)

    def _register_own(self, names: tuple[str, ...]) -> None:
        """Register what neither vLLM nor llama.cpp has a name for."""

        def counter(name: str, text: str, *more: str) -> Counter:
            return Counter(f"g4spec:{name}", text, (*names, *more), registry=self.registry)

        self.errors = counter(
            "request_refused",
            "Requests answered with an error, by status; streams may end with one.",
            "status",
        )
        self.drafted_at = counter(
            "spec_decode_num_draft_tokens_per_pos", "Drafted tokens by position.", "position"
        )
        self.steps = counter("decode_steps", "Steps of texts after their prefill.")
        self.draft_seconds = counter("draft_seconds", "Seconds of these steps spent on drafting.")
        self.step_seconds = counter(
            "verify_seconds", "Seconds of these steps spent on verification."
        )
        for each in (self.steps, self.draft_seconds, self.step_seconds):
            each.labels(*self._label)
        for i in range(MAX_DRAFT):
            self.drafted_at.labels(*self._label, str(i))

    def _register_others(self, engine: EngineLike, names: tuple[str, ...]) -> LlamaCppMetrics:
        """Register the gauges and llama.cpp's metrics; return the latter."""
        for name, text, value in (
            ("num_requests_running", "Running texts.", lambda: engine.stats().running),
            ("num_requests_waiting", "Waiting texts.", lambda: engine.stats().waiting),
            (
                "kv_cache_usage_perc",
                "Used fraction of the KV cache pages (0 to 1).",
                lambda: 1 - engine.stats().pages_free / engine.stats().pages,
            ),
        ):
            gauge = Gauge(f"vllm:{name}", text, names, registry=self.registry)
            gauge.labels(*self._label).set_function(value)
        llama = LlamaCppMetrics(engine)
        self.registry.register(llama)
        return llama

    def observe_tokens(self, count: int, seconds: float) -> None:
        """Observe `count` tokens that arrived `seconds` after the previous ones."""
        for _ in range(count):
            self.inter_token_latency.labels(*self._label).observe(seconds / count)

    def observe_end(self, stats: Stats, seconds: float, reason: str) -> None:
        """Count a text that has ended after `seconds`; if its prefill never began, it waited for as
        long and looked nothing up in the prefix cache."""
        begun = reason != "abort" or stats.queue_seconds > 0
        self._llama.observe_end(stats)
        label = self._label
        self.request_latency.labels(*label).observe(seconds)
        self.queue_time.labels(*label).observe(stats.queue_seconds if begun else seconds)
        self.finished_texts.labels(*label, reason).inc()
        for counter, count in (
            (self.drafts, stats.drafted_by_position[0]),
            (self.drafted, stats.drafted),
            (self.accepted, stats.accepted),
            (self.prompt, stats.prompt_tokens),
            (self.generated, stats.tokens),
            (self.queries, stats.prompt_tokens if begun else 0),
            (self.hits, stats.cached_tokens),
            (self.preempted, stats.preempted),
            (self.steps, stats.cycles),
            (self.draft_seconds, stats.draft_seconds),
            (self.step_seconds, stats.step_seconds),
        ):
            counter.labels(*label).inc(count)
        for i in range(MAX_DRAFT):
            self.drafted_at.labels(*label, str(i)).inc(stats.drafted_by_position[i])
            self.accepted_at.labels(*label, str(i)).inc(stats.accepted_by_position[i])

    def observe_first_token(self, seconds: float) -> None:
        """Observe the time to the first token of a text."""
        self.time_to_first_token.labels(*self._label).observe(seconds)

    def count_error(self, status: int) -> None:
        """Count a request that is refused, or that fails after its stream has begun."""
        self.errors.labels(*self._label, str(status)).inc()

    def value(self, counter: Counter, *more: str) -> float:
        """Return the value of a counter."""
        wanted = [*self._label, *more]
        samples = [s for metric in counter.collect() for s in metric.samples]
        return sum(
            s.value
            for s in samples
            if s.name.endswith("_total") and list(s.labels.values()) == wanted
        )

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format, and begin a new window of llama.cpp's
        averages."""
        text = generate_latest(self.registry) + self._llama.longest_text()
        self._llama.begin_window()
        return text


def metrics_response(text: bytes, started: int) -> Response:
    """Return the response of /metrics; `started`: Unix time of the start."""
    response = Response(text, media_type="text/plain; version=0.0.4")
    # The header is spelled as in llama.cpp; Starlette would write it in lower case.
    response.raw_headers.append((b"Process-Start-Time-Unix", str(started).encode()))
    return response
