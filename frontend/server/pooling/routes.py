"""The endpoints that pool: embeddings, classes, scores, reranking, and raw results."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Iterator
from typing import Any, TypeAlias

from pagewire.frontend.client import PoolingRequestOutput, ScorePlan, off_loop
from pagewire.frontend.server.http import sse
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.openapi import Operation
from pagewire.frontend.server.pooling.conversation import check_conversation_form, conversation_prompt
from pagewire.frontend.server.pooling.protocol import (
    ClassData,
    ClassifyRequest,
    ClassifyResponse,
    EmbeddingData,
    EmbeddingRequest,
    EmbeddingResponse,
    PooledData,
    PoolingFields,
    PoolingRequest,
    PoolingResponse,
    RerankDocument,
    RerankRequest,
    RerankResponse,
    RerankResult,
    RerankUsage,
    ScoreData,
    ScoreRequest,
    ScoreResponse,
)
from pagewire.frontend.server.pooling.requests import (
    check_num_prompts,
    check_pairs,
    check_pooling_input,
    inputs_in,
    params_in,
    pool_prompts,
    tensors,
    usage,
    work_size,
)
from pagewire.frontend.server.pooling.results import GAP, EmbedDtype, fill_gaps
from pagewire.frontend.server.serving.exchange import Exchange
from pagewire.frontend.server.serving.generation_endpoint import GenerationEndpoint
from pagewire.frontend.server.serving.service import Service, Services
from pagewire.ipc.wire.codec import Tensor

Json: TypeAlias = bytes | Iterator[bytes]


def routes(services: Services) -> list[Operation]:
    """Return the routes of the endpoints."""
    kinds: list[tuple[tuple[str, ...], str, Any, Any, Any, str]] = [
        (("/v1/embeddings",), "embd-", EmbeddingRequest, embeddings, EmbeddingResponse, "Embed texts."),
        (("/v1/score", "/score"), "score-", ScoreRequest, score, ScoreResponse, "Score pairs of texts."),
        (
            ("/v1/rerank", "/rerank", "/v2/rerank"),
            "rerank-",
            RerankRequest,
            rerank,
            RerankResponse,
            "Sort documents by how well they fit a query.",
        ),
        (
            ("/v1/classify", "/classify"),
            "classify-",
            ClassifyRequest,
            classify,
            ClassifyResponse,
            "Classify texts.",
        ),
        (("/pooling",), "pool-", PoolingRequest, pooling, PoolingResponse, "Pool texts for any task."),
    ]
    return [
        Operation(
            "POST", path, GenerationEndpoint(services, prefix, kind, answer), text, body=kind, result=result
        )
        for paths, prefix, kind, answer, result, text in kinds
        for path in paths
    ]


async def embeddings(service: Service, request: EmbeddingRequest, exchange: Exchange) -> Json:
    """The embeddings of a request's inputs, as JSON."""
    model = service.model(request.model)
    check_conversation_form(request)
    params = params_in(service, request, "embed", dimensions=request.dimensions, normalize=request.normalize)
    inputs = await request_prompts(service, request)
    outputs = await pool_prompts(service, request, exchange, inputs, params)
    response = EmbeddingResponse(
        id=exchange.id,
        created=exchange.created,
        model=model,
        data=[EmbeddingData(index=i, embedding=GAP) for i in range(len(outputs))],
        usage=usage(exchange),
    )
    return fill_gaps(response, tensors(outputs), await base64_dtype(request))


async def pooling(service: Service, request: PoolingRequest, exchange: Exchange) -> Json:
    """The results of a request's inputs for any task, as JSON."""
    model = service.model(request.model)
    check_conversation_form(request)
    fields = {name: getattr(request, name) for name in ("dimensions", "normalize", "activation")}
    params = params_in(service, request, request.task, **fields)
    inputs = await request_prompts(service, request)
    outputs = await pool_prompts(service, request, exchange, inputs, params)
    results = tensors(outputs)
    response = PoolingResponse(
        id=exchange.id,
        created=exchange.created,
        model=model,
        data=[PooledData(index=i, data=GAP, shape=list(result.shape)) for i, result in enumerate(results)],
        usage=usage(exchange),
    )
    return fill_gaps(response, results, await base64_dtype(request))


