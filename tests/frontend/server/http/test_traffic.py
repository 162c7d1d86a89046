"""What a server counts of its own requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from pagewire.frontend.server.operate.metrics import exposition
from tests.frontend.conftest import FakeCore
from tests.frontend.server.client import Client


def samples_of(client: Client) -> dict[tuple[str, ...], float]:
    """Samples by name and labels, without those of buckets and the sums of seconds."""
    text = exposition(client.app.state.traffic.rows()).decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith(("_bucket", "_sum"))
    }


def test_requests_are_counted_by_endpoint(serve: Callable[..., Client], core: FakeCore) -> None:
    core.auto = True
    client, key = serve(api_key=["k"]), {"authorization": "Bearer k"}
    body: Any = {"prompt": "w5"}
    client.post("/v1/completions", body, **key)
    client.post("/v1/completions", body | {"stream": True}, **key)
    client.post("/v1/completions", {"prompt": []}, **key)
    client.get("/v1/models/fake", **key)
    client.get("/v1/models/other", **key)
    client.get("/nothing", **key)
    client.post("/v1/completions", body)  # without the key
    client.request("BREW", "/health", headers=key)
    numbers = {
        ("/v1/completions", "POST", "2xx"): 2,
        ("/v1/completions", "POST", "4xx"): 1,
        ("/v1/models/{model}", "GET", "2xx"): 1,
        ("/v1/models/{model}", "GET", "4xx"): 1,
        ("none", "GET", "4xx"): 1,
        ("none", "POST", "4xx"): 1,
        ("/health", "other", "4xx"): 1,
    }
    expected = {("http_requests_total", *labels): number for labels, number in numbers.items()}
    for (handler, method, _), number in numbers.items():
        key_of = ("http_request_duration_seconds_count", handler, method)
        expected[key_of] = expected.get(key_of, 0) + number
    assert samples_of(client) == expected
