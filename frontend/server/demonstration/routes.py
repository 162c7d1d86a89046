"""The endpoint /generate of vLLM's demonstration server, whose clients need no API of others.

A stream is JSON objects, each followed by a null character; each has the whole texts so far.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from pagewire.frontend.client import RequestOutput, check_characters
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.openapi import Operation
from pagewire.frontend.server.openai.beams import beam_outputs, check_beam_fields
from pagewire.frontend.server.openai.completions import DEFAULT_MAX_TOKENS, batches_of
from pagewire.frontend.server.openai.protocol import SamplingFields
from pagewire.frontend.server.openai.sampling import make_sampling_params
from pagewire.frontend.server.openai.size import check_amount
from pagewire.frontend.server.serving.exchange import Exchange
from pagewire.frontend.server.serving.generation_endpoint import Events, GenerationEndpoint
from pagewire.frontend.server.serving.service import Service, Services
from pagewire.ipc.wire.params import NumLogprobs

END = b"\0"  # of an object in a stream
# Fields about what an answer has beside its texts, which here is nothing.
UNANSWERED = (
    "echo",
    "logprobs",
    "prompt_logprobs",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "stream_options",
)


class DemonstrationRequest(SamplingFields, kw_only=True):
    """Body of POST /generate. max_tokens: 16 unless given. logprobs: not supported."""

    prompt: str
    logprobs: NumLogprobs | None = None


class DemonstrationAnswer(msgspec.Struct):
    """Response of /generate. text: the prompt with its completion, for each of the n outputs."""

    text: list[str]


def routes(services: Services) -> list[Operation]:
    """Return the route of the endpoint."""
    endpoint = GenerationEndpoint(services, "gen-", DemonstrationRequest, generate_demonstration)
    return [
        Operation(
            "POST",
            "/generate",
            endpoint,
            "Complete a prompt, as vLLM's demonstration server does.",
            body=DemonstrationRequest,
            result=DemonstrationAnswer,
            streams=DemonstrationAnswer,
        )
    ]


async def generate_demonstration(
    service: Service, request: DemonstrationRequest, exchange: Exchange
) -> bytes | Events:
    """Run a request, and return the JSON of the response or the objects of a stream. Beams come in one piece.

    Raises:
        APIError, ValueError, TypeError: the request is invalid.
        Exceptions of the engine.
    """
    for name in UNANSWERED:
        if getattr(request, name) is not None:
            raise APIError(400, f"{name} has no effect on /generate: use /v1/completions", param=name)
    service.model(request.model)
    streams = bool(request.stream)
    if request.use_beam_search:
        request.stream = None
    check_beam_fields(request)
    check_characters(len(request.prompt), service.info.max_model_len)
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    params = make_sampling_params(service, request, max_tokens, None)
    check_amount(service, 1, params)
    exchange.prompt = request.prompt
    if request.use_beam_search:
        (output,) = await beam_outputs(service, request, [request.prompt], params, exchange)
        exchange.count(0, output)
        whole = answer_demonstration(request, [part.text for part in output.outputs])
        return in_one_piece(whole) if streams else whole
    batches = batches_of(service, request, [request.prompt], params, exchange)
    if streams:
        return growing(request, batches, exchange)
    async with aclosing(batches):
        async for outputs in batches:
            for index, output in outputs:
                exchange.count(index, output)
                best = output.best(request.n or 1)
    return answer_demonstration(request, [part.text for part in best])


async def growing(
    request: DemonstrationRequest,
    batches: AsyncGenerator[list[tuple[int, RequestOutput]], None],
    exchange: Exchange,
) -> Events:
    """Yield the texts so far, whenever there is more of one."""
    texts = [""] * (request.n or 1)
    async with aclosing(batches):
        async for outputs in batches:
            for index, output in outputs:
                exchange.count(index, output)
                for part in output.outputs:
                    texts[part.index] += part.text
            yield answer_demonstration(request, texts) + END


async def in_one_piece(whole: bytes) -> Events:
    """Yield a stream of one object."""
    yield whole + END


def answer_demonstration(request: DemonstrationRequest, texts: list[str]) -> bytes:
    """Return the JSON of a response with these completions."""
    return msgspec.json.encode(DemonstrationAnswer([request.prompt + text for text in texts]))
