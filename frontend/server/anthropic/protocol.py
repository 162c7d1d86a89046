"""Requests, responses and events of Anthropic's API. As in `openai.protocol`, null counts as not given."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

from pagewire.frontend.server.openai.protocol import Objects
from pagewire.ipc.wire.budget import MAX_MESSAGES, MAX_PARTS, MAX_STOPS
from pagewire.ipc.wire.params import MaxTokens, Name, Priority, StopString, Temperature, TopK, TopP

# ---------------------------------------------------------------- blocks of content


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    """Text."""

    text: str


class Base64Source(msgspec.Struct, tag_field="type", tag="base64"):
    """A picture in base64. Its format is seen from its bytes, whatever media_type says."""

    data: str
    media_type: str = ""


class UrlSource(msgspec.Struct, tag_field="type", tag="url"):
    """A picture at a URL."""

    url: str


class ImageBlock(msgspec.Struct, tag_field="type", tag="image"):
    """A picture."""

    source: Base64Source | UrlSource


class TextSource(msgspec.Struct, tag_field="type", tag="text"):
    """A document that is text."""

    data: str
    media_type: str = ""


class ContentSource(msgspec.Struct, tag_field="type", tag="content"):
    """A document of text, or of blocks of text and pictures."""

    content: str | list[dict[str, Any]]


class FileSource(msgspec.Struct, tag_field="type", tag="file"):
    """A file on Anthropic's servers."""

    file_id: str


class DocumentBlock(msgspec.Struct, tag_field="type", tag="document"):
    """A document, which must be text. title, context: come before it."""

    source: TextSource | ContentSource | Base64Source | UrlSource | FileSource
    title: str | None = None
    context: str | None = None


class SearchResultBlock(msgspec.Struct, tag_field="type", tag="search_result"):
    """A result of a search that the client made. source: where it was found."""

    source: str
    title: str
    content: list[TextBlock]


class ToolReferenceBlock(msgspec.Struct, tag_field="type", tag="tool_reference"):
    """A tool that a search of the client has found; it is in the prompt already."""

    tool_name: str


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """The model's reasoning.

    signature: sha256 of the text in hexadecimal: clients send no reasoning back without one. It is not read.
    """

    thinking: str
    signature: str = ""


class RedactedThinkingBlock(msgspec.Struct, tag_field="type", tag="redacted_thinking"):
    """Reasoning that only Anthropic can read; it is left out of the prompt."""

    data: str


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A call of a tool. input: its arguments; {"INVALID_JSON": text} if the model wrote no JSON object."""

    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(msgspec.Struct, tag_field="type", tag="tool_result"):
    """The result of a call. content: text, or blocks of text and pictures.

    is_error: the template finds it in the message.
    """

    tool_use_id: str
    content: str | list[dict[str, Any]] | None = None
    is_error: bool | None = None


InputBlock: TypeAlias = (
    TextBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
    | ToolReferenceBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
)
OutputBlock: TypeAlias = TextBlock | ThinkingBlock | ToolUseBlock

# ---------------------------------------------------------------- requests

# Dicts and not structs, so that blocks of other types can be refused by name.
InputTurns: TypeAlias = Annotated[
    list[dict[str, Any]], Meta(max_length=MAX_MESSAGES, extra_json_schema={"minItems": 1})
]
SystemBlocks: TypeAlias = Annotated[list[dict[str, Any]], Meta(max_length=MAX_PARTS)]


class MessageToolChoice(msgspec.Struct):
    """Which tools are called. name: of the tool, for the type "tool"."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(msgspec.Struct):
    """Whether the model reasons before it answers: the template's variable `enable_thinking`.

    budget_tokens: most tokens of reasoning, which is ended then.
    display: "omitted" leaves the text of the reasoning out of the answer.
    """

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: MaxTokens | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct):
    """The schema that the text of the answer follows."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct):
    """effort: passed to the chat template as `reasoning_effort`."""

    effort: Name | None = None
    format: OutputFormat | None = None


class MessageMetadata(msgspec.Struct):
    """user_id: written to the log with the request."""

    user_id: Name | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """POST /v1/messages/count_tokens.

    messages: turns of the user and the assistant; an answer continues a last one of the assistant.
    thinking: without it the model does not reason, if its chat template lets it.
    chat_template_kwargs: passed to the chat template.
    cache_control, here (for the whole prompt), in blocks and in tools: keep the prompt up to there cached for the
        time of its ttl; every prefix is cached while there is room. It has no effect on a count.
    context_management: edits that leave out old results of tools, and old reasoning.
    tools: those of Anthropic's servers are left out with a warning.
    container, mcp_servers: not supported.
    """

    model: Name | None = None
    messages: InputTurns
    system: str | SystemBlocks | None = None
    tools: Objects | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    container: Name | dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    mcp_servers: Objects | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """POST /v1/messages.

    service_tier: there is only the standard one. thread: not supported, upon which clients send all messages.
    The fields from `seed` on are those of chat completions.
    """

    max_tokens: MaxTokens
    metadata: MessageMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    thread: dict[str, Any] | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
    seed: int | None = None
    priority: Priority | None = None
    cache_salt: Name | None = None
    timeout: float | None = None

    @property
    def user(self) -> str | None:
        """The name of the user, for the log."""
        return None if self.metadata is None else self.metadata.user_id


# ---------------------------------------------------------------- responses


class CacheCreation(msgspec.Struct):
    """Tokens that are kept from now on, by the time for which they are."""

    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class MessageUsage(msgspec.Struct):
    """Token counts.

    cache_read_input_tokens: of the prompt, those in the prefix cache. cache_creation_input_tokens: those of the
    others that `cache_control` keeps there. input_tokens: the rest.
    """

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0
    service_tier: Literal["standard"] = "standard"
    cache_creation: CacheCreation | UnsetType = UNSET


class AppliedEdit(msgspec.Struct):
    """An edit of the conversation that has changed something, and how much."""

    type: str
    cleared_tool_uses: int | UnsetType = UNSET
    cleared_input_tokens: int | UnsetType = UNSET
    cleared_thinking_turns: int | UnsetType = UNSET


class AppliedEdits(msgspec.Struct):
    """The edits of `context_management` that have changed something."""

    applied_edits: list[AppliedEdit]


class GeneratedMessage(msgspec.Struct, kw_only=True):
    """The response of /v1/messages. stop_sequence: the one of the request that ended it."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[OutputBlock]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
    context_management: AppliedEdits | UnsetType = UNSET


class EventDelta(msgspec.Struct, omit_defaults=True):
    """An increment of a block (its text, its reasoning, its signature, or the JSON of its input), or the end."""

    type: Literal["text_delta", "thinking_delta", "signature_delta", "input_json_delta"] | UnsetType = UNSET
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET
    stop_reason: str | UnsetType = UNSET
    stop_sequence: str | UnsetType | None = UNSET


class MessageEvent(msgspec.Struct, omit_defaults=True):
    """An event of a streamed message; its fields depend on its type. index: position of a block in the content."""

    type: str
    message: GeneratedMessage | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: OutputBlock | UnsetType = UNSET
    delta: EventDelta | UnsetType = UNSET
    usage: MessageUsage | UnsetType = UNSET
    context_management: AppliedEdits | UnsetType = UNSET


class OriginalTokens(msgspec.Struct):
    """The tokens of a prompt before edits of `context_management`."""

    original_input_tokens: int


class CountTokensResponse(msgspec.Struct):
    """The response of /v1/messages/count_tokens."""

    input_tokens: int
    context_management: OriginalTokens | UnsetType = UNSET
