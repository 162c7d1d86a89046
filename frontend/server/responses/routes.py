"""/v1/responses: chat completions whose answers are made of items, and may be kept, continued and fetched later.

A request becomes one for a chat completion (`items`), which the engine answers; `writer` makes
items and events of that; `store` keeps them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from starlette.requests import Request
from starlette.responses import Response as HTTPResponse
from starlette.responses import StreamingResponse

from pagewire.frontend.inputs import TokensPrompt
from pagewire.frontend.outputs import RequestOutput
from pagewire.frontend.server.http import sse
from pagewire.frontend.server.http.errors import APIError, api_error
from pagewire.frontend.server.http.exchange import Exchange
from pagewire.frontend.server.http.generation_endpoint import Events, GenerationEndpoint
from pagewire.frontend.server.http.json_response import json_response
from pagewire.frontend.server.http.openapi import Operation
from pagewire.frontend.server.http.query import Query, flag, number
from pagewire.frontend.server.openai.chat import (
    check_chat,
    generate,
    params_of,
    prompt_of,
    reply_parser,
    tools_of,
)
from pagewire.frontend.server.openai.logprobs import TokenNames, chat_logprobs
from pagewire.frontend.server.openai.protocol import ChatRequest
from pagewire.frontend.server.parsing.choice import ToolUse
from pagewire.frontend.server.parsing.reply import read
from pagewire.frontend.server.responses.items import chat_request, check_request, read_input
from pagewire.frontend.server.responses.protocol import (
    DeletedResponse,
    ItemList,
    ReasoningOptions,
    Response,
    ResponseEvent,
    ResponsesRequest,
    Status,
    TextFormat,
    TextOptions,
)
from pagewire.frontend.server.responses.store import Kept, ResponseStore
from pagewire.frontend.server.responses.writer import ResponseWriter
from pagewire.frontend.server.service import Service
from pagewire.ipc.params import SamplingParams

logger = logging.getLogger("pagewire.server")

CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}  # of failures, by status; others: server_error


def routes(service: Service) -> list[Operation]:
    """The endpoints."""
    responses = KeptResponses(service)
    path = "/v1/responses/{response_id}"
    stream = Query("stream", bool, "its events, from the first")
    after = Query("starting_after", int, "or from the one after this sequence_number")
    order = Query("order", str, "asc or desc (default)")
    return [
        Operation(
            "POST",
            "/v1/responses",
            GenerationEndpoint(service, "resp", ResponsesRequest, responses.create),
            "Answer a conversation; the answer may be kept.",
            body=ResponsesRequest,
            result=Response,
            streams=ResponseEvent,
        ),
        Operation(
            "GET",
            path,
            responses.retrieve,
            "A response that is kept.",
            query=(stream, after),
            result=Response,
            streams=ResponseEvent,
        ),
        Operation("DELETE", path, responses.delete, "Forget a response.", result=DeletedResponse),
        Operation(
            "POST", path + "/cancel", responses.cancel, "End a response in the background.", result=Response
        ),
        Operation(
            "GET",
            path + "/input_items",
            responses.list_items,
            "The input that it answers.",
            query=(order,),
            result=ItemList,
        ),
    ]


class KeptResponses:
    """The endpoints of one server, and the responses that it keeps."""

    def __init__(self, service: Service) -> None:
        self._store = ResponseStore(service.options.response_store_bytes)

    async def create(self, service: Service, request: ResponsesRequest, exchange: Exchange) -> bytes | Events:
        """POST /v1/responses."""
        return await answer(service, self._store, request, exchange)

    async def retrieve(self, request: Request) -> HTTPResponse:
        """GET /v1/responses/{response_id}."""
        kept = self._kept(request)
        if not flag(request, "stream", False):
            return json_response(kept.response)
        if kept.told is None:
            raise APIError(
                400, "only what was created with background and stream can be streamed", param="stream"
            )
        after = number(request, "starting_after", -1)
        headers = {name.decode(): value.decode() for name, value in sse.HEADERS}
        return StreamingResponse(kept.follow(after), headers=headers)

    async def cancel(self, request: Request) -> HTTPResponse:
        """POST /v1/responses/{response_id}/cancel."""
        kept = self._kept(request)
        if not kept.response.background:
            raise APIError(
                400, "only responses created with background can be cancelled", param="response_id"
            )
        await stop(kept)
        return json_response(kept.response)

    async def delete(self, request: Request) -> HTTPResponse:
        """DELETE /v1/responses/{response_id}."""
        kept = self._kept(request)
        await stop(kept)
        self._store.forget(kept.response.id)
        return json_response(DeletedResponse(kept.response.id))

    async def list_items(self, request: Request) -> HTTPResponse:
        """GET /v1/responses/{response_id}/input_items."""
        items = self._kept(request).items
        if request.query_params.get("order", "desc") != "asc":
            items = items[::-1]
        return json_response(ItemList(data=items, first_id=items[0]["id"], last_id=items[-1]["id"]))

    def _kept(self, request: Request) -> Kept:
        return self._store.get(request.path_params["response_id"])


async def answer(
    service: Service, store: ResponseStore, request: ResponsesRequest, exchange: Exchange
) -> bytes | Events:
    """The answer: whole, as a stream of events, or, in the background, that there will be one.

    Raises:
        APIError, ValueError, TypeError: what is wrong with the request. And what the engine raises.
    """
    check_request(request)
    items = read_input(request.input)
    chat = chat_request(request, store.conversation(request.previous_response_id) + items)
    tools = tools_of(service, chat)
    check_chat(chat)
    params = params_of(service, chat, tools)
    response = begun(service, request, exchange, params)
    response.store = response.store and store.limit > 0
    prompt = await fitting_prompt(service, request, chat, tools)
    exchange.prompt = prompt.get("prompt", "")
    kept = Kept(response, items, [] if request.background and request.stream else None)
    run = Run(service, chat, tools, exchange, kept, store)
    if request.background:
        service.engine.session.prepare(
            prompt, params, exchange.id, 0
        )  # refuses now what would be refused later
        run.leave(prompt, params)
        return kept.follow(-1) if request.stream else sse.ENCODER.encode(response)
    if request.stream:
        return run.stream(prompt, params)
    return await run.whole(prompt, params)


def begun(
    service: Service, request: ResponsesRequest, exchange: Exchange, params: SamplingParams
) -> Response:
    """The response before anything has come of it: what was asked, and what holds where nothing was.

    Raises:
        APIError: there is no such model.
    """
    text = request.text or TextOptions()
    return Response(
        id=exchange.id,
        created_at=exchange.created,
        status="queued" if request.background else "in_progress",
        background=bool(request.background),
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        model=service.model(request.model),
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
        metadata=request.metadata or {},
    )


async def fitting_prompt(
    service: Service, request: ResponsesRequest, chat: ChatRequest, tools: ToolUse
) -> TokensPrompt:
    """The conversation as a prompt; with truncation, from the first turn on with which it fits the model.

    Raises:
        APIError, ValueError, TypeError: as `prompt_of`.
    """
    prompt = await prompt_of(service, chat, tools)
    room = service.info.max_model_len - (request.max_output_tokens or 1)
    if request.truncation != "auto" or len(prompt["prompt_token_ids"]) <= room:
        return prompt
    roles = [message["role"] for message in chat.messages]
    head = next((i for i, role in enumerate(roles) if role != "system"), len(roles))
    turns = [i for i, role in enumerate(roles) if role == "user" and i > head]
    low, high = 0, len(turns)  # the first turn that fits is one of turns[low:high], or the last
    while low < high:
        middle = (low + high) // 2
        messages = chat.messages[:head] + chat.messages[turns[middle] :]
        prompt = await prompt_of(service, msgspec.structs.replace(chat, messages=messages), tools)
        if len(prompt["prompt_token_ids"]) <= room:
            high, best = middle, prompt
        else:
            low = middle + 1
    return best if high < len(turns) else prompt


class Run:
    """One response while it is made."""

    def __init__(
        self,
        service: Service,
        chat: ChatRequest,
        tools: ToolUse,
        exchange: Exchange,
        kept: Kept,
        store: ResponseStore,
    ) -> None:
        self.service, self.chat, self.exchange, self.kept, self.store = service, chat, exchange, kept, store
        self.writer = ResponseWriter(kept.response)
        self._tools = tools
        as_ids = service.options.return_tokens_as_token_ids
        self._names = TokenNames(service.engine.session.tokenizer, as_ids)

    async def steps(self, prompt: TokensPrompt, params: SamplingParams) -> AsyncGenerator[list[bytes], None]:
        """Make it; what there is to tell, step by step. What goes wrong before the first is raised, later it is
        told.
        """
        begun = False
        self._parser = reply_parser(self.chat, self._tools, prompt.get("prompt"))
        try:
            async with aclosing(generate(self.service, self.chat, self.exchange, prompt, params)) as news:
                async for ((_, output),) in news:
                    self.exchange.count(0, output)
                    events = [] if begun else self.writer.start()
                    begun = True
                    yield events + self._read(output)
        except Exception as error:
            if not begun:
                raise
            yield self._fail(error)

    async def whole(self, prompt: TokensPrompt, params: SamplingParams) -> bytes:
        """The response when it is complete."""
        async with aclosing(self.steps(prompt, params)) as steps:
            async for _ in steps:
                pass
        self.keep()
        return sse.ENCODER.encode(self.kept.response)

    async def stream(self, prompt: TokensPrompt, params: SamplingParams) -> Events:
        """Its events as they come."""
        before = self.writer.create()
        async with aclosing(self.steps(prompt, params)) as steps:
            async for events in steps:
                yield b"".join(before + events)
                before = []
        self.keep()

    def leave(self, prompt: TokensPrompt, params: SamplingParams) -> None:
        """Have it made in the background.

        Raises:
            APIError: there is no room to keep it meanwhile.
        """
        self.kept.tell(self.writer.create() + self.writer.queue())
        self.kept.task = asyncio.create_task(self._make(prompt, params))
        if not self.store.put(self.kept):
            self.kept.task.cancel()
            message = "there is no room to keep a response (--response-store-bytes)"
            raise APIError(429, message, code="response_store_full")

    async def _make(self, prompt: TokensPrompt, params: SamplingParams) -> None:
        """Make it, in a task, which is cancelled to end it early."""
        try:
            async with aclosing(self.steps(prompt, params)) as steps:
                async for events in steps:
                    self.kept.tell(events)
        except asyncio.CancelledError:
            self.kept.tell(self.writer.end("cancelled", self.exchange.usage()))
        except Exception as error:
            self.kept.tell(self._fail(error))
        self.keep()
        if not self.service.options.disable_log_requests:
            failure = self.kept.response.error
            why = None if failure is None else failure.message
            self.exchange.log(200, why, self.service.options.max_log_len)

    def keep(self) -> None:
        """Keep what it has become, if it is to be kept."""
        response = self.kept.response
        if response.store and not self.store.put(self.kept):
            logger.warning("response %s is not kept: it is too large", response.id)

    def _read(self, output: RequestOutput) -> list[bytes]:
        """What is new of the output, which has one part."""
        (part,) = output.outputs
        logprobs = []
        if self.chat.logprobs:
            found = chat_logprobs(
                self._names, part.token_ids, part.logprobs or (), self.chat.top_logprobs or 0
            )
            logprobs = found.content or []
        events = self.writer.read(read(self._parser, part.text, part.finished()), logprobs)
        if part.finished():
            status: Status = "incomplete" if part.finish_reason == "length" else "completed"
            events += self.writer.end(status, self.exchange.usage())
        return events

    def _fail(self, error: Exception) -> list[bytes]:
        told = api_error(error)
        if told.status == 500:
            logger.error("response %s failed", self.kept.response.id, exc_info=error)
        return self.writer.fail(CODES.get(told.status, "server_error"), told.message, self.exchange.usage())


async def stop(kept: Kept) -> None:
    """End a response that is made in the background, and wait until it has ended."""
    if kept.busy:
        assert kept.task is not None
        kept.task.cancel()
        await asyncio.wait((kept.task,))
