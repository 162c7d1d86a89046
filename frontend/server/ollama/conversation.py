"""Conversion of requests to /api/chat and /api/generate to those for chat completions."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

from pagewire.frontend.client import MediaItem, TokensPrompt
from pagewire.frontend.server.http.body import AbsentFields
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.warnings import warn_client
from pagewire.frontend.server.ollama.field_names import SAME_OPTIONS
from pagewire.frontend.server.ollama.protocol import (
    GenerationFields,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaOptions,
)
from pagewire.frontend.server.openai.fitting import fitting_prompt
from pagewire.frontend.server.openai.prepared_chat import prompt_of
from pagewire.frontend.server.openai.protocol import ChatRequest, JsonSchema, ResponseFormat
from pagewire.frontend.server.openai.size import too_many_values
from pagewire.frontend.server.parsing.choice import ToolUse
from pagewire.frontend.server.serving.service import Service
from pagewire.ipc.quoting import quoted
from pagewire.ipc.wire.budget import MAX_PARTS

ABSENT = AbsentFields(OllamaOptions)

ANSWER_SHARE = 0.25  # of the context length: kept free for the answer to a long conversation

JSON = dict[str, Any]


def chat_of_ollama(service: Service, request: GenerationFields) -> ChatRequest:
    """Convert a request to one for a chat completion.

    Raises:
        APIError, ValueError: a message, an option or a field is malformed or not supported.
    """
    options = request.options or OllamaOptions()
    check_options(service, options)
    num_predict = service.local.max_tokens if options.num_predict is None else options.num_predict
    return ChatRequest(
        model=request.model,
        messages=ollama_messages(request),
        tools=request.tools or None if isinstance(request, OllamaChatRequest) else None,
        stream=request.stream is not False,
        max_completion_tokens=None if num_predict is None or num_predict < 0 else num_predict,
        response_format=ollama_format(request),
        logprobs=request.logprobs,
        top_logprobs=request.top_logprobs,
        priority=request.priority,
        cache_salt=request.cache_salt,
        **thinking_fields(service, request),
        **ollama_sampling_fields(service, options),
    )


def ollama_sampling_fields(service: Service, options: OllamaOptions) -> JSON:
    """Return how a chat completion samples: as the options say, or else as local models do."""
    penalty = 1.0 if options.repeat_last_n == 0 else options.repeat_penalty
    given = {name: getattr(options, name) for name in SAME_OPTIONS} | {"repetition_penalty": penalty}
    return {name: getattr(service.local, name) if value is None else value for name, value in given.items()}


def check_options(service: Service, options: OllamaOptions) -> None:
    """Check the options that have no effect, or are not supported.

    Raises:
        APIError, ValueError: one would have an effect.
    """
    ABSENT.settle(options)
    wanted, limit = options.num_ctx, service.info.max_model_len
    if wanted is not None and wanted != limit:
        warn_client(f"options.num_ctx={wanted} has no effect: the context length is {limit} for all requests")
    if options.repeat_last_n not in (None, 0, -1) and options.repeat_penalty not in (None, 1):
        warn_client(
            f"options.repeat_last_n={options.repeat_last_n} has no effect: repeat_penalty is over all tokens of "
            "the prompt and the answer"
        )


def thinking_fields(service: Service, request: GenerationFields) -> JSON:
    """Return the fields of a chat completion that turn reasoning on or off.

    Raises:
        APIError: the server cannot tell reasoning from answers.
    """
    if request.think is None:
        return {}
    if request.think and service.formats.reasoning is None:
        raise APIError(
            400, "think is not supported: the model's format of reasoning is unknown (--reasoning-parser)"
        )
    effort = request.think if isinstance(request.think, str) else None
    variables = {"enable_thinking": bool(request.think)}
    return {"chat_template_kwargs": variables, "reasoning_effort": effort}


async def ollama_prompt(
    request: GenerationFields, service: Service, chat: ChatRequest, tools: ToolUse
) -> TokensPrompt:
    """Return the prompt of a conversation, without its oldest turns if it is too long, which is said.

    Ollama lets an answer push the oldest tokens out. Here it ends where the context is full, so a part of that
    stays free for it: the most tokens that it may have, but no more than `ANSWER_SHARE`.

    Raises:
        APIError, ValueError, TypeError: as `prompt_of`; the conversation is too long, and may not be truncated.
    """
    if request.truncate is False:
        return await prompt_of(service, chat, tools)
    context = service.info.max_model_len
    answer = min(chat.max_completion_tokens or context, int(context * ANSWER_SHARE))
    prompt, left_out = await fitting_prompt(service, chat, tools, context - max(1, answer))
    if left_out:
        warn_client(
            f"the context length is {context}: the first {left_out} messages of the conversation were left out"
        )
    return prompt


def ollama_format(request: GenerationFields) -> ResponseFormat | None:
    """Return the format of the answer in the form of chat completions; None: it is free."""
    if isinstance(request.format, dict):
        return ResponseFormat("json_schema", JsonSchema(schema=request.format))
    return ResponseFormat("json_object") if request.format == "json" else None


def ollama_messages(request: GenerationFields) -> list[JSON]:
    """Return the messages of a chat. Raises APIError."""
    if isinstance(request, OllamaGenerateRequest):
        system = [{"role": "system", "content": request.system}] if request.system else []
        message = {"role": "user", "content": request.prompt}
        return [*system, with_images(message, request.images, "images")]
    assert isinstance(request, OllamaChatRequest)
    return with_call_ids(request.messages or ())


class UnansweredCalls:
    """The calls of a conversation whose results have not come yet. Ollama's have no ids; templates need some."""

    def __init__(self) -> None:
        self._number = 0
        self._open: set[str] = set()  # ids
        self._order: deque[str] = deque()  # ids, open or not
        self._by_name: dict[str, deque[str]] = defaultdict(deque)

    def add(self, name: Any) -> str:
        """Add a call of a function; returns its id, of nine digits: the only form that all templates accept."""
        self._number += 1
        call_id = f"{self._number:09d}"
        self._open.add(call_id)
        self._order.append(call_id)
        self._by_name[str(name)].append(call_id)
        return call_id

    def take(self, name: Any) -> str | None:
        """Return the id of the first open call of a function (None: of any), and close it; None: there is none."""
        queue = self._order if name is None else self._by_name[str(name)]
        while queue:
            if (call_id := queue.popleft()) in self._open:
                self._open.remove(call_id)
                return call_id
        return None


