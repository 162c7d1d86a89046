"""Requests and responses of OpenAI's API, with the additional fields of vLLM's server.

A field that is null counts as not given. Fields that have no effect here are in `ipc.compatibility.REQUEST_FIELDS`,
and named in a warning when a request has them. The docstrings appear as descriptions in /openapi.json.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

from pagewire.frontend.server.serving.usage import Usage
from pagewire.ipc.wire.budget import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_PROMPTS,
    MAX_TOKENS,
    MAX_TOKENS_OF_VOCABULARY,
    MAX_TOOLS,
)
from pagewire.ipc.wire.items import TokenIds
from pagewire.ipc.wire.params import (
    AllowedTokenIds,
    BadWords,
    Choices,
    LengthPenalty,
    LogitBias,
    MaxTokens,
    MinP,
    Name,
    NumLogprobs,
    NumSequences,
    NumTokens,
    Penalty,
    Priority,
    ProcessorNames,
    RepetitionPenalty,
    Stop,
    StopTokenIds,
    Structure,
    Temperature,
    TopK,
    TopP,
    TruncatedLength,
)

# ---------------------------------------------------------------- parts of requests

PART = {
    "type": "object",
    "properties": {"type": {"enum": ["text", "input_text", "output_text"]}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
# A dict and not a struct, since templates may read any field; the schema describes the fields that matter.
InputMessage: TypeAlias = Annotated[
    dict[str, Any],
    Meta(
        extra_json_schema={
            "title": "InputMessage",
            "properties": {
                "role": {"type": "string", "examples": ["system", "user", "assistant", "tool"]},
                "content": {
                    "anyOf": [{"type": "string"}, {"type": "array", "items": PART}, {"type": "null"}]
                },
            },
            "required": ["role"],
        }
    ),
]
InputMessages: TypeAlias = Annotated[
    list[InputMessage], Meta(max_length=MAX_MESSAGES, extra_json_schema={"minItems": 1})
]
# Tools, and other lists that have a few objects in honest use.
Objects: TypeAlias = Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)]
Documents: TypeAlias = Annotated[list[dict[str, Any]], Meta(max_length=MAX_PARTS)]
LogitBiases: TypeAlias = Annotated[dict[str, LogitBias], Meta(max_length=MAX_TOKENS_OF_VOCABULARY)]


class StreamOptions(msgspec.Struct):
    """Additional data in a stream.

    include_usage: send token counts in a separate last event. continuous_usage_stats: send them in every event.
    include_obfuscation: accepted, without effect.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(msgspec.Struct):
    """A named JSON schema. strict: accepted; outputs always follow it."""

    name: Name | None = None
    schema: dict[str, Any] | bool | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    """The format that the output must have."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    structures: Objects | None = None
    triggers: Choices | None = None
    format: dict[str, Any] | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """Fields that completions and chat completions share; fields not described here are those of `SamplingParams`.

    best_of: number of outputs to generate; the n most likely are returned.
    use_beam_search: return n beams, best first, from a search with n (or best_of) beams.
    length_penalty, early_stopping: those of `BeamSearchParams`; they need `use_beam_search`.
    timeout: seconds that the request may take (also the header X-Request-Timeout); then it ends with status 408.
    truncation_side: "left", since `truncate_prompt_tokens` keeps the last tokens.
    priority: requests with a lower one go first, on an engine with `--scheduling-policy priority`.
    request_id: becomes a part of the response's id, unless the header X-Request-Id does.
    user: written to the log with the request.
    cache_salt: share prefix-cache entries only with requests that have the same salt.
    guided_*: older names of `structured_outputs`.
    logits_processors: names of those that the engine was started with.
    kv_transfer_params: not supported.
    mm_processor_kwargs: arguments of the model's processor of pictures and sounds, in chat completions.
    return_token_ids: return token ids in addition to the text.
    return_tokens_as_token_ids: write tokens as "token_id:ID" in log probabilities.
    """

    model: Name | None = None
    n: NumSequences | None = None
    best_of: NumSequences | None = None
    use_beam_search: bool | None = None
    length_penalty: LengthPenalty | None = None
    early_stopping: bool | Literal["never"] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    seed: int | None = None
    stop: Stop | None = None
    stop_token_ids: StopTokenIds | None = None
    bad_words: BadWords | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: NumTokens | None = None  # 0 with `echo`
    min_tokens: NumTokens | None = None
    prompt_logprobs: NumLogprobs | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: TruncatedLength | None = None
    truncation_side: Literal["left", "right"] | None = None
    logit_bias: LogitBiases | None = None
    allowed_token_ids: AllowedTokenIds | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Structure | dict[str, Any] | bool | None = None
    guided_regex: Structure | None = None
    guided_choice: Choices | None = None
    guided_grammar: Structure | None = None
    guided_decoding_backend: Name | None = None
    guided_whitespace_pattern: Structure | None = None
    priority: Priority | None = None
    cache_salt: Name | None = None
    timeout: float | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    user: Name | None = None
    request_id: Name | None = None
    vllm_xargs: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    logits_processors: ProcessorNames | None = None
    mm_processor_kwargs: dict[str, Any] | None = None


class CompletionRequest(SamplingFields, kw_only=True):
    """POST /v1/completions.

    prompt: text, token ids, or a list of these.
    suffix: text after the completion, for models that were trained to fill in the middle.
    prompt_embeds: prompts that are embeddings [number of tokens, size]: each a safetensors file with one tensor, in
        base64. They come before those of `prompt`, which may then be left out.
    logprobs: return log probabilities of each token and of this many most likely tokens.
    """

    prompt: str | Annotated[list[str | int | TokenIds], Meta(max_length=MAX_TOKENS)] | None = None
    prompt_embeds: str | Annotated[list[str], Meta(max_length=MAX_PROMPTS)] | None = None
    suffix: str | None = None
    logprobs: NumLogprobs | None = None


class ChatRequest(SamplingFields, kw_only=True):
    """POST /v1/chat/completions.

    max_completion_tokens: overrides `max_tokens`. logprobs: return the log probability of each token.
    top_logprobs: and those of this many most likely tokens.
    echo: begin the answer with the last message, if that has the same role.
    add_generation_prompt, continue_final_message, documents, chat_template, chat_template_kwargs, reasoning_effort,
        verbosity: passed to the chat template.
    thinking_token_budget: most tokens of reasoning; then it is ended, and the answer follows.
    safety_identifier: the newer name of `user`.
    prompt_cache_retention: keep the prompt and its answer cached for 24 hours ("24h"), or for five minutes
        ("in_memory"), within what `--max-retained-share` leaves; every prefix is cached while there is room.
    prompt_cache_key: names what is kept, so that it can be released; without a retention it has no effect.
    session_id: keep a session cached under this name, for five minutes after each turn if no retention is given.
    service_tier: the response says "default", which is the only one.
    store, metadata, prediction: no effect: nothing is stored, and no prediction makes an answer faster.
    functions, function_call, audio, web_search_options: not supported.
    """

    messages: InputMessages
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Objects | None = None
    tool_choice: Name | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: Documents | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Name | None = None
    thinking_token_budget: NumTokens | None = None
    functions: Objects | None = None
    function_call: Name | dict[str, Any] | None = None
    modalities: Annotated[list[Name], Meta(max_length=MAX_TOOLS)] | None = None
    audio: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: Name | None = None
    prediction: dict[str, Any] | None = None
    verbosity: Name | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None
    prompt_cache_retention: Name | None = None
    session_id: Name | None = None
    web_search_options: dict[str, Any] | None = None


# ---------------------------------------------------------------- parts of responses


class CandidateLogprob(msgspec.Struct, gc=False):
    """A candidate token. bytes: its text in UTF-8."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(msgspec.Struct, gc=False):
    """A token of an output, with its most likely alternatives."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[CandidateLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log probabilities of a message."""

    content: list[TokenLogprob] | None
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    """Log probabilities of a completion, by token. text_offset: start of each token in the text, in characters."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(msgspec.Struct, gc=False):
    """A candidate token at a position of a prompt."""

    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs: TypeAlias = list[dict[int, PromptLogprob] | None]


# ---------------------------------------------------------------- completions


class CompletionChoice(msgspec.Struct, kw_only=True):
    """A completion; in a stream, an increment. stop_reason: the stop string or token id that ended it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """The response of /v1/completions, and each event of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


# ---------------------------------------------------------------- chat


class FunctionCall(msgspec.Struct, omit_defaults=True):
    """A call of a function; in a stream, an increment. arguments: JSON text."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCall(msgspec.Struct, omit_defaults=True):
    """A tool call; in a stream, an increment of the call at `index`."""

    function: FunctionCall
    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class CustomCall(msgspec.Struct, omit_defaults=True):
    """A call of a custom tool; in a stream, an increment. input: text."""

    name: str | UnsetType = UNSET
    input: str | UnsetType = UNSET


