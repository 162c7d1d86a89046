"""A conversation as chat templates expect it, and its rendering with the text of a template.

Templates run in a sandbox (`sandbox.py`) and have access to plain data only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import jinja2
import msgspec
from jinja2 import meta, nodes

from pagewire.frontend.media.parts import MARKS, TYPES
from pagewire.frontend.media.parts import media_refusal as media_refusal
from pagewire.frontend.text.sandbox import compile_source, render, sandbox_environment
from pagewire.ipc.errors import FieldValueError
from pagewire.ipc.quoting import quoted

TEXT_PARTS = ("text", "input_text", "output_text")
RESERVED = (  # variables set by other options, here or in transformers
    "messages",
    "conversation",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tokenize",
    "return_dict",
    "return_tensors",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
    "padding",
    "truncation",
    "max_length",
)
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of a message's reasoning in various APIs
NO_PLACEHOLDERS: Mapping[str, str] = {}
# Appended to the final message to find its end. The last space shows whether the template trims messages.
END_MARK = "PAGEWIRE_FINAL_MESSAGE_ENDS_HERE "


@dataclass(frozen=True)
class Conversation:
    """The variables of a template; see `render_chat`.

    placeholders: the text that stands for a medium of each kind; messages may have `frontend.media.parts.MARKS` of
        these kinds. prompts_tools: what the template does not know of tools stands in messages (`tool_prompts.py`).
    """

    messages: list[Any]
    tools: list[Any] | None
    variables: dict[str, Any]
    content_format: str
    add_generation_prompt: bool
    continue_final_message: bool
    placeholders: dict[str, str] = field(default_factory=dict)
    prompts_tools: bool = False


class Rendered(msgspec.Struct):
    """The text of a conversation.

    unread: the names of given variables that the template does not read. hides_tools: it shows no tools, but some
        were given.
    """

    text: str
    unread: list[str]
    hides_tools: bool = False


def render_source(source: str, special_tokens: Mapping[str, Any], conversation: Conversation) -> Rendered:
    """Render one conversation with the template of this text.

    Raises:
        ValueError, TypeError: as `render_chat`.
    """
    template = compile_template(source)
    convert_content = content_reader(conversation.content_format, source, conversation.placeholders)
    messages, tools = conversation.messages, conversation.tools
    with refusing_deep_data():
        read = template_variables(source, conversation.variables)
        variables = {
            "documents": None,
            **special_tokens,
            **read,
            "messages": [
                read_message(message, index, convert_content) for index, message in enumerate(messages)
            ],
            "tools": None if tools is None else [read_tool(tool) for tool in tools],
            "add_generation_prompt": conversation.add_generation_prompt,
        }
    renders = render_open if conversation.continue_final_message else render
    text = renders(template, variables)
    unread = [name for name in conversation.variables if name not in read]
    return Rendered(text, unread, bool(tools) and hides_tools(source, variables, text))


@contextmanager
def refusing_deep_data() -> Iterator[None]:
    """A context in which data that nest too deeply are refused.

    Raises:
        ValueError: they do.
    """
    try:
        yield
    except RecursionError:
        raise ValueError("messages, tools or variables of the template are nested too deeply") from None


def hides_tools(source: str, variables: dict[str, Any], text: str) -> bool:
    """Return True if a template renders the same text without the tools. text: the one with them."""
    if "tools" not in variables_of(source):
        return True
    functions = [tool.get("function", tool) for tool in variables["tools"]]
    if any(isinstance(each, dict) and str(each.get("name")) in text for each in functions):
        return False
    template = compile_template(source)
    try:
        return render(template, variables) == render(template, variables | {"tools": None})
    except ValueError:  # it rejects the conversation without them
        return False


# ---------------------------------------------------------------- variables of a template


def template_variables(source: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given variables that the template reads, as plain data.

    Raises:
        ValueError: a variable is set by another option. TypeError: a value is not plain data.
    """
    if reserved := [name for name in given if name in RESERVED]:
        raise FieldValueError("chat_template_kwargs", f"cannot set {', '.join(reserved)}")
    read = variables_of(source)
    return {name: copy_plain(value) for name, value in given.items() if name in read}


