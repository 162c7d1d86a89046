"""Conversations to pool: the chat template makes one prompt of the messages."""

from __future__ import annotations

from pagewire.frontend.client import TokensPrompt
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.openai.prepared_chat import prompt_of
from pagewire.frontend.server.openai.protocol import ChatRequest
from pagewire.frontend.server.parsing.choice import ToolUse
from pagewire.frontend.server.pooling.protocol import EmbeddingRequest
from pagewire.frontend.server.serving.service import Service

TEMPLATE_FIELDS = (
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
    "add_special_tokens",
)


def check_conversation_form(request: EmbeddingRequest) -> None:
    """Refuse a request with both an input and messages, or neither, or with fields of the other form.

    Raises:
        APIError: it is so, or it asks for bytes, or for a type of numbers without base64.
    """
    if request.encoding_format == "bytes":
        message = (
            "encoding_format 'bytes' is not supported: it describes every vector in a response header, which "
            "clients limit to 64 KiB; use base64"
        )
        raise APIError(400, message, param="encoding_format")
    for name in ("embed_dtype", "endianness"):
        if getattr(request, name) is not None and request.encoding_format != "base64":
            raise APIError(
                400, f"{name} is for encoding_format 'base64': numbers in JSON have no type", param=name
            )
    if request.endianness == "big":
        raise APIError(400, "endianness 'big' is not supported: base64 is little-endian", param="endianness")
    if request.messages is None:
        if request.input is None:
            raise APIError(422, "missing required field `input`", param="input")
        for name in TEMPLATE_FIELDS:
            if getattr(request, name) is not None:
                raise APIError(400, f"{name} is for the chat template: give messages with it", param=name)
    elif request.input is not None:
        raise APIError(400, "give either input or messages", param="messages")
    elif request.prompt_name is not None:
        message = "prompt_name: the model's prompts are not put before conversations; give a system message"
        raise APIError(400, message, param="prompt_name")


async def conversation_prompt(service: Service, request: EmbeddingRequest) -> TokensPrompt:
    """The prompt that the chat template makes of the messages; by default without the header of an answer.

    Raises:
        As `prompt_of`.
    """
    chat = ChatRequest(
        model=request.model,
        messages=request.messages or [],
        add_generation_prompt=bool(request.add_generation_prompt),
        continue_final_message=request.continue_final_message,
        chat_template=request.chat_template,
        chat_template_kwargs=request.chat_template_kwargs,
        add_special_tokens=request.add_special_tokens,
        truncate_prompt_tokens=request.truncate_prompt_tokens,
    )
    return await prompt_of(service, chat, ToolUse())
