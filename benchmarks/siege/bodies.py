"""Bodies for every endpoint that takes one: drawn from the structs they are decoded to, and then damaged."""

from __future__ import annotations

import base64
import json
import random
from typing import Any

import msgspec

from pagewire.frontend.server.anthropic.protocol import MessagesRequest
from pagewire.frontend.server.ollama.protocol import OllamaChatRequest, OllamaGenerateRequest
from pagewire.frontend.server.openai.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from pagewire.frontend.server.responses.protocol import InputTokensRequest, ResponsesRequest

from .attack import Target, ask, log_uniform, post
from .values import Values, struct_type

MESSAGE = {"role": "user", "content": "What is a list?"}

# Path to struct, and a body that is good.
ENDPOINTS: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, {"prompt": "A list is", "max_tokens": 4}),
    "/v1/chat/completions": (ChatRequest, {"messages": [MESSAGE], "max_tokens": 4}),
    "/v1/responses": (ResponsesRequest, {"input": "What is a list?", "max_output_tokens": 4}),
    "/v1/responses/input_tokens": (InputTokensRequest, {"input": "What is a list?"}),
    "/v1/messages": (MessagesRequest, {"messages": [MESSAGE], "max_tokens": 4}),
    "/api/chat": (OllamaChatRequest, {"messages": [MESSAGE], "options": {"num_predict": 4}}),
    "/api/generate": (OllamaGenerateRequest, {"prompt": "A list is", "options": {"num_predict": 4}}),
    "/tokenize": (TokenizeRequest, {"prompt": "A list is"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [300, 301]}),
}
MAX_CHANGED = 4  # fields that differ from the good body
WEIGHTS = (8, 8, 6, 2, 4, 2, 2, 2, 1)
MAX_BYTES = 4 << 20  # about the size of the largest conversation
DISTINCT_MESSAGES = 50  # of a conversation; more repeat them
DEEPEST = 100_000  # levels of a body that is written as text
RARELY = {
    "model",
    "timeout",
    "suffix",
    "functions",
    "function_call",
    "audio",
    "web_search_options",
    "conversation",
}


async def attack(target: Target, rng: random.Random) -> str:
    """A good body of which a few fields are replaced; now and then one that is no JSON."""
    (path,) = rng.choices(list(ENDPOINTS), WEIGHTS)
    body = drawn(path, rng)
    if rng.random() < 0.15:
        body = damaged(body, rng)
    return await ask(target, rng, path, body)


async def fields(target: Target, rng: random.Random) -> str:
    """Very many unknown fields, in the body or in a field that takes any object."""
    many = b",".join(b'"%x": 0' % index for index in range(log_uniform(rng, 1000, 300_000)))
    body = rng.choice(
        (
            b'{"prompt": "a", "max_tokens": 1, %b}',
            b'{"prompt": "a", "temperature": -9, %b}',
            b'{"prompt": "a", "max_tokens": 1, "guided_json": {%b}}',
            b'{"prompt": "a", "max_tokens": 1, "structured_outputs": {%b}}',
            b'{"prompt": "a", "max_tokens": 1, "vllm_xargs": {%b}}',
        )
    )
    return await ask(target, rng, "/v1/completions", body % many)


