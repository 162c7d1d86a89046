"""/tokenize and /detokenize."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pagewire.frontend.inputs import check_vocabulary
from pagewire.frontend.server.http.body import Decoder, read_request
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.json_response import json_response
from pagewire.frontend.server.http.openapi import Operation
from pagewire.frontend.server.openai.chat import prompt_of
from pagewire.frontend.server.openai.protocol import (
    ChatRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from pagewire.frontend.server.openai.sampling import check_text_length
from pagewire.frontend.server.parsing.choice import ToolUse
from pagewire.frontend.server.service import Service, off_loop

TO_TOKENS = Decoder(TokenizeRequest)
TO_TEXT = Decoder(DetokenizeRequest)


def routes(service: Service) -> list[Operation]:
    """The endpoints."""

    async def tokenize(request: Request) -> Response:
        asked = await read_request(request, TO_TOKENS, service.options)
        service.model(asked.model)
        tokens = await token_ids(service, asked)
        names = service.tokenizer.convert_ids_to_tokens(tokens) if asked.return_token_strs else msgspec.UNSET
        return json_response(TokenizeResponse(tokens, len(tokens), service.info.max_model_len, names))

    async def detokenize(request: Request) -> Response:
        asked = await read_request(request, TO_TEXT, service.options)
        service.model(asked.model)
        check_vocabulary("tokens", asked.tokens, service.info.vocab_size)
        text = await off_loop(
            len(asked.tokens), lambda: service.tokenizer.decode(asked.tokens, skip_special_tokens=False)
        )
        return json_response(DetokenizeResponse(text))

    return [
        Operation(
            "POST",
            "/tokenize",
            tokenize,
            "Token ids of a text or a conversation.",
            body=TokenizeRequest,
            result=TokenizeResponse,
        ),
        Operation(
            "POST",
            "/detokenize",
            detokenize,
            "Text of token ids.",
            body=DetokenizeRequest,
            result=DetokenizeResponse,
        ),
    ]


async def token_ids(service: Service, asked: TokenizeRequest) -> list[int]:
    """The token ids that a completion or a chat would begin with.

    Raises:
        APIError, ValueError, TypeError: what is wrong with the request.
    """
    if (asked.prompt is None) == (asked.messages is None):
        raise APIError(400, "give prompt or messages, and not both", param="prompt")
    if asked.messages is not None:
        same = {
            name: getattr(asked, name) for name in TO_TOKENS.fields if name in ChatRequest.__struct_fields__
        }
        tools = ToolUse(prompted=asked.tools)
        return (await prompt_of(service, ChatRequest(**same), tools))["prompt_token_ids"]
    text, special = asked.prompt or "", asked.add_special_tokens is not False
    check_text_length(service, text)
    return await off_loop(len(text), service.tokenizer.encode, text, special)
