"""Requests and responses of Ollama's API. As in `openai.protocol`, null counts as not given."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

from pagewire.frontend.server.openai.protocol import Objects, TokenLogprob
from pagewire.frontend.server.pooling.protocol import Texts
from pagewire.ipc.wire.budget import MAX_MESSAGES, MAX_PARTS
from pagewire.ipc.wire.params import (
    MinP,
    Name,
    Penalty,
    Priority,
    RepetitionPenalty,
    Stop,
    Temperature,
    TopK,
    TopP,
)
from pagewire.ipc.wire.pooling import Dimensions

# ---------------------------------------------------------------- requests

OllamaMessages: TypeAlias = Annotated[list[dict[str, Any]], Meta(max_length=MAX_MESSAGES)]
Images: TypeAlias = Annotated[list[Any], Meta(max_length=MAX_PARTS)]


class OllamaOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options of one request; for those that are not given, see `frontend.requests.checked_params`.

    num_predict: most tokens of the answer; below 0: as many as the model's context length leaves room for.
    num_ctx: no effect: the context length is the same for all requests.
    repeat_penalty: over all tokens of the prompt and the answer. repeat_last_n: 0 turns it off, other numbers have
    no effect.
    The fields from `mirostat` on have no effect, or are not supported.
    """

    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
    min_p: MinP | None = None
    seed: int | None = None
    stop: Stop | None = None
    num_predict: Annotated[int, Meta(ge=-2)] | None = None
    num_ctx: Annotated[int, Meta(ge=1)] | None = None
    repeat_penalty: RepetitionPenalty | None = None
    repeat_last_n: int | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    tfs_z: float | None = None
    typical_p: float | None = None
    penalize_newline: bool | None = None
    num_keep: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    num_thread: int | None = None
    numa: bool | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    logits_all: bool | None = None
    vocab_only: bool | None = None
    embedding_only: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None


class OllamaFields(msgspec.Struct, kw_only=True):
    """Fields that all requests with an answer have.

    keep_alive: for how long the model stays loaded after the request: seconds, or a text such as "5m"; 0: it ends
    at once, less than 0: not for being idle. Of a model that is not loaded on demand: no effect, which is said.
    priority, cache_salt, timeout: those of chat completions.
    """

    model: Name | None = None
    options: OllamaOptions | None = None
    keep_alive: float | str | None = None
    priority: Priority | None = None
    cache_salt: Name | None = None
    timeout: float | None = None


class GenerationFields(OllamaFields, kw_only=True):
    """Fields of requests that generate.

    stream: true by default. truncate: the oldest turns of a conversation that is too long are left out (default);
    false: it is refused. format: "json", or the schema that the answer follows.
    think: whether the model reasons before it answers, or how much; without it, the chat template decides.
    logprobs, top_logprobs: log probabilities of tokens, and of this many alternatives.
    """

    stream: bool | None = None
    truncate: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class OllamaChatRequest(GenerationFields, kw_only=True):
    """POST /api/chat. messages: without any, the answer is that the model is loaded."""

    messages: OllamaMessages | None = None
    tools: Objects | None = None


class OllamaGenerateRequest(GenerationFields, kw_only=True):
    """POST /api/generate.

    prompt: message of the user; with `raw`, the whole prompt. Without it the answer is that the model is loaded.
    system: message of the system before it. suffix: text after the answer, for models that fill in the middle.
    images: of the message, in base64. context, template: not supported.
    """

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None
    template: str | None = None
    context: list[int] | None = None
    images: Images | None = None


class OllamaEmbedRequest(OllamaFields, kw_only=True):
    """POST /api/embed. truncate: cut texts that are too long (default); false: refuse them."""

    input: Texts
    truncate: bool | None = None
    dimensions: Dimensions | None = None


class OllamaEmbeddingsRequest(OllamaFields, kw_only=True):
    """POST /api/embeddings, the older form of /api/embed: one text, which is cut if it is too long.

    prompt: the text. Without it the answer has no numbers.
    """

    prompt: str | None = None


class ShowRequest(msgspec.Struct):
    """POST /api/show. name: older name of `model`. verbose: no effect."""

    model: Name | None = None
    name: Name | None = None
    verbose: bool | None = None


class PullRequest(msgspec.Struct):
    """POST /api/pull.

    model: of the Hugging Face hub, hf:owner/repository:Q4_K_M or hf.co/owner/repository:Q4_K_M; without a
    quantisation the repository's Q4_K_M, else another one. name: older name of `model`. stream: true by default.
    insecure: no effect.
    """

    model: Name | None = None
    name: Name | None = None
    stream: bool | None = None
    insecure: bool | None = None


class DeleteRequest(msgspec.Struct):
    """DELETE /api/delete. model: one that was pulled. name: older name of `model`."""

    model: Name | None = None
    name: Name | None = None


# ---------------------------------------------------------------- responses


class OllamaFunction(msgspec.Struct):
    """A function and its arguments; {"INVALID_JSON": text} if the model wrote no JSON object."""

    name: str
    arguments: dict[str, Any]
    index: int


class OllamaCall(msgspec.Struct):
    """A call of a tool."""

    id: str
    function: OllamaFunction


class OllamaMessage(msgspec.Struct, omit_defaults=True):
    """A generated message; in a stream, an increment, where calls are whole. thinking: the model's reasoning."""

    role: str
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET


class OllamaAnswer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The fields that all answers have.

    The fields from done_reason on are those of whole answers, and of the last line of a stream.
    Durations are in nanoseconds: total_duration since the request came, prompt_eval_duration of the prefill,
    eval_duration of the decoding. prompt_eval_count, eval_count: tokens of the prompt and of the answer.
    """

    model: str
    created_at: str
    done: bool
    logprobs: list[TokenLogprob] | UnsetType = UNSET
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class OllamaChatAnswer(OllamaAnswer, kw_only=True):
    """The response of /api/chat, and each line of its stream."""

    message: OllamaMessage


class OllamaGenerateAnswer(OllamaAnswer, kw_only=True):
    """The response of /api/generate, and each line of its stream."""

    response: str
    thinking: str | UnsetType = UNSET


class OllamaEmbedAnswer(msgspec.Struct):
    """The response of /api/embed."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbeddingsAnswer(msgspec.Struct):
    """The response of /api/embeddings."""

    embedding: list[float]


class ModelDetails(msgspec.Struct):
    """The size and the form of a model. family: its architecture. parameter_size: such as "7.2B"; "": not known."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class ListedModel(msgspec.Struct):
    """A name of a served model, or of an adapter.

    modified_at: when it was pulled, else the start of the server. size: bytes of its files; 0: not known.
    digest: sha256 of its name and its model, for a pulled one of the digests of its files.
    """

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: ModelDetails


class ListedModels(msgspec.Struct):
    """The response of /api/tags."""

    models: list[ListedModel]


class PullStatus(msgspec.Struct, omit_defaults=True):
    """A line of the stream of /api/pull. total, completed: bytes of the file with this digest."""

    status: str
    digest: str = ""
    total: int | UnsetType = UNSET
    completed: int | UnsetType = UNSET


class RunningModel(ListedModel):
    """A model in memory. expires_at: the end of time, since it stays. size_vram: bytes of its weights on a GPU."""

    expires_at: str
    size_vram: int
    context_length: int


class RunningModels(msgspec.Struct):
    """The response of /api/ps."""

    models: list[RunningModel]


class ShownModel(msgspec.Struct):
    """The response of /api/show.

    parameters: sampling parameters that the model recommends.
    capabilities: some of completion, embedding, vision, tools, thinking.
    """

    modified_at: str
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, str | int]
    capabilities: list[str]
