"""The names in /api of the fields of chat completions and the engine's parameters, which its requests become."""

from __future__ import annotations

from pagewire.frontend.server.parsing.choice import NOT_AUTO

# Options with the names of the engine's parameters.
SAME_OPTIONS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "presence_penalty",
    "frequency_penalty",
)
FIELD_NAMES = {name: f"options.{name}" for name in SAME_OPTIONS} | {
    "max_completion_tokens": "options.num_predict",
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "response_format": "format",
    "tool_choice": "tools",
    NOT_AUTO: "no tools",
}
