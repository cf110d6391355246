"""/metrics in Prometheus' text format. Metrics that vLLM also has keep vLLM's names and meanings, so dashboards for
vLLM need only another prefix.

The engines' counters are read when Prometheus asks; the latencies of requests are recorded when they occur.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gptworks.infer.request import Request, Statistics

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
FINISHED = ("stop", "length")
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000)

_Family = GaugeMetricFamily | CounterMetricFamily
_COUNTED: tuple[tuple[type[_Family], str, str, Callable[[Statistics], float]], ...] = (
    (GaugeMetricFamily, "num_requests_running", "Texts in a slot.", lambda s: s.running),
    (GaugeMetricFamily, "num_requests_waiting", "Texts that wait for a slot.", lambda s: s.waiting),
    (GaugeMetricFamily, "kv_cache_usage_perc", "Share of the slots in use; 1 is all.",
     lambda s: s.slots_used / s.slots if s.slots else 0),
    (CounterMetricFamily, "prompt_tokens", "Tokens of prompts.", lambda s: s.prompt_tokens),
    (CounterMetricFamily, "generation_tokens", "Tokens generated.", lambda s: s.generated_tokens),
    (CounterMetricFamily, "prefix_cache_queries", "Prompt tokens that were looked up in slots.",
     lambda s: s.prompt_tokens),
    (CounterMetricFamily, "prefix_cache_hits", "Prompt tokens that a slot already held.", lambda s: s.reused_tokens),
    (CounterMetricFamily, "spec_decode_num_draft_tokens", "Draft tokens.", lambda s: s.draft_tokens),
    (CounterMetricFamily, "spec_decode_num_accepted_tokens", "Draft tokens accepted.", lambda s: s.accepted_tokens),
    (CounterMetricFamily, "requests_cancelled", "Requests whose client left, or that took too long.",
     lambda s: s.cancelled),
    (CounterMetricFamily, "requests_failed", "Requests that ended with an error.", lambda s: s.failed),
)  # fmt: skip
"""An engine's gauges and counters: the type of metric, its name, its help text, and a function for its value."""


class ModelMetrics(NamedTuple):
    """Functions that record metrics of one model."""

    observe: Mapping[str, Callable[[float], None]]
    """Functions that add a value to a histogram, by the histogram's name."""
    finished: Mapping[str, Callable[[], None]]
    """Functions that count a finished text, by its finish reason."""


class Metrics(Collector):
    """The metrics of all models of a server."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._statistics: dict[str, Callable[[], Statistics]] = {}
        self._registry.register(self)
        self.in_flight = Gauge("gptworks:http_requests_in_flight", "HTTP requests not yet answered.",
                               registry=self._registry)  # fmt: skip
        self._responses = Counter("gptworks:http_responses", "HTTP answers.", ["status"], registry=self._registry)
        self._finished = Counter("gptworks:request_success", "Texts that ended, by reason.",
                                 ["model_name", "finished_reason"], registry=self._registry)  # fmt: skip
        self._histograms: dict[str, Histogram] = {}
        for name, help_text, buckets in (
            ("time_to_first_token_seconds", "From a request's arrival to its first token.", _SECONDS),
            ("inter_token_latency_seconds", "Between two tokens of a text.", _STEP_SECONDS),
            ("e2e_request_latency_seconds", "From a request's arrival to a text's end.", _SECONDS),
            ("request_queue_time_seconds", "From a request's arrival to its slot.", _SECONDS),
            ("request_prefill_time_seconds", "From the slot to the first token.", _SECONDS),
            ("request_decode_time_seconds", "From the first token to the last.", _SECONDS),
            ("request_prompt_tokens", "Tokens of a prompt.", _TOKENS),
            ("request_generation_tokens", "Tokens of a text.", _TOKENS),
        ):
            self._histograms[name] = Histogram(
                f"gptworks:{name}", help_text, ["model_name"], buckets=buckets, registry=self._registry
            )

    def add(self, model: str, statistics: Callable[[], Statistics]) -> ModelMetrics:
        """Start reporting a model; return the functions that record its metrics."""
        self._statistics[model] = statistics
        return ModelMetrics(
            {kind: histogram.labels(model).observe for kind, histogram in self._histograms.items()},
            {reason: self._finished.labels(model, reason).inc for reason in FINISHED},
        )

    def remove(self, model: str) -> None:
        del self._statistics[model]
        for histogram in self._histograms.values():
            histogram.remove(model)
        for reason in FINISHED:
            self._finished.remove(model, reason)

    def answered(self, status: int) -> None:
        self._responses.labels(str(status)).inc()

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the engines' current gauges and counters; Prometheus' library calls this."""
        now = {name: read() for name, read in tuple(self._statistics.items())}
        for kind, name, help_text, value in _COUNTED:
            family = kind(f"gptworks:{name}", help_text, labels=["model_name"])
            for model, statistics in now.items():
                family.add_metric([model], value(statistics))
            yield family

    def describe(self) -> Iterable[Metric]:
        return []


class RequestClock:
    """Records the latencies of one request's texts in its model's metrics."""

    def __init__(self, metrics: ModelMetrics, began: float) -> None:
        """`began` is the time of the request's arrival, by `time.monotonic`."""
        self._observe, self._finished = metrics
        self._began = began
        self._last: dict[int, float] = {}
        self._first: dict[int, float] = {}

    def tick(self, now: float, text: int, request: Request, n_tokens: int, finish_reason: str | None) -> None:
        """Record a piece that came at `now` (by `time.monotonic`) and brought its text to `n_tokens` tokens."""
        observe = self._observe
        if text not in self._first:
            admitted = request.admitted_at or now
            observe["time_to_first_token_seconds"](now - self._began)
            observe["request_queue_time_seconds"](max(0.0, admitted - self._began))
            observe["request_prefill_time_seconds"](max(0.0, now - admitted))
            observe["request_prompt_tokens"](len(request.prompt_ids))
            self._first[text] = now
        else:
            observe["inter_token_latency_seconds"](now - self._last[text])
        self._last[text] = now
        if finish_reason is not None:
            observe["e2e_request_latency_seconds"](now - self._began)
            observe["request_decode_time_seconds"](now - self._first[text])
            observe["request_generation_tokens"](n_tokens)
            self._finished[finish_reason]()
