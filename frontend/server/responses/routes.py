"""The endpoints under /v1/responses: chat completions made of items, which may be stored, continued and retrieved.

A request becomes one for a chat completion (`items`), which the engine answers (`generation`); `reader` and
`writer` make items and events of the output; `store` keeps them.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated

import msgspec
from starlette.requests import Request
from starlette.responses import Response as HTTPResponse
from starlette.responses import StreamingResponse

from pagewire.frontend.server.http import sse
from pagewire.frontend.server.http.body import Decoder, read_request
from pagewire.frontend.server.http.errors import APIError, api_error
from pagewire.frontend.server.http.json_response import json_response
from pagewire.frontend.server.http.openapi import Operation
from pagewire.frontend.server.http.query import Query, flag, number
from pagewire.frontend.server.http.tenants import tenant_of
from pagewire.frontend.server.openai.fitting import fitting_prompt
from pagewire.frontend.server.openai.prepared_chat import counted, prepare, prompt_of, tools_of
from pagewire.frontend.server.openai.protocol import ChatRequest
from pagewire.frontend.server.parsing.choice import ToolUse
from pagewire.frontend.server.responses.errors import in_response_terms
from pagewire.frontend.server.responses.generation import Generation, stop
from pagewire.frontend.server.responses.items import chat_request, check_request, read_input
from pagewire.frontend.server.responses.protocol import (
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
from pagewire.frontend.server.responses.store import ResponseStore, StoredItems, StoredResponse
from pagewire.frontend.server.serving.exchange import Exchange, while_connected
from pagewire.frontend.server.serving.generation_endpoint import Events, GenerationEndpoint
from pagewire.frontend.server.serving.service import Service
from pagewire.frontend.text.prompts import TokensPrompt
from pagewire.ipc.bounds import MAX_INT
from pagewire.ipc.wire.params import SamplingParams

PATH = "/v1/responses"
COUNTED = Decoder(InputTokensRequest)
AFTER = Query(
    "starting_after",
    Annotated[int, msgspec.Meta(ge=-1, le=MAX_INT)],
    "or from the one after this sequence_number; -1: from the first",
)


def routes(service: Service) -> list[Operation]:
    """Return the routes of the endpoints."""
    responses = StoredResponses(service)
    path = PATH + "/{response_id}"
    stream = Query("stream", bool, "return the events, from the first")
    order = Query("order", str, "asc or desc (default)")
    return [
        Operation(
            "POST",
            PATH,
            GenerationEndpoint(service, "resp_", ResponsesRequest, responses.create, in_response_terms),
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
            query=(order,),
            result=ItemList,
        ),
    ]


class StoredResponses:
    """The endpoints of one server, and the responses that it stores."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._store = ResponseStore(service.options.response_store_bytes)

    async def create(self, service: Service, request: ResponsesRequest, exchange: Exchange) -> bytes | Events:
        """POST /v1/responses."""
        return await answer(service, self._store, request, exchange)

    async def count_input_tokens(self, request: Request) -> HTTPResponse:
        """POST /v1/responses/input_tokens."""
        fields = await read_request(request, COUNTED, self._service.options)
        owner = tenant_of(request.scope).name
        try:
            service = self._service.of(fields.model)
            counting = num_input_tokens(service, self._store, fields, owner)
            return json_response(InputTokens(await while_connected(counting, request.receive)))
        except (APIError, ValueError, TypeError) as error:
            raise in_response_terms(api_error(error, COUNTED.fields)) from error

    async def retrieve(self, request: Request) -> HTTPResponse:
        """GET /v1/responses/{response_id}."""
        stored = self._stored(request)
        if not flag(request, "stream", False):
            return json_response(stored.response)
        if stored.events is None:
            message = "only a response created with background and stream can be streamed"
            raise APIError(400, message, param="stream")
        after = number(request, AFTER, -1)
        headers = {name.decode(): value.decode() for name, value in sse.HEADERS}
        return StreamingResponse(stored.follow(after), headers=headers, media_type="text/event-stream")

    async def cancel(self, request: Request) -> HTTPResponse:
        """POST /v1/responses/{response_id}/cancel."""
        stored = self._stored(request)
        if not stored.response.background:
            message = "only responses created with background can be cancelled"
            raise APIError(400, message, param="response_id")
        await stop(stored)
        return json_response(stored.response)

    async def delete(self, request: Request) -> HTTPResponse:
        """DELETE /v1/responses/{response_id}."""
        stored = self._stored(request)
        await stop(stored)
        self._store.forget(stored.id)
        return json_response(DeletedResponse(stored.id))

    async def list_items(self, request: Request) -> HTTPResponse:
        """GET /v1/responses/{response_id}/input_items."""
        items = self._stored(request).items
        if request.query_params.get("order", "desc") != "asc":
            items = items[::-1]
        return json_response(ItemList(data=items, first_id=items[0]["id"], last_id=items[-1]["id"]))

    def _stored(self, request: Request) -> StoredResponse:
        return self._store.get(request.path_params["response_id"], tenant_of(request.scope).name)


async def answer(
    service: Service, store: ResponseStore, request: ResponsesRequest, exchange: Exchange
) -> bytes | Events:
    """Run a request, and return the JSON of the response or the events of a stream.

    Raises:
        APIError, ValueError, TypeError: the request is invalid.
        Exceptions of the engine.
    """
    check_request(request)
    owner = exchange.tenant.name
    stored_items = StoredItems(store, owner, service.options.max_request_bytes)
    items = read_input(request.input, stored_items.item)
    wanted = chat_request(request, stored_items.conversation(request.previous_response_id) + items)
    chat = await prepare(service, wanted, exchange, partial(prompt_for, request))
    response = new_response(service.model(request.model), request, exchange, chat.params)
    response.store = response.store and store.limit > 0
    events: list[bytes] | None = [] if request.background and request.stream else None
    stored = StoredResponse(response, items, events, owner)
    generation = Generation(chat, stored, store)
    if request.background:  # what the engine would refuse later is refused now
        service.engine.session.prepare(
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


async def num_input_tokens(
    service: Service, store: ResponseStore, fields: InputTokensRequest, owner: str
) -> int:
    """Return the number of tokens of the prompt that a request of tenant `owner` with these fields would have.

    Raises:
        APIError, ValueError, TypeError: the request is invalid.
    """
    given = {name: getattr(fields, name) for name in fields.__struct_fields__}
    request = ResponsesRequest(**given)
    check_request(request)
    stored_items = StoredItems(store, owner, service.options.max_request_bytes)
    items = stored_items.conversation(request.previous_response_id)
    items += read_input(request.input, stored_items.item)
    service.model(request.model)
    chat = chat_request(request, items)
    prompt = await prompt_for(request, service, chat, await tools_of(service, chat, counts=True), counts=True)
    return len(await counted(service, prompt))


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
