"""Requests, responses and events of /v1/responses. As in `openai.protocol`, null counts as not given."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

from pagewire.frontend.server.openai.protocol import LogitBiases, Objects, TokenLogprob
from pagewire.ipc.wire.budget import MAX_MESSAGES, MAX_TOOLS
from pagewire.ipc.wire.params import (
    MaxTokens,
    MinP,
    Name,
    NumTokens,
    Penalty,
    Priority,
    RepetitionPenalty,
    Stop,
    Temperature,
    TopK,
    TopP,
)

# ---------------------------------------------------------------- requests

InputItems: TypeAlias = Annotated[list[dict[str, Any]], Meta(max_length=MAX_MESSAGES)]


class TextFormat(msgspec.Struct, omit_defaults=True):
    """The format that the text must have. strict: accepted; outputs always follow the schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    schema: dict[str, Any] | bool | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, omit_defaults=True):
    """Options of the generated text. verbosity: passed to the chat template."""

    format: TextFormat | None = None
    verbosity: Name | None = None


class ReasoningOptions(msgspec.Struct, omit_defaults=True):
    """Options of the model's reasoning.

    effort: passed to the chat template as `reasoning_effort`. summary, generate_summary: accepted, without effect.
    """

    effort: Name | None = None
    summary: Name | None = None
    generate_summary: Name | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """POST /v1/responses.

    input: text of the user, or items: messages, function calls and their outputs.
    instructions: system message at the start; not carried over to later responses.
    previous_response_id: continue the conversation of this response, which must have been stored.
    conversation: the id of one of /v1/conversations, or an object with it. Its items come first; input and output
        are added to it once the response has ended.
    store: store the response (default: true), within `--response-store-bytes`.
    background: return at once; the response can be retrieved, streamed and cancelled later.
    include: "message.output_text.logprobs"; "reasoning.encrypted_content", for clients that send back no text of
        reasoning; other kinds have no effect: there is nothing of theirs to include.
    truncation: "auto" drops the oldest turns of a conversation that is too long; "disabled" (default) refuses it.
    max_tool_calls: accepted, without effect: it limits calls of OpenAI's own tools.
    tools: functions, custom tools, namespaces of these, local_shell, shell, and tool_search by the client; tools
        that OpenAI's servers run are left out with a warning.
    client_metadata: accepted, without effect: what a client notes for itself.
    type: of a message over a WebSocket, where `stream` is not needed, and `background` is not possible.
    generate: false: the prompt is computed, so that a response which continues this one begins sooner; there is no
        output but one token, which is dropped.
    stream_id: not supported: a WebSocket has one response at a time.
    prompt_cache_key, prompt_cache_retention, session_id: those of chat completions.
    The fields from `seed` on are those of chat completions.
    """

    model: Name | None = None
    input: str | InputItems | None = None
    instructions: str | None = None
    previous_response_id: Name | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    include: Annotated[list[Name], Meta(max_length=MAX_TOOLS)] | None = None
    max_output_tokens: MaxTokens | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    temperature: Temperature | None = None
    text: TextOptions | None = None
    tool_choice: Name | dict[str, Any] | None = None
    tools: Objects | None = None
    top_logprobs: int | None = None
    top_p: TopP | None = None
    truncation: Literal["auto", "disabled"] | None = None
    service_tier: Name | None = None
    user: Name | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None
    prompt_cache_retention: Name | None = None
    session_id: Name | None = None
    prompt: dict[str, Any] | None = None
    conversation: Name | dict[str, Any] | None = None
    context_management: Objects | None = None
    moderation: dict[str, Any] | None = None
    client_metadata: dict[str, Any] | None = None
    type: Name | None = None
    generate: bool | None = None
    stream_id: Name | None = None
    seed: int | None = None
    stop: Stop | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: LogitBiases | None = None
    ignore_eos: bool | None = None
    min_tokens: NumTokens | None = None
    priority: Priority | None = None
    cache_salt: Name | None = None
    chat_template_kwargs: dict[str, Any] | None = None


