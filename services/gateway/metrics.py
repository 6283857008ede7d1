"""The gateway's metrics: the engines' figures, and what requests looked like from here.

vLLM's names and buckets, so that dashboards made for it work. Gauges and counters of the engines
come from the fleet at the moment of the scrape; the histograms are measured here and grow when a
request ends. Everything is labelled ``model_name`` and ``engine`` (the worker's label).
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from services.gateway.admission import Admission
from services.gateway.fleet import Engine, Fleet
from services.gateway.generation import Finish, GenerationRequest, Update
from services.gateway.openai.responses.store import ResponseStore

_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKEN_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
_REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_TOKENS = tuple(
    float(step * 10**power) for power in range(6) for step in (1, 2, 5)
)  # 1, 2, 5, 10, ... 500,000
_CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)
_PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
_LABELS = ("model_name", "engine")
_NS = 1e-9


@dataclass(frozen=True, slots=True)
class _Instrument:
    name: str
    text: str
    buckets: tuple[float, ...]


_HISTOGRAMS = {
    "ttft": _Instrument(
        "vllm:time_to_first_token_seconds", "Arrival to first token, in seconds.", _FIRST_TOKEN_S
    ),
    "itl": _Instrument(
        "vllm:inter_token_latency_seconds", "Between two tokens of a choice, in seconds.", _TOKEN_S
    ),
    "tpot": _Instrument(
        "vllm:request_time_per_output_token_seconds",
        "Mean time per output token after the first, in seconds.",
        _TOKEN_S,
    ),
    "e2e": _Instrument(
        "vllm:e2e_request_latency_seconds", "Arrival to end of a request, in seconds.", _REQUEST_S
    ),
    "queue": _Instrument(
        "vllm:request_queue_time_seconds", "Waiting to be scheduled, in seconds.", _REQUEST_S
    ),
    "prefill": _Instrument(
        "vllm:request_prefill_time_seconds", "Scheduled to first token, in seconds.", _REQUEST_S
    ),
    "decode": _Instrument(
        "vllm:request_decode_time_seconds", "First to last token, in seconds.", _REQUEST_S
    ),
    "inference": _Instrument(
        "vllm:request_inference_time_seconds", "Scheduled to last token, in seconds.", _REQUEST_S
    ),
    "prompt_tokens": _Instrument("vllm:request_prompt_tokens", "Tokens of a prompt.", _TOKENS),
    "output_tokens": _Instrument(
        "vllm:request_generation_tokens", "Tokens generated for a request.", _TOKENS
    ),
    "max_output_tokens": _Instrument(
        "vllm:request_max_num_generation_tokens",
        "Tokens of the longest choice of a request.",
        _TOKENS,
    ),
    "computed_tokens": _Instrument(
        "vllm:request_prefill_kv_computed_tokens",
        "Prompt tokens that were computed, not found in the cache.",
        _TOKENS,
    ),
    "param_max_tokens": _Instrument(
        "vllm:request_params_max_tokens", "max_tokens as asked for.", _TOKENS
    ),
    "param_n": _Instrument("vllm:request_params_n", "n as asked for.", _CHOICES),
    "preemptions": _Instrument(
        "vllm:request_num_preemptions", "Times that a request was preempted.", _PREEMPTIONS
    ),
}

# Name → what it says, and the field of the engine's load. Counters get _total when exported.
_GAUGES = {
    "vllm:num_requests_running": ("Requests that run.", "running"),
    "vllm:num_requests_waiting": ("Requests that wait.", "waiting"),
}
_COUNTERS = {
    "vllm:num_preemptions": ("Preemptions.", "preemptions"),
    "vllm:prompt_tokens": ("Prompt tokens processed.", "prompt_tokens"),
    "vllm:generation_tokens": ("Tokens generated.", "generated_tokens"),
    "vllm:prefix_cache_queries": ("Tokens looked up in the prefix cache.", "prefix_queries"),
    "vllm:prefix_cache_hits": ("Tokens found in the prefix cache.", "prefix_hits"),
    "vllm:prompt_tokens_cached": ("Prompt tokens found in the prefix cache.", "prefix_hits"),
}
_FINISH_REASONS = ("stop", "length", "abort", "error")


class Histogram:
    """Counts in buckets, per (model, engine). Only the event loop writes, so there is no lock."""

    def __init__(self, instrument: _Instrument) -> None:
        self._instrument = instrument
        self._counts: dict[tuple[str, str], list[int]] = {}
        self._sums: dict[tuple[str, str], float] = {}

    def observe(self, labels: tuple[str, str], value: float, *, times: int = 1) -> None:
        """Count a value."""
        counts = self._counts.get(labels)
        if counts is None:
            counts = self._counts[labels] = [0] * (len(self._instrument.buckets) + 1)
            self._sums[labels] = 0.0
        counts[bisect_left(self._instrument.buckets, value)] += times
        self._sums[labels] += value * times

    def family(self) -> HistogramMetricFamily:
        """As prometheus_client exports it."""
        family = HistogramMetricFamily(self._instrument.name, self._instrument.text, labels=_LABELS)
        bounds = [*map(str, self._instrument.buckets), "+Inf"]
        for labels, counts in self._counts.items():
            rows = list(zip(bounds, accumulate(counts), strict=True))
            family.add_metric(labels, rows, sum_value=self._sums[labels])
        return family


class PromptRecord:
    """What the generation of one prompt looked like."""

    def __init__(self, request: GenerationRequest) -> None:
        """
        Args:
            request: What was asked for.
        """
        self.request = request
        self.first_token: float | None = None
        self.gaps: list[tuple[float, int]] = []
        self.finishes: list[Finish] = []
        self._last: dict[int, float] = {}

    def update(self, update: Update, *, now: float) -> None:
        """Tokens or an end have come."""
        for choice in update.choices:
            if len(choice.token_ids):
                self._tokens(choice.index, len(choice.token_ids), now)
            if choice.finish is not None:
                self.finishes.append(choice.finish)

    def _tokens(self, index: int, num_new: int, now: float) -> None:
        last = self._last.get(index)
        if last is not None:
            self.gaps.append(((now - last) / num_new, num_new))
        elif self.first_token is None:
            self.first_token = now
        self._last[index] = now


class RequestRecord:
    """What one HTTP request looked like, until it ends."""

    def __init__(self, requests: Sequence[GenerationRequest], *, arrival: float) -> None:
        """
        Args:
            requests: One per prompt.
            arrival: Monotonic seconds.
        """
        self.arrival = arrival
        self.prompts = [PromptRecord(request) for request in requests]

    def update(self, prompt_index: int, update: Update, *, now: float) -> None:
        """Tokens or an end have come."""
        self.prompts[prompt_index].update(update, now=now)


class GatewayMetrics:
    """Everything that ``/metrics`` shows."""

    def __init__(self, fleet: Fleet, admission: Admission, responses: ResponseStore) -> None:
        """
        Args:
            fleet: Where the engines' figures are.
            admission: How many requests are inside.
            responses: Those that are kept.
        """
        self._fleet = fleet
        self._histograms = {key: Histogram(made) for key, made in _HISTOGRAMS.items()}
        self._registry = CollectorRegistry()
        self._registry.register(_FleetCollector(fleet, admission, self._histograms))
        self._registry.register(_ResponseCollector(responses))
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._registry)

    def exposition(self) -> bytes:
        """The page in Prometheus's text format."""
        return generate_latest(self._registry)

    @contextmanager
    def record(
        self, requests: Sequence[GenerationRequest], *, arrival: float
    ) -> Iterator[RequestRecord]:
        """Record one HTTP request; it counts when the block is left, however.

        Args:
            requests: One per prompt.
            arrival: Monotonic seconds at which it came.
        """
        record = RequestRecord(requests, arrival=arrival)
        try:
            yield record
        finally:
            self._enter(record, now=time.monotonic())

    def _enter(self, record: RequestRecord, *, now: float) -> None:
        for prompt in record.prompts:
            engine = prompt.finishes[0].timings.engine_id if prompt.finishes else 0
            labels = (prompt.request.model, self._fleet.worker_of(engine))
            self._enter_latencies(prompt, labels, arrival=record.arrival)
            for finish in prompt.finishes:
                self._enter_phases(finish, labels)
            if prompt.finishes:
                self._enter_sizes(prompt, labels)
                self._histograms["e2e"].observe(labels, now - record.arrival)

    def _enter_latencies(
        self, prompt: PromptRecord, labels: tuple[str, str], *, arrival: float
    ) -> None:
        if prompt.first_token is not None:
            self._histograms["ttft"].observe(labels, prompt.first_token - arrival)
        between = self._histograms["itl"]
        for gap, times in prompt.gaps:
            between.observe(labels, gap, times=times)

    def _enter_phases(self, finish: Finish, labels: tuple[str, str]) -> None:
        times = finish.timings
        if times.scheduled and times.arrival:
            self._observe("queue", labels, (times.scheduled - times.arrival) * _NS)
        if times.scheduled and times.first_token:
            decode = (times.last_token - times.first_token) * _NS
            self._observe("prefill", labels, (times.first_token - times.scheduled) * _NS)
            self._observe("decode", labels, decode)
            self._observe("inference", labels, (times.last_token - times.scheduled) * _NS)
            if finish.usage.output_tokens > 1:
                self._observe("tpot", labels, decode / (finish.usage.output_tokens - 1))
        self._histograms["preemptions"].observe(labels, times.num_preemptions)

    def _observe(self, key: str, labels: tuple[str, str], value: float) -> None:
        """Clocks of two processes may differ by a little: no time is below 0."""
        self._histograms[key].observe(labels, max(value, 0.0))

    def _enter_sizes(self, prompt: PromptRecord, labels: tuple[str, str]) -> None:
        histograms = self._histograms
        outputs = [finish.usage.output_tokens for finish in prompt.finishes]
        usage = prompt.finishes[0].usage
        request = prompt.request
        histograms["prompt_tokens"].observe(labels, usage.prompt_tokens)
        histograms["computed_tokens"].observe(labels, usage.prompt_tokens - usage.cached_tokens)
        histograms["output_tokens"].observe(labels, sum(outputs))
        histograms["max_output_tokens"].observe(labels, max(outputs))
        histograms["param_n"].observe(labels, request.n)
        if request.sampling.max_tokens is not None:
            histograms["param_max_tokens"].observe(labels, request.sampling.max_tokens)


