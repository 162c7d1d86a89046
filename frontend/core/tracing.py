"""One OpenTelemetry span per request, sent to a collector over OTLP/HTTP. An optional extra: `pagewire[otlp]`.

A span begins when a request is submitted, as a child of the span in the caller's W3C trace headers if there are
any, and ends with the request, for whatever reason. Attributes have the same names as in vLLM.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pagewire.frontend.requests.outputs import RequestState
from pagewire.ipc.version import __version__
from pagewire.ipc.wire.pooling import PoolingParams

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import Span
    from opentelemetry.sdk.trace.export import SpanExporter

SPAN_NAME = "llm_request"
FLUSH_SECONDS = (
    2.0  # time for the last spans to be sent at shutdown, so that a hung collector does not block it
)
# Of each trace header: as many as W3C's specification wants to be passed on. OpenTelemetry splits longer ones, too,
# with patterns that may take time with the square of their length.
MAX_HEADER_CHARS = 512
SERVICE_NAME = "pagewire"  # used unless OTEL_SERVICE_NAME is set


class Tracer:
    """Creates and exports the spans of requests.

    endpoint: URL of the collector, such as http://localhost:4318/v1/traces.

    Raises:
        ValueError: the URL is not http(s), or OpenTelemetry is not installed.
    """

    def __init__(self, endpoint: str) -> None:
        if urlsplit(endpoint).scheme not in ("http", "https"):
            raise ValueError(f"otlp_traces_endpoint must be an http:// or https:// URL, got {endpoint!r}")
        try:
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise missing_package(error) from None
        self._propagator = TraceContextTextMapPropagator()
        self._provider = TracerProvider(resource=resource(), shutdown_on_exit=False)
        self._exporter = exporter(endpoint)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("pagewire", __version__)
        self._spans: dict[int, Span] = {}

    def begin(self, state: RequestState, model: str, headers: Mapping[str, str] | None) -> None:
        """Begin the span of a submitted request. model: served name. headers: HTTP headers, in any case."""
        from opentelemetry.trace import SpanKind

        given = ((name.lower(), text) for name, text in (headers or {}).items())
        parent = self._propagator.extract(
            {name: text for name, text in given if len(text) <= MAX_HEADER_CHARS}
        )
        begun = int(state.metrics.arrival_time * 1e9)
        span: Any = self._tracer.start_span(SPAN_NAME, parent, SpanKind.SERVER, start_time=begun)
        span.set_attribute("gen_ai.response.model", model)
        self._spans[state.key] = span

    def end(self, state: RequestState) -> None:
        """End the span of a finished request."""
        from opentelemetry.trace import StatusCode

        span = self._spans.pop(state.key)
        span.set_attributes(dict([*request_attributes(state), *latencies(state)]))
        if state.error is not None:
            span.set_status(StatusCode.ERROR, state.error)
        span.end(int((state.metrics.finished_time or state.metrics.arrival_time) * 1e9))

    def shutdown(self) -> None:
        """Send the spans that have ended, for at most `FLUSH_SECONDS`."""
        give_up = threading.Timer(FLUSH_SECONDS, self._exporter.shutdown)
        give_up.start()
        self._provider.shutdown()
        give_up.cancel()


def request_attributes(state: RequestState) -> Iterator[tuple[str, Any]]:
    """Yield the attributes that describe the request and its output."""
    yield "gen_ai.request.id", state.request_id
    if isinstance(state.request.task, PoolingParams):
        yield "gen_ai.operation.name", str(state.request.task.task)
        yield "gen_ai.usage.prompt_tokens", len(state.request.prompt.token_ids)
        return
    params = state.request.params
    yield "gen_ai.request.temperature", params.temperature
    yield "gen_ai.request.top_p", params.top_p
    yield "gen_ai.request.n", params.num_returned or params.n
    if params.max_tokens is not None:
        yield "gen_ai.request.max_tokens", params.max_tokens
    yield "gen_ai.usage.prompt_tokens", len(state.request.prompt.token_ids)
    yield "gen_ai.usage.completion_tokens", sum(map(len, state.output_token_ids))
    yield "gen_ai.usage.num_sequences", params.n
    yield "gen_ai.response.finish_reasons", [reason or "error" for reason in state.finish_reasons]


def latencies(state: RequestState) -> Iterator[tuple[str, float]]:
    """Yield durations in seconds; phases that the request has not reached are omitted."""
    times = state.metrics
    if times.finished_time is not None:
        yield "gen_ai.latency.e2e", times.finished_time - times.arrival_time
    if times.time_in_queue is None or times.first_token_time is None or times.last_token_time is None:
        return
    scheduled = times.arrival_time + times.time_in_queue
    yield "gen_ai.latency.time_in_queue", times.time_in_queue
    yield "gen_ai.latency.time_to_first_token", times.first_token_time - times.arrival_time
    yield "gen_ai.latency.time_in_model_prefill", times.first_token_time - scheduled
    yield "gen_ai.latency.time_in_model_decode", times.last_token_time - times.first_token_time
    yield "gen_ai.latency.time_in_model_inference", times.last_token_time - scheduled


def exporter(endpoint: str) -> SpanExporter:
    """Return the exporter that sends spans to `endpoint`.

    Raises:
        ValueError: the package is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise missing_package(error) from None
    return OTLPSpanExporter(endpoint)


def resource() -> Any:
    """Describe this service: from OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES, or by default values."""
    from opentelemetry.sdk.resources import Resource

    service = Resource.create()
    if str(service.attributes["service.name"]).startswith("unknown_service"):
        service = service.merge(Resource({"service.name": SERVICE_NAME, "service.version": __version__}))
    return service


def missing_package(error: ImportError) -> ValueError:
    """Return the error for a package that is not installed."""
    return ValueError(f"otlp_traces_endpoint needs OpenTelemetry ({error}): pip install 'pagewire[otlp]'")
