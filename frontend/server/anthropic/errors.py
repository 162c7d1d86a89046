"""Errors of chat completions in the terms of /v1/messages."""

from __future__ import annotations

from pagewire.frontend.server.anthropic.protocol import MessagesRequest
from pagewire.frontend.server.openai.terms import Terms

in_message_terms = Terms(
    MessagesRequest.__struct_fields__,
    {
        "max_completion_tokens": "max_tokens",
        "stop": "stop_sequences",
        "response_format": "output_config",
        "reasoning_effort": "output_config",
        "thinking_token_budget": "thinking",
    },
    (
        (r"\bmax_completion_tokens\b", "max_tokens"),
        (r"\bstop(?= (must|has|is)\b)", "stop_sequences"),
        (r"\bresponse_format\b", "output_config.format"),
        (
            r"\bmessages\[\d+\]\.tool_call_id must be the id of an earlier tool call",
            "messages: tool_use_id must be the id of an earlier tool_use",
        ),
        (r"\b(tools\[\d+\])\.function\.parameters", r"\1.input_schema"),
        (r"\b(tools\[\d+\])\.function\.", r"\1."),
        (r"give 'none', 'required' or a function", "give the type 'none', 'any' or 'tool'"),
    ),
)
