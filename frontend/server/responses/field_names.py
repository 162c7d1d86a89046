"""The names in /v1/responses of the fields of chat completions, which its requests become."""

from __future__ import annotations

FIELD_NAMES = {
    "logprobs": "top_logprobs",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "messages[]": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "tool_choice.allowed_tools": "tool_choice",
    "tools[].function": "tools[]",
    "verbosity": "text.verbosity",
}
