"""Requests and responses of the endpoints that pool: OpenAI's embeddings, and the shapes of vLLM, Cohere and Jina.

A field that is null counts as not given. The docstrings appear as descriptions in /openapi.json.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from pagewire.frontend.server.openai.protocol import InputMessages
from pagewire.frontend.server.pooling.results import EmbedDtype
from pagewire.ipc.wire.budget import MAX_TOKENS
from pagewire.ipc.wire.items import TokenIds
from pagewire.ipc.wire.params import Name, Priority, TruncatedLength
from pagewire.ipc.wire.pooling import Dimensions, PoolingTask

Input: TypeAlias = str | Annotated[list[str | int | TokenIds], Meta(max_length=MAX_TOKENS)]
Texts: TypeAlias = str | Annotated[list[str], Meta(max_length=MAX_TOKENS)]


class PoolingFields(msgspec.Struct, kw_only=True):
    """The fields that all requests to pool have.

    truncate_prompt_tokens: keep only this many tokens at the beginning of each text; -1: what the model takes.
    prompt_name: one of the model's prompts ("query"), put before each text. timeout: seconds; then comes 408.
    """

    model: Name | None = None
    user: Name | None = None
    truncate_prompt_tokens: TruncatedLength | None = None
    prompt_name: Name | None = None
    priority: Priority | None = None
    cache_salt: Name | None = None
    request_id: Name | None = None
    timeout: float | None = None


class EmbeddingRequest(PoolingFields, kw_only=True):
    """POST /v1/embeddings.

    input: a text, token ids, or a list of these. messages: a conversation in place of `input`, of which the chat
        template makes one text; the other fields of the template go with it.
    encoding_format: numbers (float), or base64 of them, which is shorter and faster; bytes is not supported.
    embed_dtype: of base64 (default: float32); 16 bits are half as long. endianness: base64 is little-endian.
    dimensions: for models that were trained for fewer (Matryoshka). normalize: scale to length 1.
    """

    input: Input | None = None
    encoding_format: Literal["float", "base64", "bytes"] | None = None
    embed_dtype: EmbedDtype | None = None
    endianness: Literal["native", "little", "big"] | None = None
    dimensions: Dimensions | None = None
    normalize: bool | None = None
    messages: InputMessages | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None


class PoolingRequest(EmbeddingRequest, kw_only=True):
    """POST /pooling. task: None: the model's default. activation: scores rather than logits of classes."""

    task: PoolingTask | None = None
    activation: bool | None = None


class ClassifyRequest(PoolingFields, kw_only=True):
    """POST /v1/classify. input: a text, token ids, or a list of these. activation: scores, not logits."""

    input: Input
    activation: bool | None = None


class ScoreRequest(PoolingFields, kw_only=True):
    """POST /v1/score. text_1: one text, or as many as text_2. activation: of a cross-encoder, not its logits."""

    text_1: Texts
    text_2: Texts
    activation: bool | None = None


class RerankRequest(PoolingFields, kw_only=True):
    """POST /v2/rerank, as of Cohere and Jina.

    documents: texts, or objects with a text. top_n: return only the best of them. return_documents: true by
        default.
    max_tokens_per_doc: Cohere's name of truncate_prompt_tokens, which counts the query and special tokens too.
    """

    query: str
    documents: Annotated[list[str | dict[str, Any]], Meta(max_length=MAX_TOKENS)]
    top_n: Annotated[int, Meta(ge=0)] | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: TruncatedLength | None = None


class PoolingUsage(msgspec.Struct):
    """Token counts."""

    prompt_tokens: int
    total_tokens: int


class ListResponse(msgspec.Struct, kw_only=True):
    """The fields of responses with a list of results, besides the list."""

    id: str
    created: int
    model: str
    usage: PoolingUsage
    object: Literal["list"] = "list"


class EmbeddingData(msgspec.Struct, kw_only=True):
    """An embedding: numbers, or base64 of little-endian numbers of `embed_dtype`."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingResponse(ListResponse, kw_only=True):
    """The response of /v1/embeddings."""

    data: list[EmbeddingData]


class PooledData(msgspec.Struct, kw_only=True):
    """A result: numbers, a list of them for each token, or base64 of little-endian numbers. shape: dimensions."""

    index: int
    data: list[Any] | str
    shape: list[int]
    object: Literal["pooling"] = "pooling"


class PoolingResponse(ListResponse, kw_only=True):
    """The response of /pooling."""

    data: list[PooledData]


class ClassData(msgspec.Struct, kw_only=True):
    """The classes of a text. label: of the most likely one, if the model names its classes."""

    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class ClassifyResponse(ListResponse, kw_only=True):
    """The response of /v1/classify."""

    data: list[ClassData]


class ScoreData(msgspec.Struct, kw_only=True):
    """The score of a pair."""

    index: int
    score: float
    object: Literal["score"] = "score"


class ScoreResponse(ListResponse, kw_only=True):
    """The response of /v1/score."""

    data: list[ScoreData]


class RerankDocument(msgspec.Struct):
    """The text of a document."""

    text: str


class RerankResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A document's score. index: its place in the request."""

    index: int
    relevance_score: float
    document: RerankDocument | None = None


class RerankUsage(msgspec.Struct):
    """Token counts."""

    total_tokens: int


class RerankResponse(msgspec.Struct, kw_only=True):
    """The response of /v2/rerank: the best documents first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: RerankUsage