def with_call_ids(messages: Sequence[Any]) -> list[JSON]:
    """Return messages in the form of chat completions, where a call has an id, and its result names it.

    Raises:
        APIError: there are too many calls, a message's images are none, or it is the result of no call.
    """
    calls, number = UnansweredCalls(), 0
    result = []
    for index, message in enumerate(messages):
        converted = {name: value for name, value in message.items() if name not in ("images", "tool_name")}
        converted = with_images(converted, message.get("images"), f"messages[{index}].images")
        given = message.get("tool_calls")
        if isinstance(given, list):
            if (number := number + len(given)) > MAX_PARTS:
                raise too_many_values("tool calls", number, MAX_PARTS)
            converted["tool_calls"] = [with_id(call, calls) for call in given]
        if message.get("role") == "tool":
            name = message.get("tool_name", message.get("name"))
            call_id = calls.take(name)
            if call_id is None:
                of_it = "" if name is None else f" of {quoted(name)}"
                raise APIError(400, f"messages[{index}]: there is no call{of_it} before its result")
            converted["tool_call_id"] = call_id
        result.append(converted)
    return result


def with_images(message: JSON, images: Any, place: str) -> JSON:
    """Return a message with its images, which are base64, as parts of its content. place: of the images.

    Raises:
        APIError: they are no list of base64.
    """
    if not images:
        return message
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise APIError(400, f"{place} must be a list of images in base64")
    parts: list[JSON] = [
        {
            "type": "image",
            "image": MediaItem("image", f"data:;base64,{image}", place=f"{place}[{index}]"),
        }
        for index, image in enumerate(images)
    ]
    text = message.get("content")
    return {**message, "content": [*parts, *([{"type": "text", "text": text}] if text else [])]}


def with_id(call: Any, calls: UnansweredCalls) -> Any:
    """Return a call with an id; what is no call is returned as it is, and refused later."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    return {"id": calls.add(function.get("name")), "type": "function", "function": function}
