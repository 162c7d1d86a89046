"""Errors of chat completions in the terms of /v1/responses."""

from __future__ import annotations

from pagewire.frontend.server.openai.terms import Terms
from pagewire.frontend.server.responses.protocol import ResponsesRequest

in_response_terms = Terms(
    ResponsesRequest.__struct_fields__,
    {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "logprobs": "top_logprobs",
        "response_format": "text",
        "reasoning_effort": "reasoning",
        "verbosity": "text",
    },
    (
        (r"\bmessages\[\d+\]\.?:? ?", "input: "),
        (r"\b(max_tokens|max_completion_tokens)\b", "max_output_tokens"),
        (r"\blogprobs(?==)", "top_logprobs"),
        (r"^(logprobs)\b", "top_logprobs"),
        (r"\bresponse_format needs json_schema\.schema", "text.format needs a schema"),
        (r"\bresponse_format\b", "text.format"),
        (r"\b(tools\[\d+\])\.function\.", r"\1."),
        (r"'function': \{('name': [^{}]*)\}", r"\1"),
        (r"'function': \{\.\.\.\}", "'name': ..., 'parameters': {...}"),
    ),
)
