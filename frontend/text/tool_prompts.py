"""Tools in the prompt of a model whose chat template does not know them.

The functions stand in the system message as JSON, with the form of a call. Calls of the conversation are written in
that form, and their results stand in messages of the user. The dialect `put_tools` reads such calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from pagewire.frontend.text.conversation import (
    Conversation,
    Rendered,
    as_text,
    compile_template,
    copy_plain,
    read_arguments,
    read_tool,
    refusing_deep_data,
    render_source,
    variables_of,
)

CALL_BEGIN, CALL_END = "<tool_call>\n", "\n</tool_call>"
RESULT_END = "\n</tool_response>"
FIRST_ROLES = ("system", "developer")
INSTRUCTIONS = """You can call functions. Each line below describes one as JSON, with the schema of its arguments:
{functions}

To call a function, write its name and its arguments as JSON between two tags:
{example}
For several calls, write each between tags of its own. The results come in the next message. \
If no function is needed, answer without tags."""
PROBE = "pagewire_probe"
PROBED_TOOL = {
    "type": "function",
    "function": {
        "name": PROBE,
        "description": "A function.",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
    },
}
SPECIAL_TOKENS = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "")


class TemplateKnowledge(NamedTuple):
    """The abilities of a chat template: it shows tools, calls of the assistant, messages of the system."""

    shows_tools: bool
    shows_calls: bool
    shows_system: bool


@lru_cache(maxsize=64)
def knowledge_of(source: str) -> TemplateKnowledge:
    """Return what a template knows. One that refuses a plain conversation is judged by its variables.

    Raises:
        ValueError: the template is invalid.
    """
    compile_template(source)
    user = {"role": "user", "content": "?"}
    shown = probe_template(source, [user], [PROBED_TOOL]) if "tools" in variables_of(source) else False
    if shown is None:
        shown = probe_template(source, [{"role": "system", "content": "!"}, user], [PROBED_TOOL]) is not False
    system = probe_template(source, [{"role": "system", "content": PROBE}, user], None)
    return TemplateKnowledge(shown, "tool_calls" in source, bool(system))


def probe_template(source: str, messages: list[Any], tools: list[Any] | None) -> bool | None:
    """Return whether a template shows the probe; None if it refuses the conversation."""
    conversation = Conversation(messages, tools, {}, "auto", True, False)
    try:
        return PROBE in render_source(source, SPECIAL_TOKENS, conversation).text
    except ValueError:
        return None


def render_prompted(source: str, special_tokens: Mapping[str, Any], conversation: Conversation) -> Rendered:
    """Render one conversation, with what its template does not know of tools in messages, if it is to be so.

    Raises:
        ValueError, TypeError: as `render_source`.
    """
    if conversation.prompts_tools and (conversation.tools or any(map(has_tools, conversation.messages))):
        knowledge = knowledge_of(source)
        with refusing_deep_data():
            conversation = put_tools(knowledge, conversation)
    return render_source(source, special_tokens, conversation)


def has_tools(message: Any) -> bool:
    """Return True for a message with calls, or with the result of one."""
    return isinstance(message, Mapping) and bool(message.get("tool_calls") or message.get("role") == "tool")


def put_tools(knowledge: TemplateKnowledge, conversation: Conversation) -> Conversation:
    """Return a conversation with tools, calls and results in the text of messages that a template shows.

    Raises:
        ValueError, TypeError: the tools, or messages with calls or results, are malformed.
    """
    messages, tools = conversation.messages, conversation.tools
    if not (knowledge.shows_tools and knowledge.shows_calls):
        messages = without_calls(messages, tagged=not knowledge.shows_tools)
    if tools and not knowledge.shows_tools:
        messages = with_text(messages, tool_instructions(tools), in_system=knowledge.shows_system)
        tools = None
    return replace(conversation, messages=messages, tools=tools)


def tool_instructions(tools: Sequence[Any]) -> str:
    """Return the text that describes the functions to a model."""
    functions = [(read := read_tool(tool)).get("function", read) for tool in tools]
    lines = "\n".join(json.dumps(function, ensure_ascii=False) for function in functions)
    example = '{"name": "the name", "arguments": {"the parameter": "the value"}}'
    return INSTRUCTIONS.format(functions=lines, example=CALL_BEGIN + example + CALL_END)


def without_calls(messages: Sequence[Any], tagged: bool) -> list[Any]:
    """Return messages whose calls and results are text. tagged: calls stand between tags.

    Results, and what the user says next to them, are one message: many templates want roles to alternate.
    """
    result: list[Any] = []
    follows_result = False
    for message in messages:
        if not isinstance(message, Mapping):  # `read_message` raises an error
            result.append(message)
            continue
        is_result = message.get("role") == "tool"
        if is_result:
            message = {"role": "user", "content": result_content(message)}
        elif message.get("role") == "assistant" and message.get("tool_calls"):
            message = with_written_calls(message, tagged)
        if follows_result and message.get("role") == "user":
            result[-1] = {
                **result[-1],
                "content": join_contents(result[-1]["content"], message.get("content"), "\n"),
            }
        else:
            result.append(message)
            follows_result = is_result
    return result


def with_written_calls(message: Mapping[str, Any], tagged: bool) -> dict[str, Any]:
    """Return a message of the assistant with its calls as text."""
    begin, end = (CALL_BEGIN, CALL_END) if tagged else ("", "")
    calls = []
    for call in message["tool_calls"]:
        function = copy_plain(call).get("function") or {}
        arguments = function.get("arguments")
        written = read_arguments(arguments) if isinstance(arguments, str) else arguments
        call = {"name": function.get("name"), "arguments": {} if written is None else written}
        calls.append(begin + json.dumps(call, ensure_ascii=False) + end)
    content = message.get("content")
    text = as_text(content) if content else ""
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": "\n".join([text, *calls] if text else calls)}


def result_content(message: Mapping[str, Any]) -> Any:
    """Return the content of a result between tags that name its function."""
    name, content = message.get("name"), message.get("content")
    named = f" name={json.dumps(name, ensure_ascii=False)}" if isinstance(name, str) else ""
    begun = join_contents(f"<tool_response{named}>\n", "" if content is None else content, "")
    return join_contents(begun, RESULT_END, "")


def with_text(messages: Sequence[Any], text: str, in_system: bool) -> list[Any]:
    """Return messages with a text at the end of the system message, or before what the user says first."""
    result = list(messages)
    roles = [message.get("role") if isinstance(message, Mapping) else None for message in result]
    if in_system and roles and roles[0] in FIRST_ROLES:
        result[0] = {**result[0], "content": join_contents(result[0].get("content"), text, "\n\n")}
    elif in_system or "user" not in roles:
        result.insert(0, {"role": "system", "content": text})
    else:
        place = roles.index("user")
        result[place] = {
            **result[place],
            "content": join_contents(text, result[place].get("content"), "\n\n"),
        }
    return result


def join_contents(first: Any, second: Any, separator: str) -> Any:
    """Return two contents as one: text if both are, else a list of parts."""
    if not first or not second:
        return first or second
    if isinstance(first, str) and isinstance(second, str):
        return first + separator + second
    if isinstance(second, str):
        return [*message_parts(first), *message_parts(separator + second)]
    return [*message_parts(first + separator if isinstance(first, str) else first), *message_parts(second)]


def message_parts(content: Any) -> list[Any]:
    """Return content as a list of parts, whose form is checked when it is rendered."""
    return list(content) if isinstance(content, (list, tuple)) else [{"type": "text", "text": content}]
