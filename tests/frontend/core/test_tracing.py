"""The attributes of a request's span. (`tests/end_to_end/test_tracing.py` sends spans to a collector.)"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pagewire.frontend.core.tracing import MAX_HEADER_CHARS, Tracer, request_attributes
from pagewire.frontend.requests.outputs import RequestState
from pagewire.ipc.wire.items import Prompt
from pagewire.ipc.wire.messages import Request
from pagewire.ipc.wire.params import SamplingParams


@pytest.mark.parametrize(("params", "n"), [({"n": 3}, 3), ({"n": 3, "num_returned": 2}, 2)])
def test_n_is_the_number_of_outputs_that_the_client_gets(params: dict[str, Any], n: int) -> None:
    request = Request(1, "r", Prompt([1, 2]), SamplingParams(**params), seed=0)
    attributes = dict(request_attributes(RequestState(request, None, None)))
    assert (attributes["gen_ai.request.n"], attributes["gen_ai.usage.num_sequences"]) == (n, 3)


def test_long_trace_headers_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patterns of OpenTelemetry may take time with the square of their length."""
    tracer = Tracer("http://127.0.0.1:9/v1/traces")
    read: list[dict[str, str]] = []
    monkeypatch.setattr(tracer._propagator, "extract", read.append)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    state: Any = SimpleNamespace(key=1, metrics=SimpleNamespace(arrival_time=0.0))
    for length in (MAX_HEADER_CHARS, MAX_HEADER_CHARS + 1):
        tracer.begin(state, "m", {"Traceparent": parent, "tracestate": " " * length})
    tracer.shutdown()
    assert read == [
        {"traceparent": parent, "tracestate": " " * MAX_HEADER_CHARS},
        {"traceparent": parent},
    ]
