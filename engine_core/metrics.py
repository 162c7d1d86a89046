"""What the engine measures of itself, under the names that existing dashboards know.

Counters and gauges are read off the scheduler when somebody asks; only distributions are kept on the way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pagewire.engine_core.request import Request
from pagewire.engine_core.scheduler import Scheduler

FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
WHOLE_REQUEST = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
SEQUENCES = (1, 2, 5, 10, 20)


def one_two_five(limit: int) -> list[float]:
    """Bucket bounds 1, 2, 5, 10, 20, 50, ... up to `limit`."""
    bounds, scale = [], 1
    while scale <= limit:
        bounds += [float(scale * m) for m in (1, 2, 5) if scale * m <= limit]
        scale *= 10
    return bounds


class Metrics(Collector):
    """The engine's metrics, all labelled with the model's name."""

    def __init__(self, scheduler: Scheduler, model_name: str) -> None:
        self._scheduler = scheduler
        self._model_name = model_name
        self._finished: dict[str, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self.registry = CollectorRegistry()
        lengths = one_two_five(scheduler.config.max_model_len)
        histogram = self._histogram
        self.first_token = histogram("time_to_first_token_seconds", "Time to first token.", FIRST_TOKEN)
        self.per_token = histogram("time_per_output_token_seconds", "Time per output token.", PER_TOKEN)
        self.between_tokens = histogram("inter_token_latency_seconds", "Time between tokens.", PER_TOKEN)
        self.whole = histogram("e2e_request_latency_seconds", "Arrival to last token.", WHOLE_REQUEST)
        self.queued = histogram("request_queue_time_seconds", "Time spent waiting.", WHOLE_REQUEST)
        self.prefill = histogram("request_prefill_time_seconds", "Time to prefill.", WHOLE_REQUEST)
        self.decode = histogram("request_decode_time_seconds", "First to last token.", WHOLE_REQUEST)
        self.prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens per request.", lengths)
        self.output_tokens = histogram("request_generation_tokens", "Tokens generated per request.", lengths)
        self.params_n = histogram("request_params_n", "The n of requests.", SEQUENCES)
        self.step_tokens = histogram("iteration_tokens_total", "Tokens per step.", STEP_TOKENS)
        self.registry.register(self)

    def token(self, request: Request, before: float, now: float) -> None:
        """A token of `request` came; the one before it came at `before` (0: it is the first)."""
        if before == 0.0:
            self.first_token.observe(now - request.arrival_time)
        else:
            self.between_tokens.observe(now - before)

    def finished(self, request: Request, reason: str, now: float) -> None:
        """A sequence has ended."""
        self._finished[reason] += 1
        if request.first_token_time == 0.0:
            return
        decode = now - request.first_token_time
        self.whole.observe(now - request.arrival_time)
        self.queued.observe(request.scheduled_time - request.arrival_time)
        self.prefill.observe(request.first_token_time - request.scheduled_time)
        self.decode.observe(decode)
        self.prompt_tokens.observe(request.num_prompt_tokens)
        self.output_tokens.observe(request.num_output_tokens)
        if request.num_output_tokens > 1:
            self.per_token.observe(decode / (request.num_output_tokens - 1))

    def collect(self) -> Iterator[Metric]:
        """Counters and gauges as of now (called by the registry)."""
        scheduler, stats = self._scheduler, self._scheduler.stats
        usage = scheduler.kv_usage
        hit_rate = stats.num_prefix_hits / max(1, stats.num_prefix_queries)
        yield self._gauge("num_requests_running", "Sequences that run.", len(scheduler.running))
        yield self._gauge("num_requests_waiting", "Sequences that wait.", scheduler.num_waiting)
        yield self._gauge("num_requests_swapped", "Always 0: preemption recomputes.", 0)
        yield self._gauge("kv_cache_usage_perc", "KV cache usage, 1 means full.", usage)
        yield self._gauge("gpu_cache_usage_perc", "KV cache usage, 1 means full.", usage)
        yield self._gauge("cpu_cache_usage_perc", "Always 0: there is no swap space.", 0)
        yield self._gauge("gpu_prefix_cache_hit_rate", "Share of prompt tokens found cached.", hit_rate)
        yield self._gauge("cpu_prefix_cache_hit_rate", "Always 0: there is no swap space.", 0)
        yield self._counter("num_preemptions", "Preemptions.", stats.num_preemptions)
        yield self._counter("prompt_tokens", "Prefill tokens computed.", stats.num_prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", stats.num_output_tokens)
        yield self._counter("prefix_cache_queries", "Tokens looked up.", stats.num_prefix_queries)
        yield self._counter("prefix_cache_hits", "Tokens found cached.", stats.num_prefix_hits)
        success = CounterMetricFamily(
            "vllm:request_success", "Finished sequences.", labels=["model_name", "finished_reason"]
        )
        for reason, count in self._finished.items():
            success.add_metric([self._model_name, reason], count)
        yield success

    def snapshot(self) -> list[dict[str, Any]]:
        """Every metric in plain values: name, type, documentation, labels; value, or buckets, sum, count."""
        found: list[dict[str, Any]] = []
        for family in self.registry.collect():
            about = {"type": family.type, "documentation": family.documentation}
            if family.type == "histogram":
                found.append({"name": family.name, **about, **histogram_values(family)})
                continue
            for sample in family.samples:
                if not sample.name.endswith("_created"):
                    found.append(
                        {"name": sample.name, **about, "labels": sample.labels, "value": sample.value}
                    )
        return found

    def _histogram(self, name: str, text: str, buckets: Any) -> Any:
        return Histogram(
            f"vllm:{name}", text, ["model_name"], buckets=buckets, registry=self.registry
        ).labels(self._model_name)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family


def histogram_values(family: Metric) -> dict[str, Any]:
    """Labels, cumulative buckets by upper bound, sum and count of a histogram with one set of labels."""
    values: dict[str, Any] = {"labels": {}, "buckets": {}, "sum": 0.0, "count": 0}
    for sample in family.samples:
        if sample.name.endswith("_bucket"):
            values["buckets"][sample.labels["le"]] = int(sample.value)
            values["labels"] = {k: v for k, v in sample.labels.items() if k != "le"}
        elif sample.name.endswith("_sum"):
            values["sum"] = sample.value
        elif sample.name.endswith("_count"):
            values["count"] = int(sample.value)
    return values
