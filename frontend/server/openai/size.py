"""Checks of how much a request asks for, before anything is copied, rendered, tokenized or submitted.

The limits are in `ipc.budget`; those that a server's operator may want to change are options.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagewire.frontend.client import OFF_LOOP_CHARS, LogprobBudget, RequestOutput, check_characters
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.serving.service import Service
from pagewire.ipc.wire.budget import MAX_MESSAGES, MAX_PARTS, MAX_TOOL_VALUES
from pagewire.ipc.wire.params import SamplingParams, check_logit_edits

CHOICE_CHARS = 64  # characters that take as long to write as what surrounds an output
VALUE_CHARS = 16  # characters that take as long to render as a value, such as a string in a schema
MESSAGE_CHARS = 256  # characters of text that take as long to render as what surrounds a message or part


def check_amount(service: Service, num_prompts: int, params: SamplingParams) -> None:
    """Check the sequences that a request asks for, and the tokens in them.

    Raises:
        APIError: there are more than the server's options allow. ValueError: their parameters are too long.
    """
    options, info = service.options, service.info
    num_sequences = num_prompts * params.n
    asked = f"{num_prompts} prompts with n={params.n}" if num_prompts > 1 else f"n={params.n}"
    param = "prompt" if num_prompts > 1 else "n"
    if num_sequences > options.max_request_sequences:
        message = (
            f"{asked} are {num_sequences} sequences; a request may have at most {options.max_request_sequences} "
            "(--max-request-sequences): send several requests"
        )
        raise APIError(400, message, param=param, code="request_too_large")
    length = min(params.max_tokens or info.max_model_len, info.max_model_len)
    if num_sequences > 1 and num_sequences * length > options.max_request_tokens:
        message = (
            f"{asked} and up to {length} tokens for each sequence are {num_sequences * length} tokens; a request "
            f"may ask for at most {options.max_request_tokens} (--max-request-tokens): give a lower max_tokens, or "
            "send several requests"
        )
        raise APIError(400, message, param=param, code="request_too_large")
    check_logit_edits(num_sequences, params.num_logit_edits)


def logprob_budget(service: Service, num_copies: int = 1) -> LogprobBudget:
    """Return the budget of log probabilities for one answer. num_copies: how often it has those of a prompt."""
    return LogprobBudget(service.options.max_request_logprobs, num_copies, service.info.vocab_size)


def writing_size(outputs: Sequence[RequestOutput]) -> int:
    """Return how much is to be written of outputs: characters, and log probabilities, which take as long."""
    size = 0
    for output in outputs:
        size += sum(map(len, filter(None, output.prompt_logprobs or ())))
        for part in output.outputs:
            size += CHOICE_CHARS + len(part.text) + sum(map(len, filter(None, part.logprobs or ())))
    return size


def check_conversation(service: Service, messages: Sequence[Any]) -> int:
    """Check the size of a conversation; returns about how much text it is to render, in characters.

    Raises:
        APIError: it has too many messages, or content parts and tool calls.
        ContextLengthError: its text is far too long for the model.
    """
    if len(messages) > MAX_MESSAGES:
        raise too_many_values("messages", len(messages), MAX_MESSAGES)
    num_chars = num_parts = 0
    for message in messages:
        if not isinstance(message, dict):
            continue  # it is refused with the template
        for name in ("content", "tool_calls"):
            field = message.get(name)
            if isinstance(field, str):
                num_chars += len(field)
            elif isinstance(field, list):
                num_parts += len(field)
                if num_parts > MAX_PARTS:
                    raise too_many_values("content parts and tool calls", num_parts, MAX_PARTS)
                num_chars += sum(map(chars_of, field))
    check_characters(num_chars, service.info.max_model_len)
    num_chars += VALUE_CHARS * num_json_values(messages, OFF_LOOP_CHARS // VALUE_CHARS)
    return num_chars + MESSAGE_CHARS * (len(messages) + num_parts)


def check_tools(tools: Sequence[Any] | None) -> int:
    """Check the size of a request's tools; returns about how long they take to read and render, in characters.

    Raises:
        APIError: they have too many values.
    """
    number = num_json_values(tools, MAX_TOOL_VALUES)
    if number > MAX_TOOL_VALUES:
        message = f"tools: their schemas have over {MAX_TOOL_VALUES} values in all"
        raise APIError(400, message, param="tools", code="request_too_large")
    return VALUE_CHARS * number


def num_json_values(data: Any, most: int) -> int:
    """Return the number of values in JSON data; one over `most` if there are more, which are not looked at."""
    number, rest = 0, [data]
    while rest:
        part = rest.pop()
        if not isinstance(part, (dict, list)):
            continue
        number += len(part)
        if number > most:
            return most + 1
        rest.extend(part.values() if isinstance(part, dict) else part)
    return number


def chars_of(part: Any) -> int:
    """Return the length of a content part's text; 0 if it has none."""
    text = part.get("text") if isinstance(part, dict) else part
    return len(text) if isinstance(text, str) else 0


def too_many_values(things: str, number: int, limit: int) -> APIError:
    """Return the error for a conversation with too many messages or parts."""
    message = f"messages: the conversation has {number} {things} or more; at most {limit} are allowed"
    return APIError(400, message, param="messages", code="request_too_large")
