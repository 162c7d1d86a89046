"""The endpoints /tokenize and /detokenize."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pagewire.frontend.api.off_loop import off_loop, tokenizing
from pagewire.frontend.requests.inputs import check_vocabulary
from pagewire.frontend.server.http.body import Decoder, read_request
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.http.json_response import json_response
from pagewire.frontend.server.http.openapi import Operation
from pagewire.frontend.server.openai.prepared_chat import counted, prompt_of
from pagewire.frontend.server.openai.protocol import (
    ChatRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from pagewire.frontend.server.parsing.choice import ToolUse
from pagewire.frontend.server.serving.exchange import while_connected
from pagewire.frontend.server.serving.service import Service
from pagewire.frontend.text.length import encode_within
from pagewire.ipc.wire.budget import MIN_DETOKENIZED

TO_TOKENS = Decoder(TokenizeRequest)
TO_TEXT = Decoder(DetokenizeRequest)


def routes(service: Service) -> list[Operation]:
    """Return the routes of the endpoints."""

    async def tokenize(request: Request) -> Response:
        fields = await read_request(request, TO_TOKENS, service.options)
        own = service.of(fields.model)
        tokenizer = own.tokenizer_of(fields.model)
        tokens = await while_connected(token_ids(own, fields), request.receive)
        names = tokenizer.convert_ids_to_tokens(tokens) if fields.return_token_strs else msgspec.UNSET
        return json_response(TokenizeResponse(tokens, len(tokens), own.info.max_model_len, names))

    async def detokenize(request: Request) -> Response:
        fields = await read_request(request, TO_TEXT, service.options)
        own = service.of(fields.model)
        tokenizer = own.tokenizer_of(fields.model)
        limit = max(MIN_DETOKENIZED, own.info.max_model_len)
        if len(fields.tokens) > limit:
            raise APIError(
                400, f"tokens must have at most {limit} entries, got {len(fields.tokens)}", param="tokens"
            )
        check_vocabulary("tokens", fields.tokens, own.info.vocab_size)
        text = await off_loop(
            len(fields.tokens), lambda: tokenizer.decode(fields.tokens, skip_special_tokens=False)
        )
        return json_response(DetokenizeResponse(text))

    return [
        Operation(
            "POST",
            "/tokenize",
            tokenize,
            "Convert a text or a conversation to token ids.",
            body=TokenizeRequest,
            result=TokenizeResponse,
        ),
        Operation(
            "POST",
            "/detokenize",
            detokenize,
            "Convert token ids to text.",
            body=DetokenizeRequest,
            result=DetokenizeResponse,
        ),
    ]


async def token_ids(service: Service, fields: TokenizeRequest) -> list[int]:
    """Return the token ids of the prompt that a completion or chat completion would get.

    Raises:
        APIError, ValueError, TypeError: the request is invalid.
    """
    if (fields.prompt is None) == (fields.messages is None):
        raise APIError(400, "give either prompt or messages", param="prompt")
    if fields.messages is not None:
        chat_fields = {
            name: getattr(fields, name) for name in TO_TOKENS.fields if name in ChatRequest.__struct_fields__
        }
        tools = ToolUse(prompted=fields.tools)
        prompt = await prompt_of(service, ChatRequest(**chat_fields), tools, counts=True)
        return await counted(service, prompt)
    text, special = fields.prompt or "", fields.add_special_tokens is not False
    max_model_len = service.info.max_model_len
    tokenizer = service.tokenizer_of(fields.model)
    return await tokenizing(len(text), encode_within, tokenizer, text, max_model_len, special, True)
