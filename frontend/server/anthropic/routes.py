"""The endpoints under /v1/messages: chat completions in the shape of Anthropic's API."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response

from pagewire.frontend.api.off_loop import off_loop
from pagewire.frontend.server.anthropic.conversation import chat_request
from pagewire.frontend.server.anthropic.errors import in_message_terms
from pagewire.frontend.server.anthropic.protocol import (
    CountTokensRequest,
    CountTokensResponse,
    GeneratedMessage,
    MessageEvent,
    MessagesRequest,
)
from pagewire.frontend.server.anthropic.writer import EventWriter, blocks_of, end_of, message_usage
from pagewire.frontend.server.http import sse
from pagewire.frontend.server.http.api_shapes import NO_THREADS
from pagewire.frontend.server.http.body import Decoder, read_request
from pagewire.frontend.server.http.errors import APIError, api_error
from pagewire.frontend.server.http.json_response import json_response
from pagewire.frontend.server.http.openapi import Operation
from pagewire.frontend.server.openai.prepared_chat import PreparedChat, counted, prepare, prompt_of, tools_of
from pagewire.frontend.server.parsing.reasoning import REASONING
from pagewire.frontend.server.serving.exchange import Exchange, while_connected
from pagewire.frontend.server.serving.generation_endpoint import Events, GenerationEndpoint
from pagewire.frontend.server.serving.service import Service
from pagewire.ipc.quoting import quoted

PATH = "/v1/messages"
# Of Anthropic's API, as in the header `anthropic-version`. Answers are the same in both. The later one has lost the
# sampling parameters, which are taken all the same: models that are served here need them.
VERSIONS = ("2023-06-01", "2026-10-21")
COUNTED = Decoder(CountTokensRequest)


def routes(service: Service) -> list[Operation]:
    """Return the routes of the endpoints."""

    async def count_tokens(request: Request) -> Response:
        fields = await read_request(request, COUNTED, service.options)
        try:
            check_version(request.headers)
            counting = num_tokens(service.of(fields.model), fields)
            return json_response(CountTokensResponse(await while_connected(counting, request.receive)))
        except (APIError, ValueError, TypeError) as error:
            raise in_message_terms(api_error(error, COUNTED.fields)) from error

    return [
        Operation(
            "POST",
            PATH,
            GenerationEndpoint(service, "msg_", MessagesRequest, answer, in_message_terms),
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


async def answer(service: Service, request: MessagesRequest, exchange: Exchange) -> bytes | Events:
    """Run a request, and return the JSON of the message or the events of a stream.

    Raises:
        APIError, ValueError, TypeError: the request is invalid.
        Exceptions of the engine.
    """
    check_version(exchange.headers)
    if request.thread is not None:
        why = "thread is not supported: the server keeps no conversations; send all messages, without thread"
        raise APIError(400, why, param="thread", code=NO_THREADS)
    wanted = chat_request(request, service.formats.reasoning is not None, limits_reasoning(service, request))
    chat = await prepare(service, wanted, exchange)
    omits_thoughts = request.thinking is not None and request.thinking.display == "omitted"
    if request.stream:
        return stream(chat, EventWriter(omits_thoughts))
    message = new_message(chat)
    async with aclosing(chat.replies()) as replies:
        async for reply, part in replies:
            message.content = await off_loop(len(part.text), blocks_of, reply, omits_thoughts)
            end = end_of(part, bool(reply.tool_calls), is_full(chat))
            message.stop_reason, message.stop_sequence = end
    message.usage = message_usage(exchange.usage())
    return sse.ENCODER.encode(message)


def limits_reasoning(service: Service, request: MessagesRequest) -> bool:
    """Return True if reasoning of the model can be ended after some tokens: the mark that ends it is one token."""
    if service.formats.reasoning is None:
        return False
    closing = REASONING[service.formats.reasoning].close
    return len(service.tokenizer_of(request.model).encode(closing, add_special_tokens=False)) == 1


async def stream(chat: PreparedChat, writer: EventWriter) -> Events:
    """Yield the events of a message; all events of a step are one piece."""
    begun = False
    async with aclosing(chat.replies()) as replies:
        async for reply, part in replies:
            events = b"" if begun else writer.start(new_message(chat))
            begun = True
            events += writer.read(reply)
            if part.finished():
                end = end_of(part, writer.called, is_full(chat))
                events += writer.end(*end, message_usage(chat.exchange.usage()))
            if events:
                yield events


def new_message(chat: PreparedChat) -> GeneratedMessage:
    """Return a message without content, with the token counts so far."""
    return GeneratedMessage(
        id=chat.exchange.id,
        model=chat.service.model(chat.request.model),
        content=[],
        usage=message_usage(chat.exchange.usage()),
    )


def is_full(chat: PreparedChat) -> bool:
    """Return True if the reply has all tokens that its request allows; a long prompt may leave room for fewer."""
    return chat.exchange.num_output >= (chat.params.max_tokens or 0)


async def num_tokens(service: Service, request: CountTokensRequest) -> int:
    """Return the number of tokens of the prompt that a request with these fields would have.

    Raises:
        APIError, ValueError, TypeError: the request is invalid.
    """
    service.model(request.model)
    chat = chat_request(request, service.formats.reasoning is not None)
    prompt = await prompt_of(service, chat, await tools_of(service, chat, counts=True), counts=True)
    return len(await counted(service, prompt))
