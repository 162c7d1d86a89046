"""The endpoints under /v1/responses: chat completions made of items, which may be stored, continued and retrieved.

A request becomes one for a chat completion (`items`), which the engine answers (`generation`); `reader` and
`writer` make items and events of the output; `store` keeps them.
"""

from __future__ import annotations

import dataclasses
import logging
from functools import partial
from typing import Annotated

import msgspec
from starlette.requests import Request
from starlette.responses import Response as HTTPResponse
from starlette.responses import StreamingResponse

from pagewire.frontend.client import TokensPrompt
from pagewire.frontend.server.http import sse
from pagewire.frontend.server.http.body import Decoder, read_request
from pagewire.frontend.server.http.errors import APIError, FieldNames, api_error
from pagewire.frontend.server.http.json_response import json_response
from pagewire.frontend.server.http.openapi import Operation
from pagewire.frontend.server.http.query import ORDER, Query, newest_first, read_flag, read_number
from pagewire.frontend.server.http.tenants import tenant_of
from pagewire.frontend.server.openai.fitting import fitting_prompt
from pagewire.frontend.server.openai.prepared_chat import (
    PreparedChat,
    place_media,
    prepare_chat,
    prompt_of,
    tools_of,
)
from pagewire.frontend.server.openai.protocol import ChatRequest
from pagewire.frontend.server.parsing.choice import ToolUse
from pagewire.frontend.server.responses.conversation_routes import conversation_name, conversation_routes
from pagewire.frontend.server.responses.conversations import ConversationStore, StoredConversation
from pagewire.frontend.server.responses.field_names import FIELD_NAMES
from pagewire.frontend.server.responses.generation import Generation, stop_generation
from pagewire.frontend.server.responses.items import chat_of_responses, check_responses_request, read_input
from pagewire.frontend.server.responses.protocol import (
    ConversationReference,
    DeletedResponse,
    InputTokens,
    InputTokensRequest,
    ItemList,
    ReasoningOptions,
    Response,
    ResponseEvent,
    ResponsesRequest,
    TextFormat,
    TextOptions,
)
from pagewire.frontend.server.responses.store import JSON, ResponseStore, StoredItems, StoredResponse
from pagewire.frontend.server.responses.tools import ResponseTools
from pagewire.frontend.server.responses.writer import ResponseWriter
from pagewire.frontend.server.serving.exchange import Exchange, while_connected
from pagewire.frontend.server.serving.generation_endpoint import Events, GenerationEndpoint
from pagewire.frontend.server.serving.service import Service, Services
from pagewire.ipc.bounds import MAX_INT
from pagewire.ipc.quoting import quoted
from pagewire.ipc.wire.params import SamplingParams

logger = logging.getLogger("pagewire.server")

PATH = "/v1/responses"
CREATE = "response.create"  # the type of a message that asks for a response
PROCESSED = "response.processed"  # of one that only says that a response was read: it has no answer
COUNTED = Decoder(InputTokensRequest)
AFTER = Query(
    "starting_after",
    Annotated[int, msgspec.Meta(ge=-1, le=MAX_INT)],
    "or from the one after this sequence_number; -1: from the first",
)


def routes(services: Services) -> list[Operation]:
    """Return the routes of the endpoints."""
    responses = StoredResponses(services)
    path = PATH + "/{response_id}"
    stream = Query("stream", bool, "return the events, from the first")
    return [
        Operation(
            "POST",
            PATH,
            GenerationEndpoint(services, "resp_", ResponsesRequest, responses.create, FIELD_NAMES),
            "Respond to a conversation; the response may be stored.",
            body=ResponsesRequest,
            result=Response,
            streams=ResponseEvent,
        ),
        Operation(
            "POST",
            PATH + "/input_tokens",
            responses.count_input_tokens,
            "Count the tokens of the prompt that a request would have.",
            body=InputTokensRequest,
            result=InputTokens,
        ),
        Operation(
            "GET",
            path,
            responses.retrieve,
            "Retrieve a stored response.",
            query=(stream, AFTER),
            result=Response,
            streams=ResponseEvent,
        ),
        Operation("DELETE", path, responses.delete, "Delete a stored response.", result=DeletedResponse),
        Operation(
            "POST",
            path + "/cancel",
            responses.cancel,
            "Cancel a response in the background.",
            result=Response,
        ),
        Operation(
            "GET",
            path + "/input_items",
            responses.list_items,
            "List the input items of a stored response.",
            query=(ORDER,),
            result=ItemList,
        ),
        *conversation_routes(services.options, responses.conversations),
    ]


