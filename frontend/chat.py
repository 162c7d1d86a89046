"""Chat conversations to prompts: the model's Jinja template, rendered as transformers renders it.

Templates come with models and are not trusted: they run in Jinja's sandbox and see only plain data.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeAlias

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pagewire.frontend.inputs import TokensPrompt
from pagewire.frontend.tokenizer import Tokenizer

Message: TypeAlias = Mapping[str, Any]
ContentFormat: TypeAlias = Literal["auto", "string", "openai"]

CONTENT_FORMATS = ("auto", "string", "openai")
TEXT_PARTS = ("text", "input_text", "output_text")
REASONING = ("reasoning_content", "thinking", "reasoning")
# Marks the end of the final message. Its own last space tells whether the template trims messages.
END_MARK = "PAGEWIRE_FINAL_MESSAGE_ENDS_HERE "


def conversations_of(messages: Any) -> list[list[Message]]:
    """One conversation (a list of messages) or several, as a list of several.

    Raises:
        TypeError: not a conversation.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise TypeError(f"a conversation is a list of messages, got {type(messages).__name__}")
    if messages and isinstance(messages[0], (list, tuple)):
        return [list(conversation) for conversation in messages]
    return [list(messages)]


def chat_prompt(
    tokenizer: Tokenizer, messages: Sequence[Message], *, add_special_tokens: bool = False, **options: Any
) -> TokensPrompt:
    """One conversation as a prompt, with token ids and text; options as of `render_chat`.

    add_special_tokens: put some around the text; most templates write them themselves.
    """
    text = render_chat(tokenizer, messages, **options)
    return TokensPrompt(prompt_token_ids=tokenizer.encode(text, add_special_tokens), prompt=text)


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    chat_template: str | None = None,
    chat_template_content_format: str = "auto",
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The text of one conversation.

    chat_template: a template, the name of one of the model's, or a file; None: the model's own.
    chat_template_content_format: "string" joins the parts of a content by newlines, "openai" makes every content
        a list of parts, "auto" does what the template is written for.
    add_generation_prompt: end with the header of an answer.
    continue_final_message: end within the final message, so that it is continued.
    tools: JSON schemas of functions. chat_template_kwargs: further variables of the template.

    Raises:
        ValueError: no template, contradicting options, or a template that fails on the conversation.
        TypeError: messages or tools of a wrong type.
    """
    if add_generation_prompt and continue_final_message:
        raise ValueError("add_generation_prompt and continue_final_message cannot both be true")
    if chat_template_content_format not in CONTENT_FORMATS:
        raise ValueError(
            f"chat_template_content_format must be one of {', '.join(CONTENT_FORMATS)}, "
            f"got {chat_template_content_format!r}"
        )
    if not messages:
        raise ValueError("the conversation is empty")
    source = template_source(tokenizer, chat_template, tools is not None)
    template = compile_template(source)
    chat = [read_message(message) for message in messages]
    as_wanted = content_reader(chat_template_content_format, source)
    for message in chat:
        if "content" in message:
            message["content"] = as_wanted(message["content"])
    variables = {
        "documents": None,
        **tokenizer.special_tokens,
        **plain(chat_template_kwargs or {}),
        "messages": chat,
        "tools": None if tools is None else [read_tool(tool) for tool in tools],
        "add_generation_prompt": add_generation_prompt,
    }
    if continue_final_message:
        return render_open(template, variables)
    return render(template, variables)


def template_source(tokenizer: Tokenizer, wanted: str | None, with_tools: bool) -> str:
    """The text of the template to use.

    Raises:
        ValueError: there is none.
    """
    own = tokenizer.chat_template
    named = own if isinstance(own, dict) else {"default": own} if own else {}
    if wanted is None:
        source = named.get("tool_use") if with_tools else None
        source = source or named.get("default")
        if source is None and named:
            raise ValueError(
                f"the model has no default chat template; name one of {', '.join(sorted(named))}"
            )
        if source is None:
            raise ValueError("the model has no chat template: give one as chat_template")
        return source
    if wanted in named:
        return named[wanted]
    if "{" in wanted or "\n" in wanted:
        return wanted
    path = Path(wanted).expanduser()
    if not path.is_file():
        raise ValueError(f"chat_template {wanted!r} is neither a template, nor a name of one, nor a file")
    return path.read_text(encoding="utf-8")


# ---------------------------------------------------------------- what a template sees


def plain(value: Any) -> Any:
    """A copy out of plain JSON types: objects with methods would open the sandbox.

    Raises:
        TypeError: something else.
    """
    if value is None or type(value) in (str, bool, int, float):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):  # an enum, say
            return kind.__str__(value) if kind is str else kind(value)
    if isinstance(value, Mapping):
        return {plain(name): plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    if callable(dump := getattr(value, "model_dump", None)):
        return plain(dump())
    raise TypeError(f"chat templates take plain data, not {type(value).__name__}")


def read_message(given: Any) -> dict[str, Any]:
    """A message as templates expect it: plain, without empty fields, reasoning under all its names, and tool
    calls with their arguments as data.

    Raises:
        TypeError: not a message. ValueError: it has no role.
    """
    given = plain(given)
    if not isinstance(given, dict):
        raise TypeError(f"a message must be a dict, got {type(given).__name__}")
    if "role" not in given:
        raise ValueError("a message needs a 'role'")
    message: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    reasoning = next((message[name] for name in REASONING if name in message), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    for call in message.get("tool_calls", ()):
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            function["arguments"] = read_arguments(function["arguments"])
    return message


def read_arguments(text: str) -> Any:
    """The arguments of a tool call, which the OpenAI API gives as JSON text."""
    try:
        return json.loads(text) if text else {}
    except ValueError:
        return text  # what a model made up


def read_tool(tool: Any) -> dict[str, Any]:
    """The JSON schema of a tool.

    Raises:
        TypeError: not one.
    """
    if not isinstance(tool, Mapping) and not hasattr(tool, "model_dump"):
        raise TypeError(f"a tool must be a JSON schema (a dict), got {type(tool).__name__}")
    schema: dict[str, Any] = plain(tool)
    return schema


def content_reader(content_format: str, source: str) -> Callable[[Any], Any]:
    """What makes contents fit the template. A template that takes both forms gets what the caller gave."""
    if content_format == "auto":
        loops, tests = content_use(source)
        if loops and tests:
            return lambda content: as_parts(content) if isinstance(content, list) else content
        content_format = "openai" if loops else "string"
    return as_parts if content_format == "openai" else as_text


def as_text(content: Any) -> Any:
    """A content as a string: its parts joined by newlines."""
    if not isinstance(content, list):
        return content
    return "\n".join(part["text"] for part in as_parts(content))


def as_parts(content: Any) -> Any:
    """A content as a list of text parts.

    Raises:
        ValueError: a part that is not text.
    """
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        return content
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    for part in parts:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            kind = part.get("type", "unknown") if isinstance(part, dict) else type(part).__name__
            raise ValueError(f"only text can be the content of a message, got a part of type {kind!r}")
    return [{**part, "type": "text"} if part.get("type") in TEXT_PARTS else part for part in parts]


@lru_cache(maxsize=64)
def content_use(source: str) -> tuple[bool, bool]:
    """Whether a template loops over the parts of contents, and whether it asks if a content is a string."""
    tree = environment().parse(source)
    aliases = {
        assign.target.name
        for assign in tree.find_all(nodes.Assign)
        if isinstance(assign.target, nodes.Name) and is_content(assign.node, set())
    }
    loops = any(is_content(loop.iter, aliases) for loop in tree.find_all(nodes.For))
    return loops, any(test.name == "string" for test in tree.find_all(nodes.Test))


def is_content(node: nodes.Node, aliases: set[str]) -> bool:
    """True for `message.content`, `message["content"]`, such with filters, and names that stand for it."""
    while isinstance(node, nodes.Filter) and node.node is not None:
        node = node.node
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Name) and node.name in aliases


# ---------------------------------------------------------------- rendering


def render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """The text.

    Raises:
        ValueError: the template refuses the conversation, or fails on it.
    """
    try:
        return template.render(variables)
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template refuses the conversation: {error.message or error}") from error
    except (TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"the chat template fails on the conversation: {error}") from error


def render_open(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """The text up to the end of the final message's content, with nothing after it.

    Raises:
        ValueError: as `render`; the final message has no text, or the template drops it.
    """
    final = variables["messages"][-1]
    holder, name = final, "content"
    if isinstance(final.get("content"), list):
        holder = next((part for part in reversed(final["content"]) if "text" in part), {})
        name = "text"
    text = holder.get(name)
    if not isinstance(text, str):
        raise ValueError("continue_final_message: the final message has no text to continue")
    holder[name] = text + END_MARK
    rendered = render(template, variables)
    end = rendered.rfind(END_MARK.strip())
    if end < 0 or text.strip() not in rendered:
        raise ValueError("continue_final_message: the chat template changes or drops the final message")
    if rendered.startswith(END_MARK, end):
        return rendered[:end]
    return rendered[:end].rstrip()  # the template trims messages


@lru_cache(maxsize=64)
def compile_template(source: str) -> jinja2.Template:
    """A template, ready to render.

    Raises:
        ValueError: it is not valid.
    """
    try:
        return environment().from_string(source)
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template is not valid: {error}") from error


class Generation(Extension):
    """`{% generation %}` marks what the assistant says, for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """The block's body, as if it stood there without the tag."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


@lru_cache(maxsize=1)
def environment() -> ImmutableSandboxedEnvironment:
    """What chat templates are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is; Jinja's own filter would escape it for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def raise_exception(message: str) -> NoReturn:
    """How templates refuse a conversation."""
    raise jinja2.TemplateError(message)


def strftime_now(form: str) -> str:
    """The local time."""
    return datetime.now().strftime(form)