async def base64_dtype(request: EmbeddingRequest) -> EmbedDtype | None:
    """The type of the numbers that base64 is to be made of; None: they are to be written as numbers.

    Raises:
        APIError: the server lacks numpy.
    """
    if request.embed_dtype in (
        "float16",
        "bfloat16",
    ):  # made by numpy, which takes a tenth of a second to import
        try:
            await asyncio.to_thread(importlib.import_module, "numpy")
        except ModuleNotFoundError:
            raise APIError(
                400, f"{request.embed_dtype} needs numpy, which the server has not", param="embed_dtype"
            ) from None
    return (request.embed_dtype or "float32") if request.encoding_format == "base64" else None


async def request_prompts(service: Service, request: EmbeddingRequest) -> list[Any]:
    """The inputs of a request, or the prompt of its conversation. Raises: as `inputs_in`, `conversation_prompt`."""
    if request.messages is not None:
        return [await conversation_prompt(service, request)]
    return inputs_in(service, request.input)


async def classify(service: Service, request: ClassifyRequest, exchange: Exchange) -> Json:
    """The classes of a request's inputs, as JSON."""
    model = service.model(request.model)
    params = params_in(service, request, "classify", activation=request.activation)
    inputs = inputs_in(service, request.input)
    outputs = await pool_prompts(service, request, exchange, inputs, params)
    names = service.info.pooling.labels if service.info.pooling is not None else []

    def classes(index: int, result: Tensor) -> ClassData:
        probs = result.tolist()
        best = probs.index(max(probs))
        label = names[best] if best < len(names) else None
        return ClassData(index=index, label=label, probs=GAP, num_classes=len(probs))

    results = tensors(outputs)
    response = ClassifyResponse(
        id=exchange.id,
        created=exchange.created,
        model=model,
        data=await off_loop(
            work_size(outputs), lambda: [classes(i, result) for i, result in enumerate(results)]
        ),
        usage=usage(exchange),
    )
    return fill_gaps(response, results, None)


async def score(service: Service, request: ScoreRequest, exchange: Exchange) -> bytes:
    """The scores of a request's pairs, as JSON."""
    model = service.model(request.model)
    scores = await answer_scores(
        service, request, exchange, request.text_1, request.text_2, request.activation
    )
    return sse.ENCODER.encode(
        ScoreResponse(
            id=exchange.id,
            created=exchange.created,
            model=model,
            data=[ScoreData(index=i, score=value) for i, value in enumerate(scores)],
            usage=usage(exchange),
        )
    )


async def rerank(service: Service, request: RerankRequest, exchange: Exchange) -> bytes:
    """A request's documents by their scores, the best first, as JSON."""
    model = service.model(request.model)
    if request.max_tokens_per_doc is not None:
        if request.truncate_prompt_tokens is not None:
            raise APIError(400, "max_tokens_per_doc: give it or truncate_prompt_tokens, not both")
        request.truncate_prompt_tokens = request.max_tokens_per_doc
    documents = [document_text(document) for document in request.documents]
    scores = await answer_scores(service, request, exchange, request.query, documents, None)
    order = sorted(range(len(scores)), key=lambda i: -scores[i])[: request.top_n or None]
    shows = request.return_documents is not False
    return sse.ENCODER.encode(
        RerankResponse(
            id=exchange.id,
            model=model,
            results=[
                RerankResult(
                    index=i,
                    relevance_score=scores[i],
                    document=RerankDocument(documents[i]) if shows else None,
                )
                for i in order
            ],
            usage=RerankUsage(exchange.num_prompt),
        )
    )


async def answer_scores(
    service: Service,
    request: PoolingFields,
    exchange: Exchange,
    first: Any,
    second: Any,
    activation: bool | None,
) -> list[float]:
    """The score of each pair of texts.

    Raises:
        APIError, ValueError: there are none or too many texts, their numbers do not fit, or a text is too long.
    """
    names = ("query", "documents") if isinstance(request, RerankRequest) else ("text_1", "text_2")
    for texts, param in zip((first, second), names, strict=True):
        each = [texts] if isinstance(texts, str) else texts
        check_num_prompts(len(each), param)
        for text in each:
            check_pooling_input(service, text)
    plan = ScorePlan(service.info, first, second)
    check_pairs(service, plan.prompts, names[1])
    params = params_in(service, request, plan.task, activation=activation)
    outputs: list[PoolingRequestOutput[Any]] = await pool_prompts(
        service, request, exchange, plan.prompts, params
    )
    scores = await off_loop(work_size(outputs), plan.scores, outputs)
    return [output.outputs.score for output in scores]


def document_text(document: str | dict[str, Any]) -> str:
    """The text of a document.

    Raises:
        APIError: it has none.
    """
    text = document.get("text") if isinstance(document, dict) else document
    if not isinstance(text, str):
        raise APIError(422, "documents must be texts, or objects with a text", param="documents")
    return text
