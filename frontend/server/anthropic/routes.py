"""The endpoints under /v1/messages: chat completions in the shape of Anthropic's API."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import replace

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from pagewire.frontend.client import off_loop
from pagewire.frontend.server.anthropic.cache_control import cache_wishes
from pagewire.frontend.server.anthropic.context_edits import EditedPrompt, read_edits
from pagewire.frontend.server.anthropic.conversation import chat_of_anthropic
from pagewire.frontend.server.anthropic.field_names import FIELD_NAMES
from pagewire.frontend.server.anthropic.protocol import (
    AppliedEdits,
    CountTokensRequest,
    CountTokensResponse,
    GeneratedMessage,
    MessageEvent,
    MessagesRequest,
    MessageUsage,
    OriginalTokens,
)
from pagewire.frontend.server.anthropic.writer import EventWriter, blocks_of, end_of, message_usage
from pagewire.frontend.server.http import sse
from pagewire.frontend.server.http.api_shapes import NO_THREADS
from pagewire.frontend.server.http.body import Decoder, read_request
from pagewire.frontend.server.http.errors import APIError, FieldNames, api_error
from pagewire.frontend.server.http.json_response import json_response
from pagewire.frontend.server.http.openapi import Operation
from pagewire.frontend.server.openai.prepared_chat import PreparedChat, place_media, prepare_chat, tools_of
from pagewire.frontend.server.serving.exchange import Exchange, while_connected
from pagewire.frontend.server.serving.generation_endpoint import Events, GenerationEndpoint
from pagewire.frontend.server.serving.service import Service, Services
from pagewire.ipc.quoting import quoted

PATH = "/v1/messages"
# Of Anthropic's API, as in the header `anthropic-version`. Answers are the same in both. The later one has lost the
# sampling parameters, which are taken all the same: models that are served here need them.
VERSIONS = ("2023-06-01", "2026-10-21")
COUNTED = Decoder(CountTokensRequest)


def routes(services: Services) -> list[Operation]:
    """Return the routes of the endpoints."""

    async def count_tokens(request: Request) -> Response:
        fields = await read_request(request, COUNTED, services.options)
        try:
            check_version(request.headers)
            async with services.use(fields.model) as service:
                return json_response(
                    await while_connected(count_request_tokens(service, fields), request.receive)
                )
        except (APIError, ValueError, TypeError) as error:
            raise api_error(error, FieldNames(FIELD_NAMES, COUNTED.fields)) from error

    return [
        Operation(
            "POST",
            PATH,
            GenerationEndpoint(services, "msg_", MessagesRequest, answer_messages, FIELD_NAMES),
            "Generate the next message of a conversation, in the shape of Anthropic's API.",
            body=MessagesRequest,
            result=GeneratedMessage,
            streams=MessageEvent,
        ),
        Operation(
            "POST",
            PATH + "/count_tokens",
            count_tokens,
            "Count the tokens of the prompt that a request to /v1/messages would have.",
            body=CountTokensRequest,
            result=CountTokensResponse,
        ),
    ]


def check_version(headers: Mapping[str, str]) -> None:
    """Refuse a version of the API that would have other answers; raises APIError."""
    if (given := headers.get("anthropic-version", VERSIONS[0])) not in VERSIONS:
        message = f"anthropic-version must be one of {', '.join(VERSIONS)}, got {quoted(given)}"
        raise APIError(400, message)


async def answer_messages(service: Service, request: MessagesRequest, exchange: Exchange) -> bytes | Events:
    """Run a request, and return the JSON of the message or the events of a stream.

    Raises:
        APIError, ValueError, TypeError: the request is invalid.
        Exceptions of the engine.
    """
    check_version(exchange.headers)
    if request.thread is not None:
        why = "thread is not supported: the server keeps no conversations; send all messages, without thread"
        raise APIError(400, why, param="thread", code=NO_THREADS)
    wanted = chat_of_anthropic(
        request,
        service.formats.reasoning is not None,
        limits_reasoning(service, request),
        service.options.strict_tools,
    )
    edits = read_edits(request.context_management)
    edited = EditedPrompt(edits or [])
    chat = await prepare_chat(service, wanted, exchange, edited.render)
    tokenizer = service.tokenizer_of(request.model)
    chat = replace(chat, retention=await cache_wishes(request, chat.prompt, tokenizer))
    applied = UNSET if edits is None else AppliedEdits(edited.applied)
    omits_thoughts = request.thinking is not None and request.thinking.display == "omitted"
    if request.stream:
        return stream_messages(chat, EventWriter(omits_thoughts), applied)
    message = new_message(chat)
    message.context_management = applied
    async with aclosing(chat.replies()) as replies:
        async for reply, part in replies:
            message.content = await off_loop(len(part.text), blocks_of, reply, omits_thoughts)
            end = end_of(part, bool(reply.tool_calls), is_full(chat))
            message.stop_reason, message.stop_sequence = end
    message.usage = messages_usage(chat)
    return sse.ENCODER.encode(message)


def limits_reasoning(service: Service, request: MessagesRequest) -> bool:
    """Return True if reasoning of the model can be ended after some tokens: the mark that ends it is one token."""
    if service.formats.marks is None:
        return False
    closing = service.formats.marks.close
    return len(service.tokenizer_of(request.model).encode(closing, add_special_tokens=False)) == 1


async def stream_messages(
    chat: PreparedChat, writer: EventWriter, applied: AppliedEdits | UnsetType = UNSET
) -> Events:
    """Yield the events of a message; all events of a step are one piece. applied: edits of the conversation."""
    begun = False
    async with aclosing(chat.replies()) as replies:
        async for reply, part in replies:
            events = b"" if begun else writer.start(new_message(chat))
            begun = True
            events += writer.read(reply)
            if part.finished():
                end = end_of(part, writer.called, is_full(chat))
                events += writer.end(*end, messages_usage(chat), applied)
            if events:
                yield events


def new_message(chat: PreparedChat) -> GeneratedMessage:
    """Return a message without content, with the token counts so far."""
    return GeneratedMessage(
        id=chat.exchange.id,
        model=chat.service.model(chat.request.model),
        content=[],
        usage=messages_usage(chat),
    )


def messages_usage(chat: PreparedChat) -> MessageUsage:
    """Return the token counts so far."""
    times = (wish.seconds for wish in chat.retention)
    sizes = (each.num_tokens for each in chat.exchange.retained)
    return message_usage(chat.exchange.usage(), list(zip(times, sizes, strict=False)))


def is_full(chat: PreparedChat) -> bool:
    """Return True if the reply has all tokens that its request allows; a long prompt may leave room for fewer."""
    return chat.exchange.num_output >= (chat.params.max_tokens or 0)


async def count_request_tokens(service: Service, request: CountTokensRequest) -> CountTokensResponse:
    """Return the number of tokens of the prompt that a request with these fields would have.

    Raises:
        APIError, ValueError, TypeError: the request is invalid.
    """
    service.model(request.model)
    chat = chat_of_anthropic(
        request, service.formats.reasoning is not None, strict_tools=service.options.strict_tools
    )
    edits = read_edits(request.context_management)
    edited = EditedPrompt(edits or [])
    prompt = await edited.render(service, chat, await tools_of(service, chat, counts=True), counts=True)
    number = len(await place_media(service, prompt))
    if edits is None:
        return CountTokensResponse(number)
    return CountTokensResponse(number, OriginalTokens(number if edited.original is None else edited.original))