class _FleetCollector(Collector):
    """Turns what is known at this moment into metric families."""

    def __init__(
        self, fleet: Fleet, admission: Admission, histograms: dict[str, Histogram]
    ) -> None:
        self._fleet = fleet
        self._admission = admission
        self._histograms = histograms

    def collect(self) -> Iterator[Metric]:
        """prometheus_client."""
        engines = self._fleet.engines()
        yield from _gauges(engines)
        yield from _counters(engines)
        for histogram in self._histograms.values():
            yield histogram.family()
        yield GaugeMetricFamily(
            "sluiceway_gateway_requests_in_flight",
            "HTTP requests that generate text and are inside.",
            value=self._admission.num_in_flight,
        )
        readiness = self._fleet.readiness()
        yield GaugeMetricFamily(
            "sluiceway_gateway_ready",
            "1 if a request would succeed.",
            value=int(readiness.is_ready),
        )


class _ResponseCollector(Collector):
    """What is kept of POST /v1/responses."""

    def __init__(self, responses: ResponseStore) -> None:
        self._responses = responses

    def collect(self) -> Iterator[Metric]:
        """prometheus_client."""
        yield GaugeMetricFamily(
            "sluiceway_gateway_stored_responses",
            "Responses that are kept and can be found.",
            value=len(self._responses),
        )
        yield GaugeMetricFamily(
            "sluiceway_gateway_stored_response_bytes",
            "Bytes of kept responses and of what they go on from.",
            value=self._responses.num_bytes,
        )


