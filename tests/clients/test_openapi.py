"""What schemathesis makes of the OpenAPI document is answered as the document says, and never by an error of ours.

`PAGEWIRE_SCHEMATHESIS_EXAMPLES`: examples per operation, default 6.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import load_all_checks, not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

PATIENCE = 60
DEFAULT_EXAMPLES = 6
EXAMPLES = int(os.environ.get("PAGEWIRE_SCHEMATHESIS_EXAMPLES", DEFAULT_EXAMPLES))
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
POOLED = ("embed", "score", "rerank", "classify", "pooling")
"""Parts of the paths of a model that pools."""
# Almost any value of these ends a request at the door, before anything else is looked at.
EARLY_FIELDS = (
    *("model", "chat_template", "suffix", "functions", "function_call", "audio", "modalities", "timeout"),
    *("thread", "container", "mcp_servers", "context_management", "logits_processors", "kv_transfer_params"),
    *("web_search_options", "images", "context", "template", "mm_processor_kwargs"),
)
# Random requests may want very long answers. Operators' endpoints want their header.
HEADERS = {"X-Request-Timeout": "0.5", "X-Pagewire-Admin": "1"}


@pytest.fixture(scope="module")
def schemas(url: str, pooled: str) -> dict[bool, Any]:
    """The documents of both servers; True: of the one that pools."""
    load_all_checks()
    found = {False: url, True: pooled}
    return {pools: schemathesis.openapi.from_url(f"{at}/openapi.json") for pools, at in found.items()}


def test_all_operations(schemas: dict[bool, Any], url: str) -> None:
    """Each of both documents, on the server that does more with it, with requests that fit and others."""
    failures: list[str] = []
    for pools, schema in schemas.items():
        for path, operations in schema.items():
            if pools is any(part in path for part in POOLED):
                for operation in operations.values():
                    failures += failures_of(operation)
    assert not failures, "\n\n".join(failures)
    assert requests.get(f"{url}/health", timeout=PATIENCE).status_code == 200


def failures_of(operation: Any) -> list[str]:
    """Return what is wrong with the answers to an operation."""
    raw = operation.definition.raw
    modes = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]
    if "requestBody" not in raw and all(parameter["in"] == "path" for parameter in raw["parameters"]):
        modes = modes[:1]  # any request fits
    failures = []
    for mode in modes:
        try:
            try_out(operation, mode)
        except (Exception, FailureGroup) as error:
            failures.append(f"{operation.label} ({mode.name}): {error}")
    if operation.method == "post" and operation.path in ("/pause", "/sleep"):
        undo = {"/pause": "/resume", "/sleep": "/wake_up"}[operation.path]
        requests.post(
            operation.base_url.rstrip("/") + undo, headers=HEADERS, timeout=PATIENCE
        ).raise_for_status()
    return failures


def try_out(operation: Any, mode: GenerationMode) -> None:
    """Check the answers to some requests. mode: POSITIVE: such as the document allows; NEGATIVE: others."""

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
        response = case.call(headers=HEADERS, timeout=PATIENCE)
        case.validate_response(response, checks=CHECKS)

    check()