@lru_cache(maxsize=64)
def variables_of(source: str) -> frozenset[str]:
    """Return the names of the variables that a template reads."""
    tree = sandbox_environment().parse(source)
    return frozenset(meta.find_undeclared_variables(tree)) - frozenset(sandbox_environment().globals)


def copy_plain(value: Any) -> Any:
    """Return a copy made of plain JSON types: methods of other objects would be a way out of the sandbox.

    Raises:
        TypeError: the value has no such copy.
    """
    if value is None or type(value) in (str, bool, int, float):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):  # a subclass, such as an enum
            return kind.__str__(value) if kind is str else kind(value)
    if isinstance(value, Mapping):
        return {copy_plain(name): copy_plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [copy_plain(part) for part in value]
    if callable(dump := getattr(value, "model_dump", None)):
        return copy_plain(dump())
    raise TypeError(f"chat templates take plain data, not {type(value).__name__}")


def read_message(given: Any, index: int, convert_content: Callable[[Any], Any]) -> dict[str, Any]:
    """Convert a message to the form that templates expect.

    The result is plain data without null fields, has the reasoning under several names, converted content (an
    assistant's may be null), and the arguments of tool calls as data. index: position of the message, for errors.

    Raises:
        TypeError: it is not a message. ValueError: it has no role, or content that is not text.
    """
    given = copy_plain(given)
    if not isinstance(given, dict):
        raise TypeError(f"a message must be a dict, got {type(given).__name__}")
    if not isinstance(given.get("role"), str):
        raise FieldValueError(f"messages[{index}]", ": a message needs a 'role', a string")
    message: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if "content" not in message and isinstance(message.get("refusal"), str):
        message["content"] = message["refusal"]
    if "content" in message or message["role"] == "assistant":
        try:
            message["content"] = convert_content(message.get("content"))
        except ValueError as error:
            raise FieldValueError(f"messages[{index}].content", f": {error}") from None
    reasoning = next((message[name] for name in REASONING if name in message), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            function["arguments"] = read_arguments(function["arguments"])
    return message


def read_arguments(text: str) -> Any:
    """Parse the arguments of a tool call, which are JSON text in OpenAI's API."""
    try:
        return json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return text  # models may write invalid JSON


def read_tool(tool: Any) -> dict[str, Any]:
    """Return the JSON schema of a tool as plain data.

    Raises:
        TypeError: the tool is not a JSON schema.
    """
    if not isinstance(tool, Mapping) and not hasattr(tool, "model_dump"):
        raise TypeError(f"a tool must be a JSON schema (a dict), got {type(tool).__name__}")
    schema: dict[str, Any] = copy_plain(tool)
    return schema


def content_reader(content_format: str, source: str, placeholders: Mapping[str, str]) -> Callable[[Any], Any]:
    """Return a function that converts content to the form that the template expects, if it expects one.

    placeholders: see `Conversation`. Content that is null, as that of messages with calls, stays null for a
    template that tests for it; others, which join it to strings or loop over it, read empty content.
    """
    use = content_use(source)
    as_list = content_format == "openai" or (content_format == "auto" and use.loops)
    as_given = content_format == "auto" and use.loops and use.tests_string

    def convert(content: Any) -> Any:
        if content is None:
            return None if use.tests_none else [] if as_list and not as_given else ""
        if as_given and isinstance(content, str):
            return content
        return as_parts(content, placeholders) if as_list else as_text(content, placeholders)

    return convert


def as_text(content: Any, placeholders: Mapping[str, str] = NO_PLACEHOLDERS) -> str:
    """Return content as a string, with its parts joined by newlines.

    Placeholders of media come first, but for those that the text has already: their writer has placed them.

    Raises:
        ValueError: see `as_parts`.
    """
    if isinstance(content, str):
        return content
    parts = as_parts(content, placeholders)
    text = "\n".join(part["text"] for part in parts if part not in MARKS)
    marks = []
    for kind, placeholder in placeholders.items():
        marks += [placeholder] * (parts.count({"type": kind}) - text.count(placeholder))
    return "\n".join([*marks, text] if text else marks)


def as_parts(content: Any, placeholders: Mapping[str, str] = NO_PLACEHOLDERS) -> list[dict[str, Any]]:
    """Return content as a list of text parts, and of marks of media whose kinds have placeholders.

    Raises:
        ValueError: a part is something else, or the content is neither text nor a list.
    """
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise ValueError(f"it must be text or a list of parts, got {type(content).__name__}")
    return [
        part if part in MARKS and part["type"] in placeholders else text_part(part, index)
        for index, part in enumerate(content)
    ]


def text_part(part: Any, index: int) -> dict[str, Any]:
    """Return a part of content as `{"type": "text", "text": ...}`; a refusal becomes its text.

    Raises:
        ValueError: the part is not text.
    """
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type", "unknown") if isinstance(part, dict) else type(part).__name__
    text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind in TYPES:
        raise ValueError(f"part {index}: {media_refusal(kind)}; got a part of type {quoted(kind)}")
    if not isinstance(text, str):
        wrong = (
            "its text is missing"
            if kind in (*TEXT_PARTS, "refusal")
            else f"got a part of type {quoted(kind)}"
        )
        raise ValueError(f"part {index}: only text can be the content of a message, {wrong}")
    if kind == "refusal":
        return {"type": "text", "text": text}
    return {**part, "type": "text"} if kind in TEXT_PARTS else part


class ContentUse(NamedTuple):
    """The forms of message content that a template reads.

    loops: over its parts. tests_string: whether something is a string. tests_none: whether content is null.
    """

    loops: bool
    tests_string: bool
    tests_none: bool


@lru_cache(maxsize=64)
def content_use(source: str) -> ContentUse:
    """Return what a template does with the content of messages."""
    tree = sandbox_environment().parse(source)
    aliases = {
        assign.target.name
        for assign in tree.find_all(nodes.Assign)
        if isinstance(assign.target, nodes.Name) and is_content(assign.node, set())
    }
    tests = list(tree.find_all(nodes.Test))
    return ContentUse(
        any(is_content(loop.iter, aliases) for loop in tree.find_all(nodes.For)),
        any(test.name == "string" for test in tests),
        any(test.name == "none" and is_content(test.node, aliases) for test in tests)
        or any(
            is_content(pair.expr, aliases) and any(is_none(operand.expr) for operand in pair.ops)
            for pair in tree.find_all(nodes.Compare)
        ),
    )


def is_none(node: nodes.Node) -> bool:
    """Return True for the constant `none`."""
    return isinstance(node, nodes.Const) and node.value is None


def is_content(node: nodes.Node, aliases: set[str]) -> bool:
    """Return True for `message.content` and `message["content"]`, also with filters, and for aliases of them."""
    while isinstance(node, nodes.Filter) and node.node is not None:
        node = node.node
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Name) and node.name in aliases


# ---------------------------------------------------------------- rendering


def render_open(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """Render a conversation up to the end of the final message's content.

    Raises:
        ValueError: see `render`; or the final message has no text, or the template changes or drops it.
    """
    final = variables["messages"][-1]
    if not final.get("content") and final.get("tool_calls"):
        raise FieldValueError("continue_final_message", ": the final message has no text to continue")
    holder, name = final, "content"
    if isinstance(final.get("content"), list):
        holder = next((part for part in reversed(final["content"]) if "text" in part), {})
        name = "text"
    text = holder.get(name)
    if not isinstance(text, str):
        raise FieldValueError("continue_final_message", ": the final message has no text to continue")
    holder[name] = text + END_MARK
    rendered = render(template, variables)
    end = rendered.rfind(END_MARK.strip())
    if end < 0 or text.strip() not in rendered:
        raise FieldValueError(
            "continue_final_message", ": the chat template changes or drops the final message"
        )
    if rendered.startswith(END_MARK, end):
        return rendered[:end]
    return rendered[:end].rstrip()  # the template trims messages


@lru_cache(maxsize=64)
def compile_template(source: str) -> jinja2.Template:
    """Compile a template; cached.

    Raises:
        ValueError: the template is too long, or invalid.
    """
    return compile_source(source)