# ---------------------------------------------------------------- responses

ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]
Status: TypeAlias = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    """Generated text. logprobs: log probabilities of its tokens, if requested."""

    text: str = ""
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class MessageItem(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """A generated message."""

    id: str
    role: Literal["assistant"] = "assistant"
    status: ItemStatus = "in_progress"
    content: list[OutputText] = []


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    """Text of the model's reasoning."""

    text: str = ""


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """The model's reasoning before its answer. summary: always empty: the text itself is in `content`.

    encrypted_content: the text in a form of this server's, if the request includes it; it is not encrypted.
    """

    id: str
    status: ItemStatus = "in_progress"
    summary: list[Any] = []
    content: list[ReasoningText] = []
    encrypted_content: str | None = None


class CallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A call of a function. call_id: id to send with the call's output. arguments: JSON text."""

    id: str
    status: ItemStatus = "in_progress"
    call_id: str
    name: str
    arguments: str = ""
    namespace: str | UnsetType = UNSET


class CustomCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool. input: the text."""

    id: str
    status: ItemStatus = "in_progress"
    call_id: str
    name: str
    input: str = ""
    namespace: str | UnsetType = UNSET


class ExecAction(msgspec.Struct, kw_only=True, tag_field="type", tag="exec"):
    """A command to run: a program and its arguments."""

    command: list[str] = []
    env: dict[str, str] = {}
    timeout_ms: int | None = None
    user: str | None = None
    working_directory: str | None = None


class LocalShellCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="local_shell_call"):
    """A call of the tool `local_shell`. action: complete when the call is."""

    id: str
    status: ItemStatus = "in_progress"
    call_id: str
    action: ExecAction = msgspec.field(default_factory=ExecAction)


class ShellAction(msgspec.Struct, kw_only=True):
    """Commands to run."""

    commands: list[str] = []
    timeout_ms: int | None = None
    max_output_length: int | None = None


class ShellCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="shell_call"):
    """A call of the tool `shell`, which the client runs. action: complete when the call is."""

    id: str
    status: ItemStatus = "in_progress"
    call_id: str
    action: ShellAction = msgspec.field(default_factory=ShellAction)
    environment: dict[str, Any] = msgspec.field(default_factory=lambda: {"type": "local"})


class ToolSearchCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_search_call"):
    """A call of the tool `tool_search`, which the client runs. arguments: complete when the call is."""

    id: str
    status: ItemStatus = "in_progress"
    call_id: str
    execution: Literal["client"] = "client"
    arguments: dict[str, Any] = msgspec.field(default_factory=dict)


ToolCallItem: TypeAlias = CallItem | CustomCallItem | LocalShellCallItem | ShellCallItem | ToolSearchCallItem
Item: TypeAlias = ReasoningItem | MessageItem | ToolCallItem


class ResponseFailure(msgspec.Struct):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    """Why a response is incomplete."""

    reason: str


class InputTokensDetails(msgspec.Struct):
    """Details of the input tokens.

    cached_tokens: tokens whose KV was in the prefix cache.
    retained_tokens: of input and output, those that are kept there for as long as the request
        asks; only if it does.
    """

    cached_tokens: int
    retained_tokens: int | UnsetType = UNSET


class OutputTokensDetails(msgspec.Struct):
    """Details of the output tokens. reasoning_tokens: tokens up to the end of the reasoning, its tags included."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ConversationReference(msgspec.Struct):
    """The conversation that a response belongs to."""

    id: str


class Response(msgspec.Struct, kw_only=True):
    """A response: the request's parameters, and the output so far."""

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
    output: list[Item] = msgspec.field(default_factory=list)
    parallel_tool_calls: bool
    previous_response_id: str | None
    conversation: ConversationReference | None = None
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
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    metadata: dict[str, str]


class InputTokensRequest(msgspec.Struct, kw_only=True):
    """POST /v1/responses/input_tokens: the fields of a request that become its prompt."""

    model: Name | None = None
    input: str | InputItems | None = None
    instructions: str | None = None
    previous_response_id: Name | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    tool_choice: Name | dict[str, Any] | None = None
    tools: Objects | None = None
    truncation: Literal["auto", "disabled"] | None = None
    conversation: Name | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class InputTokens(msgspec.Struct):
    """The number of tokens in the prompt of a request."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class DeletedResponse(msgspec.Struct):
    """Confirmation that a stored response was deleted."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class ItemList(msgspec.Struct, kw_only=True):
    """The input items of a response, each with an id."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool = False


# ---------------------------------------------------------------- events


class ResponseEvent(msgspec.Struct, kw_only=True):
    """An event of a streamed response; its fields depend on its type.

    sequence_number: position in the stream, from 0. response: the response so far, in events of its state.
    item, part: an item or part that begins or is complete. delta: increment of a text or of arguments.
    text, arguments, input: the whole text, arguments or text of a custom tool, when complete.
    """

    type: str
    sequence_number: int
    response: Response | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item: Item | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET
