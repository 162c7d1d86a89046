"""What schemathesis makes of the OpenAPI document never ends in a server error.

`PAGEWIRE_SCHEMATHESIS_EXAMPLES`: examples per operation, default 12.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import load_all_checks, not_a_server_error

from pagewire.frontend.server.http.options import ServerOptions
from tests.serving import serving

DEFAULT_EXAMPLES = 12
EXAMPLES = int(os.environ.get("PAGEWIRE_SCHEMATHESIS_EXAMPLES", DEFAULT_EXAMPLES))
WITH_BODIES = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/api/chat",
    "/tokenize",
    "/detokenize",
    "/abort",
)
OTHERS = (
    "/v1/responses/{response_id}",
    "/v1/responses/{response_id}/cancel",
    "/v1/models",
    "/v1/models/{model}",
    "/version",
    "/load",
    "/metrics",
    "/ping",
    "/reset_prefix_cache",
    "/wake_up",
    "/is_sleeping",
)
# Almost any value of these ends a request at the door, before anything else is looked at.
EARLY_FIELDS = (
    "model",
    "chat_template",
    "suffix",
    "functions",
    "function_call",
    "audio",
    "modalities",
    "timeout",
)
# Random requests may want very long answers. Operators' endpoints want their header.
HEADERS = {"X-Request-Timeout": "0.5", "X-Pagewire-Admin": "1"}


@pytest.fixture(scope="module")
def schema(address: str) -> Iterator[Any]:
    """The document of a server on a real engine."""
    load_all_checks()
    with serving(address, ServerOptions(port=0, enable_admin=True)) as url:
        yield schemathesis.openapi.from_url(f"{url}/openapi.json")


@pytest.mark.parametrize("path", WITH_BODIES + OTHERS)
def test_valid_requests(schema: Any, path: str) -> None:
    """Such as the document allows."""
    for operation in schema[path].values():
        try_out(operation, GenerationMode.POSITIVE)


@pytest.mark.parametrize("path", WITH_BODIES)
def test_invalid_requests(schema: Any, path: str) -> None:
    """Others."""
    try_out(schema[path]["POST"], GenerationMode.NEGATIVE)


def try_out(operation: Any, mode: GenerationMode) -> None:
    """No answer is a server error, and every status is one that the document names."""
    told = {"405", *operation.definition.raw["responses"]}

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=EXAMPLES == DEFAULT_EXAMPLES,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        if isinstance(case.body, dict):
            case.body = {name: value for name, value in case.body.items() if name not in EARLY_FIELDS}
        response = case.call(headers=HEADERS)
        case.validate_response(response, checks=[not_a_server_error])
        assert str(response.status_code) in told, response.text

    check()
