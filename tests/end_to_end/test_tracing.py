"""Spans of requests, as a collector receives them over HTTP."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import aclosing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from pagewire import LLM, AsyncLLM, SamplingParams
from pagewire.frontend.core.tracing import Tracer
from pagewire.ipc.options.engine_args import EngineArgs

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True, n=2, temperature=0.5, top_p=0.9, seed=1)


class Collector(ThreadingHTTPServer):
    """An OpenTelemetry collector that keeps what it gets."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Receiver)
        self.received: list[ExportTraceServiceRequest] = []
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}/v1/traces"

    def spans(self) -> dict[str, Span]:
        """The spans received so far, by request id."""
        spans = [
            span
            for message in self.received
            for resource in message.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        return {attributes(span)["gen_ai.request.id"]: span for span in spans}


class Receiver(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Collector)
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.received.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def attributes(span: Any) -> dict[str, Any]:
    """The attributes of a span by name, as plain values."""
    values = {}
    for item in span.attributes:
        kind = item.value.WhichOneof("value")
        value = getattr(item.value, kind)
        values[item.key] = [each.string_value for each in value.values] if kind == "array_value" else value
    return values


def test_a_span_per_request(address: str, collector: Collector) -> None:
    async def main() -> None:
        async with AsyncLLM.attach(address, otlp_traces_endpoint=collector.endpoint) as engine:
            headers = {"TraceParent": f"00-{TRACE}-{PARENT}-01"}
            async for _ in engine.generate("with", PARAMS, "child", trace_headers=headers):
                pass
            endless = SamplingParams(max_tokens=1000, ignore_eos=True)
            async with aclosing(engine.generate("with", endless, "left")) as outputs:
                await anext(outputs)
            with pytest.raises(ValueError):
                async for _ in engine.generate("", PARAMS, "bad"):
                    pass

    asyncio.run(main())
    spans = collector.spans()
    assert set(spans) == {"child", "left"}
    child, left = spans["child"], spans["left"]
    assert (child.name, child.kind) == ("llm_request", Span.SPAN_KIND_SERVER)
    assert (child.trace_id.hex(), child.parent_span_id.hex()) == (TRACE, PARENT)
    assert left.parent_span_id == b"" and left.trace_id != child.trace_id
    recorded = attributes(child)
    times = {
        name.removeprefix("gen_ai.latency."): recorded.pop(name)
        for name in list(recorded)
        if "latency" in name
    }
    assert recorded == {
        "gen_ai.request.id": "child",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.n": 2,
        "gen_ai.request.max_tokens": 6,
        "gen_ai.response.model": "demo",
        "gen_ai.response.finish_reasons": ["length", "length"],
        "gen_ai.usage.prompt_tokens": recorded["gen_ai.usage.prompt_tokens"],
        "gen_ai.usage.completion_tokens": 12,
        "gen_ai.usage.num_sequences": 2,
    }
    assert recorded["gen_ai.usage.prompt_tokens"] > 0
    assert 0 <= times["time_in_queue"] <= times["time_to_first_token"] <= times["e2e"]
    prefill, decode = times["time_in_model_prefill"], times["time_in_model_decode"]
    assert times["time_in_model_inference"] == pytest.approx(prefill + decode) and decode > 0
    assert (child.end_time_unix_nano - child.start_time_unix_nano) / 1e9 == pytest.approx(
        times["e2e"], abs=1e-5
    )
    assert attributes(left)["gen_ai.response.finish_reasons"] == ["abort"]
    assert left.status.code == child.status.code == Status.STATUS_CODE_UNSET
    (resource,) = {str(message.resource_spans[0].resource) for message in collector.received}
    assert '"pagewire"' in resource


def test_an_engine_of_our_own_and_a_dead_one(collector: Collector) -> None:
    llm = LLM(
        "demo", dtype="float32", kv_cache_memory_bytes=32 << 20, otlp_traces_endpoint=collector.endpoint
    )
    with llm:
        llm.generate("x", SamplingParams(max_tokens=2), use_tqdm=False)
        engine = llm.llm_engine
        engine.add_request("lost", "with", SamplingParams(max_tokens=1000, ignore_eos=True))
    spans = collector.spans()
    assert len(spans) == 2
    assert spans["lost"].status.code == Status.STATUS_CODE_ERROR
    assert "shut down" in spans["lost"].status.message


def test_requests_run_without_their_collector(address: str) -> None:
    with LLM.attach(address) as plain:
        expected = plain.generate("with", PARAMS, use_tqdm=False)[0].outputs[0].text

    async def main() -> str:
        async with AsyncLLM.attach(address, otlp_traces_endpoint="http://127.0.0.1:9/v1/traces") as engine:
            *_, last = [output async for output in engine.generate("with", PARAMS)]
        return last.outputs[0].text

    assert asyncio.run(main()) == expected


def test_a_command_on_a_running_core_traces_its_own(address: str, collector: Collector) -> None:
    command = [sys.executable, "-m", "pagewire.cli.main", "generate", "with", "--max-tokens", "3"]
    options = ["--attach", address, "--otlp-traces-endpoint"]
    environment = os.environ | {"OTEL_SERVICE_NAME": "mine"}
    subprocess.run([*command, *options, collector.endpoint], env=environment, check=True, timeout=60)
    (span,) = collector.spans().values()
    assert attributes(span)["gen_ai.usage.completion_tokens"] == 3
    assert '"mine"' in str(collector.received[0].resource_spans[0].resource)
    bad = subprocess.run([*command, *options, "nowhere"], capture_output=True, text=True, timeout=60)
    assert (bad.returncode, bad.stdout) == (1, "")
    assert bad.stderr.startswith("pagewire generate: otlp_traces_endpoint must be an http://")


@pytest.mark.parametrize("endpoint", ["localhost:4317", "grpc://localhost:4317", ""])
def test_a_url_of_another_kind_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match="must be an http:// or https:// URL"):
        AsyncLLM.from_engine_args(EngineArgs(otlp_traces_endpoint=endpoint))


@pytest.mark.parametrize("package", ["opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http"])
def test_without_the_packages_the_command_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=r"needs OpenTelemetry .*: pip install 'pagewire\[otlp\]'"):
        Tracer("http://localhost:4318/v1/traces")