def _gauges(engines: list[tuple[str, Engine]]) -> Iterator[Metric]:
    for name, (text, field) in _GAUGES.items():
        family = GaugeMetricFamily(name, text, labels=_LABELS)
        for model, engine in engines:
            family.add_metric((model, engine.worker_id), getattr(engine.load, field))
        yield family
    usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "KV blocks in use, 0..1.", labels=_LABELS)
    cache = GaugeMetricFamily(
        "vllm:cache_config_info",
        "The KV cache of an engine, as labels.",
        labels=(*_LABELS, "block_size", "num_gpu_blocks"),
    )
    for model, engine in engines:
        labels = (model, engine.worker_id)
        total = engine.load.kv_blocks_total
        usage.add_metric(labels, engine.load.kv_blocks_used / total if total else 0.0)
        cache.add_metric((*labels, str(engine.block_size), str(engine.num_blocks)), 1)
    yield usage
    yield cache


def _counters(engines: list[tuple[str, Engine]]) -> Iterator[Metric]:
    for name, (text, field) in _COUNTERS.items():
        family = CounterMetricFamily(name, text, labels=_LABELS)
        for model, engine in engines:
            family.add_metric((model, engine.worker_id), getattr(engine.load, field))
        yield family
    success = CounterMetricFamily(
        "vllm:request_success", "Finished choices.", labels=(*_LABELS, "finished_reason")
    )
    for model, engine in engines:
        for reason in _FINISH_REASONS:
            labels = (model, engine.worker_id, reason)
            success.add_metric(labels, getattr(engine.load, f"finished_{reason}"))
    yield success
