"""The names in /v1/messages of the fields of chat completions, which its requests become."""

from __future__ import annotations

from pagewire.frontend.server.parsing.choice import NOT_AUTO

FIELD_NAMES = {
    NOT_AUTO: "the type 'none', 'any' or 'tool'",
    "max_completion_tokens": "max_tokens",
    "messages[].tool_call_id": "messages.tool_use_id",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
    "tools[].function": "tools[]",
    "tools[].function.parameters": "tools[].input_schema",
}
