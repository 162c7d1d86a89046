"""Conversion of chat conversations to prompts with the model's Jinja template, as in transformers.

Templates run in a sandbox (`sandbox.py`) and have access to plain data only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pagewire.frontend.media.keys import NOT_TAKEN
from pagewire.frontend.media.parts import take_media
from pagewire.frontend.text.conversation import Conversation, Rendered, compile_template
from pagewire.frontend.text.length import encode_within
from pagewire.frontend.text.prompts import TokensPrompt
from pagewire.frontend.text.render_process import render_confined
from pagewire.frontend.text.tokenizer import Tokenizer
from pagewire.frontend.text.tool_prompts import render_prompted
from pagewire.ipc.compatibility import warn_once
from pagewire.ipc.errors import FieldValueError
from pagewire.ipc.quoting import quoted
from pagewire.ipc.wire.media import MediaInfo

Message: TypeAlias = Mapping[str, Any]
ContentFormat: TypeAlias = Literal["auto", "string", "openai"]

CONTENT_FORMATS = ("auto", "string", "openai")


def conversations_of(messages: Any) -> list[list[Message]]:
    """Return a list of conversations, given one (a list of messages) or several.

    Raises:
        TypeError: the argument is neither.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise TypeError(f"a conversation is a list of messages, got {type(messages).__name__}")
    if messages and isinstance(messages[0], (list, tuple)):
        return [list(conversation) for conversation in messages]
    return [list(messages)]


def chat_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    add_special_tokens: bool = False,
    max_model_len: int | None = None,
    truncates: bool = False,
    media: MediaInfo | None = None,
    mm_processor_kwargs: Mapping[str, Any] | None = None,
    salt: str | None = None,
    **options: Any,
) -> TokensPrompt:
    """Convert a conversation to a prompt with token ids and text. options: see `render_chat`.

    add_special_tokens: add the tokenizer's special tokens; most templates write them themselves.
    max_model_len: the model's context length, over which the text is not tokenized to its end; None: whatever its
        length. truncates: it may have more tokens, since they will be truncated.
    media: what the model takes; the prompt then has the media of the messages, which are not fetched yet.
    mm_processor_kwargs: arguments of the model's processor of media. salt: the cache salt of the prompt.

    Raises:
        ContextLengthError: the text is too long. MediaError: the model takes no such media, or not so many.
        And as `render_chat`.
    """
    messages, items = take_media(messages, media)
    if mm_processor_kwargs and media is None:
        raise FieldValueError("mm_processor_kwargs", f": {NOT_TAKEN}")
    placeholders = {} if media is None else {kind: medium.text for kind, medium in media.kinds.items()}
    text = render_chat(tokenizer, messages, placeholders=placeholders, **options)
    if max_model_len is None:
        ids = tokenizer.encode_turn(text, add_special_tokens, salt)
    else:
        ids = encode_within(tokenizer, text, max_model_len, add_special_tokens, truncates, salt)
    prompt = TokensPrompt(prompt_token_ids=ids, prompt=text)
    if items:
        data: dict[str, list[Any]] = {}
        for item in items:
            data.setdefault(item.kind, []).append(item)
        prompt |= {"multi_modal_data": data, "mm_processor_kwargs": dict(mm_processor_kwargs or {})}
    return prompt