async def embeddings(target: Target, rng: random.Random) -> str:
    """Files of embeddings that claim shapes of very many dimensions, or very many tensors of all their bytes."""
    size, data = log_uniform(rng, 100, 500_000), bytes(log_uniform(rng, 1, 1 << 20))
    entry: dict[str, Any] = {"dtype": "F32", "data_offsets": [0, len(data)], "shape": [len(data) // 4]}
    header = rng.choice(
        (
            {"a": entry | {"shape": [9] * size + [0]}},
            {"a": entry | {"shape": [1 << 40] * min(size, 9)}},
            {str(index): entry for index in range(size // 50)},
            {"a" * size: entry},
        )
    )
    text = json.dumps(header).encode()
    file = base64.b64encode(len(text).to_bytes(8, "little") + text + data).decode()
    return await post(target, rng, "/v1/completions", {"prompt_embeds": file, "max_tokens": 1})


def drawn(path: str, rng: random.Random) -> bytes:
    """A body for an endpoint."""
    kind, good = ENDPOINTS[path]
    values = Values(rng, wild=rng.choice((0.0, 0.05, 0.3)), large=rng.choice((0.0, 0.05, 0.3)))
    fields, body = struct_type(kind).fields, dict(good)
    for field in rng.sample(fields, rng.randint(1, min(MAX_CHANGED, len(fields)))):
        if field.encode_name not in RARELY or rng.random() < 0.1:
            body[field.encode_name] = values.of(field.type)
    if rng.random() < 0.3:
        body["messages" if "messages" in good else "input"] = conversation(rng, values)
    try:
        return json.dumps(body, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    except RecursionError:
        return json.dumps(good).encode()


def conversation(rng: random.Random, values: Values) -> list[dict[str, Any]]:
    """Messages, of any roles and contents; sometimes very many, or of very many parts."""
    count = log_uniform(rng, 1, 100_000) if rng.random() < 0.1 else rng.randint(1, 4)
    drawn: list[dict[str, Any]] = []
    size = 1
    while len(drawn) < min(count, DISTINCT_MESSAGES) and size < MAX_BYTES:
        drawn.append(message(rng, values))
        size += len(json.dumps(drawn[-1]))
    return drawn * max(1, min(count // DISTINCT_MESSAGES, MAX_BYTES // size))


def message(rng: random.Random, values: Values) -> dict[str, Any]:
    """One message."""
    drawn: dict[str, Any] = {
        "role": rng.choice(("system", "user", "assistant", "tool", "developer", values.text()))
    }
    part = {"type": "text", "text": values.text()}
    contents = (
        values.text(),
        [part] * min(values.size(50_000), MAX_BYTES // len(json.dumps(part))),
        None,
        values.anything(),
    )
    drawn["content"] = rng.choice(contents)
    if rng.random() < 0.2:
        function = {
            "name": values.text()[:100],
            "arguments": rng.choice((values.text(), "{}", '{"a":' * 400)),
        }
        count = min(values.size(5000), MAX_BYTES // len(json.dumps(function)))
        drawn["tool_calls"] = [{"id": "a", "type": "function", "function": function}] * count
    if rng.random() < 0.1:
        drawn[values.text()[:50]] = values.anything()
    return drawn


def damaged(body: bytes, rng: random.Random) -> bytes:
    """What is left of a body: cut, doubled, with a byte changed; or something else altogether."""
    place = rng.randrange(len(body) + 1)
    size = log_uniform(rng, 1, DEEPEST)
    return rng.choice(
        (
            body[:place],
            body + body,
            body[:place] + rng.randbytes(rng.randint(1, 8)) + body[place:],
            b'{"prompt": ' + b"[" * size,
            b'{"prompt": "a", "extra": ' + b"[" * size + b"]" * size + b"}",
            b'{"prompt": "a", "guided_json": ' + b'{"a":' * size + b"1" + b"}" * size + b"}",
            b'{"messages": ' + b'[{"content":' * size,
            body[:-1] + b', "max_tokens": 1, "max_tokens": 2, "prompt": "b"}',
            b"\xef\xbb\xbf" + body,
            body.decode("utf-8", "replace").encode("utf-16"),
            b'{"prompt": "a", "temperature": 1e' + b"9" * size + b"}",
            b'{"prompt": "a", "seed": ' + b"9" * size + b"}",
            b'{"prompt": "' + b"\\ud800" * size + b'"}',
            b'{"prompt": "' + b"\\u0000" * size + b'", "max_tokens": 1}',
            b"{" + b",".join(b'"x%d": 0' % index for index in range(size)) + b"}",
            rng.randbytes(size),
            b" " * size,
            b"null",
            b"[]",
            b"",
        )
    )
