"""Chat conversations to prompts: the model's Jinja template, rendered as transformers renders it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from pagewire.frontend.inputs import TokensPrompt
from pagewire.frontend.tokenizer import Tokenizer

Message: TypeAlias = Mapping[str, Any]
ContentFormat = Literal["auto", "string", "openai"]


def conversations_of(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> list[list[Message]]:
    """One conversation or several, as a list of several.

    Raises:
        TypeError, ValueError: not a conversation, or an empty one.
    """
    raise NotImplementedError


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    chat_template: str | None = None,
    chat_template_content_format: ContentFormat = "auto",
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: list[dict[str, Any]] | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> str:
    """The text of one conversation.

    Raises:
        ValueError: no template, both or neither ending possible, or the template refuses the messages.
    """
    raise NotImplementedError


def chat_prompt(tokenizer: Tokenizer, messages: Sequence[Message], **options: Any) -> TokensPrompt:
    """One conversation as a prompt (`prompt_token_ids` and `prompt`); options as of `render_chat`."""
    raise NotImplementedError
