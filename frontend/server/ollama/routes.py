"""The endpoints under /api: chat completions and embeddings in the shape of Ollama's API."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import aclosing
from functools import partial
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from pagewire.frontend.client import (
    TokensPrompt,
    check_generates,
    encode_within,
    infill_form,
    off_loop,
    tokenize_off_loop,
)
from pagewire.frontend.server.http import sse
from pagewire.frontend.server.http.body import Decoder, read_request
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.json_response import json_response
from pagewire.frontend.server.http.openapi import Operation
from pagewire.frontend.server.http.response import HttpResponse
from pagewire.frontend.server.ollama import managing
from pagewire.frontend.server.ollama.conversation import (
    chat_of_ollama,
    check_options,
    ollama_prompt,
)
from pagewire.frontend.server.ollama.field_names import FIELD_NAMES
from pagewire.frontend.server.ollama.models import listed_models, running_models, show_model
from pagewire.frontend.server.ollama.protocol import (
    ListedModels,
    OllamaChatAnswer,
    OllamaChatRequest,
    OllamaEmbedAnswer,
    OllamaEmbeddingsAnswer,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaFields,
    OllamaGenerateAnswer,
    OllamaGenerateRequest,
    RunningModels,
    ShownModel,
    ShowRequest,
)
from pagewire.frontend.server.ollama.writer import OllamaWriter, count_usage, write_loaded
from pagewire.frontend.server.openai.prepared_chat import PreparedChat, chat_params, prepare_chat
from pagewire.frontend.server.openai.protocol import ChatRequest
from pagewire.frontend.server.parsing.choice import ToolUse
from pagewire.frontend.server.pooling.protocol import EmbeddingRequest
from pagewire.frontend.server.pooling.requests import inputs_in, params_in, pool_prompts, tensors
from pagewire.frontend.server.pooling.results import GAP, fill_gaps
from pagewire.frontend.server.serving.exchange import Exchange
from pagewire.frontend.server.serving.generation_endpoint import Events, GenerationEndpoint
from pagewire.frontend.server.serving.service import Service, Services
from pagewire.frontend.server.shelf.services import keep_alive_seconds
from pagewire.ipc.version import __version__
from pagewire.ipc.wire.codec import Tensor

R = TypeVar("R", bound=OllamaChatRequest | OllamaGenerateRequest)

SHOWN = Decoder(ShowRequest)
# The version of Ollama whose API this is: clients such as Codex ask for one that has /v1/responses.
API_VERSION = "0.13.4"


def routes(services: Services) -> list[Operation]:
    """Return the routes of the endpoints."""

    async def tags(request: Request) -> Response:
        return json_response(listed_models(services))

    async def ps(request: Request) -> Response:
        return json_response(running_models(services))

    async def show(request: Request) -> Response:
        fields = await read_request(request, SHOWN, services.options)
        name = fields.model or fields.name
        async with services.use(name) as service:
            return json_response(show_model(service, name))

    async def version(request: Request) -> Response:
        return json_response({"version": f"{API_VERSION}+pagewire.{__version__}"})

    return [
        Operation(
            "POST",
            "/api/chat",
            OllamaEndpoint(services, "chat-", OllamaChatRequest, chat, FIELD_NAMES),
            "Generate the next message of a conversation, in the shape of Ollama's API.",
            body=OllamaChatRequest,
            result=OllamaChatAnswer,
            streams=OllamaChatAnswer,
        ),
        Operation(
            "POST",
            "/api/generate",
            OllamaEndpoint(services, "generate-", OllamaGenerateRequest, generate, FIELD_NAMES),
            "Answer a prompt, in the shape of Ollama's API.",
            body=OllamaGenerateRequest,
            result=OllamaGenerateAnswer,
            streams=OllamaGenerateAnswer,
        ),
        Operation(
            "POST",
            "/api/embed",
            GenerationEndpoint(services, "embed-", OllamaEmbedRequest, embed, FIELD_NAMES),
            "Embed texts, in the shape of Ollama's API.",
            body=OllamaEmbedRequest,
            result=OllamaEmbedAnswer,
        ),
        Operation(
            "POST",
            "/api/embeddings",
            GenerationEndpoint(services, "embed-", OllamaEmbeddingsRequest, embeddings, FIELD_NAMES),
            "Embed a text, in the older shape of Ollama's API.",
            body=OllamaEmbeddingsRequest,
            result=OllamaEmbeddingsAnswer,
        ),
        Operation(
            "GET", "/api/tags", tags, "List models, in the shape of Ollama's API.", result=ListedModels
        ),
        Operation("GET", "/api/ps", ps, "List models in memory.", result=RunningModels),
        Operation("POST", "/api/show", show, "Describe a model.", body=ShowRequest, result=ShownModel),
        Operation(
            "GET", "/api/version", version, "The version of Ollama with this API.", result=dict[str, str]
        ),
        *managing.routes(services),
    ]


class OllamaEndpoint(GenerationEndpoint[R]):
    """Generates; without a prompt, and with `keep_alive` 0, the model is ended, and not loaded before."""

    async def _use(self, request: R, exchange: Exchange, response: HttpResponse) -> None:
        generates = isinstance(request, OllamaGenerateRequest)
        prompt = request.prompt if isinstance(request, OllamaGenerateRequest) else request.messages
        ends = not prompt and request.keep_alive is not None and not keep_alive_seconds(request.keep_alive)
        if ends and (name := self.services.unload(request.model)) is not None:
            await response.send_json(200, write_loaded(name, generates, "unload"))
            return
        await super()._use(request, exchange, response)


async def chat(service: Service, request: OllamaChatRequest, exchange: Exchange) -> bytes | Events:
    """Run a request to /api/chat, and return its JSON or the lines of a stream.

    Raises:
        APIError, ValueError, TypeError: the request is invalid.
        Exceptions of the engine.
    """
    if not request.messages:
        return write_loaded(service.model(request.model), generates=False)
    prepared = await prepare_chat(
        service, chat_of_ollama(service, request), exchange, partial(ollama_prompt, request)
    )
    return await write_answer(prepared, OllamaWriter(prepared, generates=False))


async def generate(service: Service, request: OllamaGenerateRequest, exchange: Exchange) -> bytes | Events:
    """Run a request to /api/generate; as `chat`."""
    if not request.prompt:
        return write_loaded(service.model(request.model), generates=True)
    wanted, prompt = chat_of_ollama(service, request), request.prompt
    if request.suffix:
        tokenizer = service.tokenizer_of(request.model)
        form = infill_form(tokenizer)
        prompt, wanted.stop_token_ids = form.prompt(prompt, request.suffix), form.end_token_ids(tokenizer)
    if not (request.raw or request.suffix):
        prepared = await prepare_chat(service, wanted, exchange, partial(ollama_prompt, request))
    elif request.system or request.think:
        raise APIError(400, "raw and suffix: the prompt is the whole prompt, without system and think")
    else:
        prepared = await prepare_raw(service, wanted, prompt, exchange)
    return await write_answer(prepared, OllamaWriter(prepared, generates=True))


async def prepare_raw(service: Service, request: ChatRequest, text: str, exchange: Exchange) -> PreparedChat:
    """Return a request whose prompt is a text, without the chat template.

    Raises:
        APIError, ValueError, TypeError: the request is invalid.
    """
    service.model(request.model)
    check_generates(service.info)
    tokenizer = service.tokenizer_of(request.model)
    limit, salt = service.info.max_model_len, request.cache_salt
    ids = await tokenize_off_loop(len(text), encode_within, tokenizer, text, limit, True, False, salt)
    exchange.prompt = text
    prompt, tools = TokensPrompt(prompt_token_ids=ids, prompt=text), ToolUse()
    params = chat_params(service, request, tools, prompt)
    return PreparedChat(service, request, exchange, tools, prompt, params)


async def write_answer(prepared: PreparedChat, writer: OllamaWriter) -> bytes | Events:
    """Return the JSON of an answer, or the lines of a stream."""
    if prepared.request.stream:
        return stream_lines(prepared, writer)
    async with aclosing(prepared.replies()) as replies:
        async for reply, part in replies:
            answer = await off_loop(len(part.text), writer.whole, reply, part)
    return answer


async def stream_lines(prepared: PreparedChat, writer: OllamaWriter) -> Events:
    """Yield the lines of an answer."""
    async with aclosing(prepared.replies()) as replies:
        async for reply, part in replies:
            if line := writer.line(reply, part):
                yield line


async def embed(service: Service, request: OllamaEmbedRequest, exchange: Exchange) -> bytes | Iterator[bytes]:
    """Run a request to /api/embed, and return its JSON, in parts if it is large.

    Raises:
        APIError, ValueError, TypeError: the request is invalid.
        Exceptions of the engine.
    """
    model = service.model(request.model)
    outputs = await answer_embeddings(
        service, request, exchange, request.input, request.truncate is not False, request.dimensions
    )
    times = count_usage(exchange)
    response = OllamaEmbedAnswer(
        model, [GAP] * len(outputs), times["total_duration"], times["load_duration"], exchange.num_prompt
    )
    return fill_gaps(response, outputs, None)


async def embeddings(
    service: Service, request: OllamaEmbeddingsRequest, exchange: Exchange
) -> bytes | Iterator[bytes]:
    """Run a request to /api/embeddings, and return its JSON; as `embed`."""
    if not request.prompt:
        service.model(request.model)
        return sse.ENCODER.encode(OllamaEmbeddingsAnswer([]))
    return fill_gaps(
        OllamaEmbeddingsAnswer(GAP), await answer_embeddings(service, request, exchange, request.prompt), None
    )


async def answer_embeddings(
    service: Service,
    request: OllamaFields,
    exchange: Exchange,
    texts: str | list[str],
    cuts: bool = True,
    dimensions: int | None = None,
) -> list[Tensor]:
    """Return the embeddings of texts. cuts: those that are too long are cut, and else refused.

    Raises:
        APIError, ValueError, TypeError: the request is invalid.
        Exceptions of the engine.
    """
    if request.options is not None:
        check_options(service, request.options)
    service.model(request.model)
    fields = EmbeddingRequest(
        model=request.model,
        truncate_prompt_tokens=-1 if cuts else None,
        priority=request.priority,
        cache_salt=request.cache_salt,
    )
    params = params_in(service, fields, "embed", dimensions=dimensions)
    return tensors(await pool_prompts(service, fields, exchange, inputs_in(service, texts), params))
