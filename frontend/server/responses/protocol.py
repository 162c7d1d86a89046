"""Requests, answers and events of /v1/responses. As in `openai.protocol`, a field that is null is not given."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from pagewire.frontend.server.openai.protocol import TokenLogprob
from pagewire.ipc.params import (
    LogitBias,
    MaxTokens,
    MinP,
    NumTokens,
    Penalty,
    RepetitionPenalty,
    Temperature,
    TopK,
    TopP,
)

# ---------------------------------------------------------------- requests


class TextFormat(msgspec.Struct, omit_defaults=True):
    """The form that the text must have. strict: accepted; outputs always follow the schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | bool | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, omit_defaults=True):
    """What the text must be like. verbosity: for the template."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(msgspec.Struct, omit_defaults=True):
    """effort: for the template, as `reasoning_effort`. summary, generate_summary: accepted, without effect."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """POST /v1/responses.

    input: what the user says, or items: messages, calls of functions, and what came of them.
    instructions: a first message of the system; not carried over to responses that follow.
    previous_response_id: go on from this response, which must have been stored.
    store: keep the response (default: true), within `--response-store-bytes`. background: answer at once,
        with what can be retrieved later, streamed, and cancelled.
    include: "message.output_text.logprobs"; other kinds are of items that never come.
    truncation: "auto" leaves out the oldest turns that do not fit the model; "disabled" (default) refuses.
    max_tool_calls: accepted; it counts calls of OpenAI's own tools.
    The fields from `seed` on are those of chat completions.
    """

    model: str | None = None
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    include: list[str] | None = None
    max_output_tokens: MaxTokens | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    temperature: Temperature | None = None
    text: TextOptions | None = None
    tool_choice: str | dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    top_logprobs: int | None = None
    top_p: TopP | None = None
    truncation: Literal["auto", "disabled"] | None = None
    service_tier: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt: dict[str, Any] | None = None
    conversation: str | dict[str, Any] | None = None
    context_management: list[dict[str, Any]] | None = None
    moderation: dict[str, Any] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: dict[str, LogitBias] | None = None
    ignore_eos: bool | None = None
    min_tokens: NumTokens | None = None
    priority: int | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


# ---------------------------------------------------------------- answers

ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]
Status: TypeAlias = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(msgspec.Struct, kw_only=True):
    """Text. logprobs: of its tokens, if asked for."""

    type: Literal["output_text"] = "output_text"
    text: str = ""
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class MessageItem(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """What is said to the user."""

    id: str
    role: Literal["assistant"] = "assistant"
    status: ItemStatus = "in_progress"
    content: list[OutputText] = []


class CallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A call of a function. call_id: what its outcome is told by. arguments: JSON text."""

    id: str
    status: ItemStatus = "in_progress"
    call_id: str
    name: str
    arguments: str = ""


Item: TypeAlias = MessageItem | CallItem


class ResponseFailure(msgspec.Struct):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    """Why a response is not complete."""

    reason: str


class InputTokensDetails(msgspec.Struct):
    """cached_tokens: input tokens whose KV was in the prefix cache."""

    cached_tokens: int


class OutputTokensDetails(msgspec.Struct):
    """reasoning_tokens: those that are not told apart are counted as text."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class Response(msgspec.Struct, kw_only=True):
    """A response: what was asked, and what came of it so far."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    background: bool
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[MessageItem | CallItem] = msgspec.field(default_factory=list)
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ReasoningOptions
    service_tier: str = "default"
    store: bool
    temperature: float
    text: TextOptions
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, str]


class DeletedResponse(msgspec.Struct):
    """It is not kept any more."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class ItemList(msgspec.Struct, kw_only=True):
    """Items, as they were given, each with an id."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool = False


# ---------------------------------------------------------------- events


class ResponseEvent(msgspec.Struct, kw_only=True):
    """One event of a streamed response; which fields it has depends on its type.

    sequence_number: from 0. response: so far, in events of its state. item, part: one that begins or is complete.
    delta: more of a text or of arguments; text, arguments: all of it.
    """

    type: str
    sequence_number: int
    response: Response | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item: MessageItem | CallItem | UnsetType = UNSET
    part: OutputText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET
