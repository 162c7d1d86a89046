"""Errors of chat completions in the terms of /v1/responses, whose requests become chat completions."""

from __future__ import annotations

import re

from pagewire.frontend.server.http.errors import APIError, named_field
from pagewire.frontend.server.responses.protocol import ResponsesRequest

FIELDS = ResponsesRequest.__struct_fields__
# Fields of chat completions and of the engine's parameters, and the fields here that they come from.
RENAMED = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "response_format": "text",
    "reasoning_effort": "reasoning",
    "verbosity": "text",
}
# Patterns in messages, in order, and what replaces them.
REWRITES = (
    (r"\bmessages\[\d+\]\.?:? ?", "input: "),
    (r"\b(max_tokens|max_completion_tokens)\b", "max_output_tokens"),
    (r"\blogprobs(?==)", "top_logprobs"),
    (r"^(logprobs)\b", "top_logprobs"),
    (r"\bresponse_format needs json_schema\.schema", "text.format needs a schema"),
    (r"\bresponse_format\b", "text.format"),
    (r"\b(tools\[\d+\])\.function\.", r"\1."),
    (r"'function': \{('name': [^{}]*)\}", r"\1"),
    (r"'function': \{\.\.\.\}", "'name': ..., 'parameters': {...}"),
)


def in_response_terms(error: APIError) -> APIError:
    """Return an error that names the fields of /v1/responses."""
    message = error.message
    for pattern, replacement in REWRITES:
        message = re.sub(pattern, replacement, message)
    param = RENAMED.get(error.param or "", error.param) or named_field(message, FIELDS)
    return APIError(error.status, message, param=param, code=error.code, headers=error.headers)