class StoredResponses:
    """The endpoints of one server, and the responses that it stores.

    Attributes:
        conversations: those that responses may be added to.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self._store = ResponseStore(services.options.response_store_bytes)
        self.conversations = ConversationStore(services.options.response_store_bytes)

    async def create(self, service: Service, request: ResponsesRequest, exchange: Exchange) -> bytes | Events:
        """POST /v1/responses."""
        return await answer_response(service, self._store, self.conversations, request, exchange)

    async def count_input_tokens(self, request: Request) -> HTTPResponse:
        """POST /v1/responses/input_tokens."""
        fields = await read_request(request, COUNTED, self._services.options)
        owner = tenant_of(request.scope).name
        try:
            async with self._services.use(fields.model) as service:
                counting = num_input_tokens(service, self._store, self.conversations, fields, owner)
                return json_response(InputTokens(await while_connected(counting, request.receive)))
        except (APIError, ValueError, TypeError) as error:
            raise api_error(error, FieldNames(FIELD_NAMES, COUNTED.fields)) from error

    async def retrieve(self, request: Request) -> HTTPResponse:
        """GET /v1/responses/{response_id}."""
        stored = self._stored(request)
        if not read_flag(request, "stream", False):
            return json_response(stored.response)
        if stored.events is None:
            message = "only a response created with background and stream can be streamed"
            raise APIError(400, message, param="stream")
        after = read_number(request, AFTER, -1)
        headers = {name.decode(): value.decode() for name, value in sse.HEADERS}
        return StreamingResponse(stored.follow(after), headers=headers, media_type="text/event-stream")

    async def cancel(self, request: Request) -> HTTPResponse:
        """POST /v1/responses/{response_id}/cancel."""
        stored = self._stored(request)
        if not stored.response.background:
            message = "only responses created with background can be cancelled"
            raise APIError(400, message, param="response_id")
        await stop_generation(stored)
        return json_response(stored.response)

    async def delete(self, request: Request) -> HTTPResponse:
        """DELETE /v1/responses/{response_id}."""
        stored = self._stored(request)
        await stop_generation(stored)
        self._store.forget(stored.id)
        return json_response(DeletedResponse(stored.id))

    async def list_items(self, request: Request) -> HTTPResponse:
        """GET /v1/responses/{response_id}/input_items."""
        items = self._stored(request).items
        if newest_first(request):
            items = items[::-1]
        first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
        return json_response(ItemList(data=items, first_id=first, last_id=last))

    def _stored(self, request: Request) -> StoredResponse:
        return self._store.get(request.path_params["response_id"], tenant_of(request.scope).name)


async def answer_response(
    service: Service,
    store: ResponseStore,
    conversations: ConversationStore,
    request: ResponsesRequest,
    exchange: Exchange,
) -> bytes | Events:
    """Run a request, and return the JSON of the response or the events of a stream.

    Raises:
        APIError, ValueError, TypeError: the request is invalid.
        Exceptions of the engine.
    """
    settle_transport(request, exchange)
    if request.type == PROCESSED:
        return b""
    check_responses_request(request)
    owner = exchange.tenant.name
    stored_items = StoredItems(store, owner, service.options.max_request_bytes, exchange.socket)
    generates = request.generate is not False
    continues = request.previous_response_id is not None
    items = read_input(request.input, stored_items.item, may_be_empty=continues or not generates)
    joined = conversation_of(conversations, request, owner, service.options.max_request_bytes)
    before = stored_items.conversation(request.previous_response_id) if joined is None else joined.items()
    tools = ResponseTools(request.tools, before + items, strict=service.options.strict_tools)
    wanted = chat_of_responses(request, before + items, tools)
    chat = await prepare_chat(service, wanted, exchange, partial(prompt_for, request))
    if not generates:
        chat = without_output(chat)
    response = new_response(service.model(request.model), request, exchange, chat.params)
    response.store = response.store and store.limit > 0
    events: list[bytes] | None = [] if request.background and request.stream else None
    kept_by = exchange.socket if store.limit and not response.store else None
    stored = StoredResponse(response, items, events, owner, kept_by)
    if joined is not None:
        response.conversation = ConversationReference(joined.id)
    writer = ResponseWriter(response, tools, request.include or (), generates=generates)
    generation = Generation(
        chat, stored, store, writer, partial(join, conversations, joined, response, items)
    )
    if request.background:  # what the engine would refuse later is refused now
        service.engine.session.intake.prepare(
            chat.prompt,
            chat.params,
            exchange.id,
            wanted.priority or 0,
            lora_request=service.adapter(request.model),
            prompt_adapter_request=service.prompt_adapter(request.model),
        )
        generation.start_in_background()
        return stored.follow(-1) if request.stream else sse.ENCODER.encode(response)
    if request.stream:
        return generation.stream()
    return await generation.whole()


def settle_transport(request: ResponsesRequest, exchange: Exchange) -> None:
    """Check the fields that belong to one transport, HTTP or a WebSocket; over the latter, responses are streamed.

    Raises:
        APIError: one is not possible with the request's.
    """
    if exchange.socket is None:
        if request.type is not None:
            raise APIError(400, "type is a field of messages over a WebSocket", param="type")
        return
    if request.type not in (CREATE, PROCESSED):
        message = f"the type of a message must be {CREATE}, got {quoted(request.type or 'nothing')}"
        raise APIError(400, message, param="type")
    if request.background:
        raise APIError(
            400, "background needs HTTP: over a WebSocket a response is streamed", param="background"
        )
    if request.stream is False:
        raise APIError(
            400, "stream=false needs HTTP: over a WebSocket a response is streamed", param="stream"
        )
    request.stream = True


def without_output(chat: PreparedChat) -> PreparedChat:
    """Return the chat for a response that only computes its prompt, and one token, which has no meaning."""
    params = msgspec.structs.replace(chat.params, max_tokens=1, min_tokens=0)
    return dataclasses.replace(chat, params=params)


async def num_input_tokens(
    service: Service,
    store: ResponseStore,
    conversations: ConversationStore,
    fields: InputTokensRequest,
    owner: str,
) -> int:
    """Return the number of tokens of the prompt that a request of tenant `owner` with these fields would have.

    Raises:
        APIError, ValueError, TypeError: the request is invalid.
    """
    given = {name: getattr(fields, name) for name in fields.__struct_fields__}
    request = ResponsesRequest(**given)
    check_responses_request(request)
    stored_items = StoredItems(store, owner, service.options.max_request_bytes)
    joined = conversation_of(conversations, request, owner, service.options.max_request_bytes)
    items = stored_items.conversation(request.previous_response_id) if joined is None else joined.items()
    items += read_input(request.input, stored_items.item)
    service.model(request.model)
    tools = ResponseTools(request.tools, items, strict=service.options.strict_tools)
    chat = chat_of_responses(request, items, tools)
    prompt = await prompt_for(request, service, chat, await tools_of(service, chat, counts=True), counts=True)
    return len(await place_media(service, prompt))


def conversation_of(
    store: ConversationStore, request: ResponsesRequest, owner: str, max_bytes: int
) -> StoredConversation | None:
    """The conversation that a request names; None if it names none.

    Raises:
        APIError: there is none with that id, or it has over `max_bytes`.
    """
    name = conversation_name(request.conversation)
    if name is None:
        return None
    conversation = store.get(name, owner)
    if conversation.num_bytes > max_bytes:
        message = f"the conversation has over {max_bytes} bytes: begin another, or remove items"
        raise APIError(413, message, param="conversation", code="request_too_large")
    return conversation


def join(
    store: ConversationStore, conversation: StoredConversation | None, response: Response, items: list[JSON]
) -> None:
    """Add a response that has ended, and its input, to its conversation, unless that was deleted meanwhile."""
    if conversation is None or conversation.id not in store:
        return
    conversation.append(items + msgspec.to_builtins(response.output))
    if not store.keep(conversation):
        logger.warning("conversation %s is not stored any more: it is too large", conversation.id)


def new_response(
    model: str, request: ResponsesRequest, exchange: Exchange, params: SamplingParams
) -> Response:
    """Return the response without output: the request's fields, and the defaults of those that are not given."""
    text = request.text or TextOptions()
    return Response(
        id=exchange.id,
        created_at=exchange.created,
        status="queued" if request.background else "in_progress",
        background=bool(request.background),
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        model=model,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        reasoning=request.reasoning or ReasoningOptions(),
        store=request.store is not False,
        temperature=params.temperature,
        text=TextOptions(text.format or TextFormat("text"), text.verbosity),
        tool_choice=request.tool_choice or "auto",
        tools=request.tools or [],
        top_logprobs=request.top_logprobs or 0,
        top_p=params.top_p,
        truncation=request.truncation or "disabled",
        user=request.user,
        safety_identifier=request.safety_identifier,
        prompt_cache_key=request.prompt_cache_key,
        prompt_cache_retention=request.prompt_cache_retention,
        metadata=request.metadata or {},
    )


async def prompt_for(
    request: ResponsesRequest, service: Service, chat: ChatRequest, tools: ToolUse, counts: bool = False
) -> TokensPrompt:
    """Return the prompt of a conversation; with truncation, from the first turn on with which it fits the model.

    counts: its tokens are only counted.

    Raises:
        APIError, ValueError, TypeError: as `prompt_of`.
    """
    if request.truncation != "auto":
        return await prompt_of(service, chat, tools, counts)
    room = service.info.max_model_len - (request.max_output_tokens or 1)
    prompt, _ = await fitting_prompt(service, chat, tools, room, counts)
    return prompt