def chat_prompts(
    tokenizers: Sequence[Tokenizer | None], conversations: Sequence[Any], **options: Any
) -> list[TokensPrompt]:
    """The prompts of several conversations, each with its own tokenizer. options: of `chat_prompt`.

    Raises:
        ValueError: there is no tokenizer. And as `chat_prompt`.
    """
    prompts = []
    for tokenizer, conversation in zip(tokenizers, conversations, strict=True):
        if tokenizer is None:
            raise ValueError("chat needs a tokenizer: the engine runs with skip_tokenizer_init")
        prompts.append(chat_prompt(tokenizer, conversation, **options))
    return prompts


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    chat_template: str | None = None,
    template_files: bool = True,
    chat_template_content_format: str = "auto",
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    placeholders: Mapping[str, str] | None = None,
    prompts_tools: bool = False,
    on_warning: Callable[[str], None] | None = None,
) -> str:
    """Return the text of one conversation.

    Args:
        chat_template: a template, the name of one of the model's templates, or a file; None: the model's default.
        template_files: allow `chat_template` to be a file; must be False for values from requests.
        chat_template_content_format: "string" joins the parts of content with newlines, "openai" converts
            it to a list of parts, "auto" chooses the form that the template expects.
        add_generation_prompt: end with the header of an answer.
        continue_final_message: end within the final message, so that the model continues it.
        tools: JSON schemas of functions.
        chat_template_kwargs: additional variables of the template.
        placeholders: the text that stands for a medium of each kind, where messages have marks of media.
        prompts_tools: tools, calls and results that the template does not show are put into messages.
        on_warning: called with a text for each option without effect: variables that the template does not read,
            tools that it does not show; None: a warning in the log, once.

    Raises:
        ValueError: there is no template, options contradict each other, or the template fails on the conversation
            or exceeds the sandbox's limits.
        TypeError: messages or tools have a wrong type.
    """
    if add_generation_prompt and continue_final_message:
        raise FieldValueError("add_generation_prompt", "and continue_final_message cannot both be true")
    if chat_template_content_format not in CONTENT_FORMATS:
        raise FieldValueError(
            "chat_template_content_format",
            f"must be one of {', '.join(CONTENT_FORMATS)}, got {chat_template_content_format!r}",
        )
    if not messages:
        raise ValueError("the conversation is empty")
    source = template_source(tokenizer, chat_template, tools is not None, template_files)
    conversation = Conversation(
        list(messages),
        None if tools is None else list(tools),
        dict(chat_template_kwargs or {}),
        chat_template_content_format,
        add_generation_prompt,
        continue_final_message,
        dict(placeholders or {}),
        prompts_tools,
    )
    trusted = (
        template_files or chat_template is None or source != chat_template
    )  # the model's, the operator's
    renders = render_prompted if trusted else render_confined
    rendered = renders(source, tokenizer.special_tokens, conversation)
    for text in warnings_of(rendered):
        if on_warning is None:
            warn_once(text, text)
        else:
            on_warning(text)
    return rendered.text


def warnings_of(rendered: Rendered) -> list[str]:
    """Warnings of values with which a conversation was rendered, but without effect."""
    texts = []
    if rendered.unread:
        names = quoted(rendered.unread)[1:-1]
        texts.append(f"the chat template does not read {names}, so they have no effect")
    if rendered.hides_tools:
        texts.append("the chat template does not show tools, so the model does not know of them")
    return texts


def check_template(tokenizer: Tokenizer, chat_template: str | None, with_tools: bool = False) -> str:
    """Find and compile a template as `render_chat` does; returns its text.

    Raises:
        ValueError: the template is not found, or invalid.
    """
    source = template_source(tokenizer, chat_template, with_tools)
    compile_template(source)
    return source


def template_source(
    tokenizer: Tokenizer, chat_template: str | None, with_tools: bool, files: bool = True
) -> str:
    """Return the text of the template to use. files: allow `chat_template` to be a file.

    Raises:
        ValueError: there is no template, or it is not found.
    """
    own = tokenizer.chat_template
    named = own if isinstance(own, dict) else {"default": own} if own else {}
    if chat_template is None:
        source = named.get("tool_use") if with_tools else None
        source = source or named.get("default")
        if source is None and named:
            raise ValueError(
                f"the model has no default chat template; name one of {', '.join(sorted(named))}"
            )
        if source is None:
            raise ValueError("the model has no chat template: give one (chat_template, or --chat-template)")
        return source
    if chat_template in named:
        return named[chat_template]
    if "{" in chat_template or "\n" in chat_template:
        return chat_template
    path = Path(chat_template).expanduser()
    if not files or not path.is_file():
        raise FieldValueError(
            "chat_template", f"{chat_template!r} is neither a template, nor a name of one, nor a file"
        )
    return path.read_text(encoding="utf-8")