class ChatToolCall(msgspec.Struct, omit_defaults=True):
    """A tool call of an answer, of a function or of a custom tool; in a stream, an increment."""

    function: FunctionCall | UnsetType = UNSET
    custom: CustomCall | UnsetType = UNSET
    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function", "custom"] | UnsetType = UNSET


class ChatMessage(msgspec.Struct, kw_only=True):
    """A generated message. reasoning_content: the model's reasoning."""

    role: str
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType | None = UNSET
    tool_calls: list[ChatToolCall] | UnsetType = UNSET


class ChatDelta(msgspec.Struct, omit_defaults=True, kw_only=True):
    """An increment of a generated message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ChatToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """A generated message and how it ended. stop_reason: the stop string or token id that ended it.

    thinking_finish_reason: with `thinking_token_budget`, what ended the reasoning: "budget" or "stop".
    """

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    thinking_finish_reason: str | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """The response of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: str | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """An increment of one choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    thinking_finish_reason: str | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """An event of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    service_tier: str | UnsetType = UNSET
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


# ---------------------------------------------------------------- models, tokens


class ModelCard(msgspec.Struct, kw_only=True):
    """A name of the served model, or an adapter.

    root: folder or id of the model or adapter. parent: of an adapter, the model's name.
    max_model_len, context_window, context_length: limit of prompt and output together, in tokens.
    state: ready; of a model that is loaded on demand also absent, starting, idle or stopping. What is null is known
    once it has been loaded. problem: why it did not start when it was last tried. fitted: what `--fit` chose.
    capabilities: "embedding", or "completion" and some of "vision", "tools" and "thinking".
    tool_call_parser, reasoning_parser: how calls and thoughts are told apart from text; null: they are not.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "pagewire"
    root: str
    parent: str | None = None
    max_model_len: int | None = None
    context_window: int | None = None
    context_length: int | None = None
    input_modalities: list[str] | None = None
    output_modalities: list[str] | None = None
    capabilities: list[str] | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    state: str = "ready"
    problem: str | UnsetType = UNSET
    fitted: str | UnsetType = UNSET


class ModelList(msgspec.Struct):
    """The names of the served model."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize. Give either `prompt` or `messages`. add_special_tokens: true by default for a prompt."""

    model: Name | None = None
    prompt: str | None = None
    messages: InputMessages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Objects | None = None


class TokenizeResponse(msgspec.Struct):
    """The response of /tokenize. token_strs: the tokens' names in the vocabulary."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str | None] | UnsetType = UNSET


class TokenizerInfo(msgspec.Struct, omit_defaults=True):
    """The response of /tokenizer_info: the fields of a tokenizer_config.json that are known.

    chat_template: of conversations, as text. model_max_length: limit of prompt and output together, in tokens.
    """

    tokenizer_class: str
    model_max_length: int
    chat_template: str | UnsetType = UNSET
    bos_token: str | UnsetType = UNSET
    eos_token: str | UnsetType = UNSET
    unk_token: str | UnsetType = UNSET
    sep_token: str | UnsetType = UNSET
    pad_token: str | UnsetType = UNSET
    cls_token: str | UnsetType = UNSET
    mask_token: str | UnsetType = UNSET


class DetokenizeRequest(msgspec.Struct):
    """POST /detokenize."""

    tokens: TokenIds
    model: Name | None = None


class DetokenizeResponse(msgspec.Struct):
    """The response of /detokenize. prompt: the text."""

    prompt: str
