"""Requests that ask for as much as they may, or more; and clients that leave before they get it."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any, TypeAlias

from .attack import SOURCES, Target, ask, connected, head, log_uniform, send  # noqa: F401
from .fortress import EMBEDDER
from .slow import read_slowly

Fields: TypeAlias = dict[str, Any]
BASE: Fields = {"prompt": "A list is", "max_tokens": 4}
VOCABULARY = 4096
LONGEST = 1000  # tokens of a prompt


async def attack(target: Target, rng: random.Random) -> str:
    """One greedy completion, to its end."""
    body = json.dumps(BASE | rng.choice(GREEDY)(rng)).encode()
    return await ask(target, rng, "/v1/completions", body)


async def leaving(target: Target, rng: random.Random) -> str:
    """One greedy completion, left at any moment."""
    body = json.dumps(BASE | rng.choice(GREEDY)(rng) | {"stream": rng.random() < 0.7}).encode()
    data = head(target, "POST", "/v1/completions", len(body)) + body
    async with connected(target, rng) as (reader, writer):
        await send(writer, data[: rng.choice((len(data), len(data), len(data) - 1))])
        if rng.random() < 0.5:
            await asyncio.sleep(rng.random())
        else:
            try:
                await asyncio.wait_for(reader.read(log_uniform(rng, 1, 10_000)), 2.0)
            except asyncio.TimeoutError:
                pass
    return "left"


async def chats(target: Target, rng: random.Random) -> str:
    """One greedy chat."""
    path, fields = rng.choice(CHATS)(rng)
    return await ask(target, rng, path, json.dumps(fields).encode())


async def pooling(target: Target, rng: random.Random) -> str:
    """One greedy request to the model that pools, to its end, read slowly, or left at any moment."""
    path, fields = rng.choice(POOLING)(rng)
    body = json.dumps({"model": EMBEDDER} | fields).encode()
    if rng.random() < 0.6:
        return await ask(target, rng, path, body)
    try:
        await read_slowly(target, rng, head(target, "POST", path, len(body)) + body)
    except asyncio.TimeoutError:
        pass  # it was not accepted, or there was nothing to read yet
    return "left"


# ---------------------------------------------------------------- completions


def many_prompts(rng: random.Random) -> Fields:
    """As many prompts as there may be, and a few parameters that each of them carries."""
    prompts = [[300 + index % 700, 301] for index in range(log_uniform(rng, 2, 2048))]
    extra: list[Fields] = [
        {},
        {"cache_salt": "s" * log_uniform(rng, 10, 300_000)},
        {"n": rng.choice((2, 64))},
        {"max_tokens": 1000, "ignore_eos": True, "n": rng.choice((1, 64))},
        {"user": "u" * log_uniform(rng, 10, 300_000)},
        {"guided_regex": "(a|b)*", "n": rng.choice((1, 64))},
        {"prompt_logprobs": 20},
        {"bad_words": [f"word {index}" for index in range(log_uniform(rng, 1, 2000))]},
        {"vllm_xargs": {"a": "x" * log_uniform(rng, 10, 300_000)}},
        {"stop": [f"stop {index}" for index in range(log_uniform(rng, 1, 1000))]},
    ]
    return {"prompt": prompts} | rng.choice(extra)


def log_probabilities(rng: random.Random) -> Fields:
    """All log probabilities that there may be."""
    count = rng.choice((1, 8, 64))
    return rng.choice(
        (
            {"n": count, "logprobs": 20, "max_tokens": 900, "ignore_eos": True, "stream": rng.random() < 0.5},
            {
                "prompt": [[300 + i % 700] * LONGEST for i in range(log_uniform(rng, 1, 1024))],
                "prompt_logprobs": 20,
            },
            {"prompt": [300] * LONGEST, "echo": True, "logprobs": 20, "n": count, "max_tokens": 1},
            {"best_of": count, "n": 1, "logprobs": 20, "max_tokens": 300, "ignore_eos": True},
        )
    )


def long_lists(rng: random.Random) -> Fields:
    """Lists that cost the engine something for each item."""
    size = log_uniform(rng, 10, 1_000_000)
    words = min(size, 500_000)
    return rng.choice(
        (
            lambda: {"stop": [f"s{index}" for index in range(words)]},
            lambda: {"stop": ["a" * size]},
            lambda: {"stop_token_ids": [index % VOCABULARY for index in range(size)]},
            lambda: {"stop_token_ids": list(range(2**31 - 1, 2**31 - 1 - size, -1))},
            lambda: {"bad_words": [f"w{index}" for index in range(words)]},
            lambda: {"bad_words": ["word " * (size // 5 + 1)]},
            lambda: {"logit_bias": {str(index): 1.0 for index in range(min(size, VOCABULARY))}, "n": 64},
            lambda: {"allowed_token_ids": [index % VOCABULARY for index in range(size)], "n": 64},
            lambda: {"logit_bias": {f"{index}": -100 for index in range(size)}},
            lambda: {"guided_choice": [f"c{index}" for index in range(min(size, 40_000))]},
        )
    )()


def long_texts(rng: random.Random) -> Fields:
    """Prompts that are much longer than the model's context, or slow to tokenize."""
    piece = rng.choice(("a", " ", "\n", "ab ", "é", "👩‍👩‍👧", "\0", "<|im_end|>", "0", "\u0301", "中"))
    text = piece * (log_uniform(rng, 1000, 4 << 20) // len(piece.encode()))
    return {"prompt": text, "truncate_prompt_tokens": rng.choice((None, -1, 1, 100))}


def beams(rng: random.Random) -> Fields:
    """A beam search with any width and penalty."""
    return {
        "use_beam_search": True,
        "temperature": 0,
        "n": rng.choice((1, 4, 64)),
        "best_of": rng.choice((None, 64)),
        "length_penalty": rng.choice((1e308, -1e308, -2000, 2000, 0, -0.0, 1e-320)),
        "max_tokens": rng.choice((1, 50, 1000)),
        "early_stopping": rng.choice((True, False, "never")),
        "guided_regex": rng.choice((None, None, "a{3}")),
    }


def tokens(rng: random.Random) -> Fields:
    """Very many tokens for a short body."""
    prompts = [[300]] * rng.choice((1, 32, 1024))
    return {"prompt": prompts, "n": rng.choice((1, 64)), "max_tokens": 1000, "ignore_eos": True}


def salts(rng: random.Random) -> Fields:
    """The same long prompt under a salt of its own: nothing of the prefix cache is of use."""
    return {"prompt": [300] * LONGEST, "cache_salt": str(rng.random()), "n": rng.choice((1, 16, 64))}


def priorities(rng: random.Random) -> Fields:
    """A request that would go before all others, for long."""
    return {"priority": rng.choice((-(2**63), 2**63 - 1, -1)), "max_tokens": 1000, "ignore_eos": True, "n": 8}


GREEDY: tuple[Callable[[random.Random], Fields], ...] = (
    *(many_prompts, log_probabilities, long_lists, long_texts, beams, tokens, salts, priorities),
)


# ---------------------------------------------------------------- chats


def many_messages(rng: random.Random) -> tuple[str, Fields]:
    """Very many messages, with and without content."""
    message = rng.choice(
        ({"role": "user"}, {"role": "user", "content": "a"}, {"role": "assistant", "content": None})
    )
    return rng.choice(("/v1/chat/completions", "/tokenize")), {
        "messages": [message] * log_uniform(rng, 10, 300_000)
    }


def long_messages(rng: random.Random) -> tuple[str, Fields]:
    """A message that is much longer than the model's context."""
    text = rng.choice(("a", " ", "word ", "é", "{{ x }}", "<think>")) * log_uniform(rng, 1000, 1 << 20)
    path = rng.choice(("/v1/chat/completions", "/v1/responses", "/v1/responses/input_tokens", "/tokenize"))
    if path.startswith("/v1/responses"):
        return path, {"input": text, "truncation": rng.choice(("auto", "disabled"))}
    return path, {"messages": [{"role": "user", "content": text}]}


def many_tools(rng: random.Random) -> tuple[str, Fields]:
    """Very many tools, with equal names, or of large schemas."""
    count, same = log_uniform(rng, 2, 40_000), rng.random() < 0.3
    schema: Fields = {
        "type": "object",
        "properties": {f"p{i}": {"type": "string"} for i in range(rng.choice((0, 1, 50)))},
    }
    tools = [
        {"type": "function", "function": {"name": f"f{0 if same else index}", "parameters": schema}}
        for index in range(min(count, 40_000 if not schema["properties"] else 2000))
    ]
    choice = rng.choice(("required", "none", {"type": "function", "function": {"name": "f1"}}))
    messages = [{"role": "user", "content": "Call it."}]
    return "/v1/chat/completions", {
        "messages": messages,
        "tools": tools,
        "tool_choice": choice,
        "max_tokens": 8,
    }


def many_parts(rng: random.Random) -> tuple[str, Fields]:
    """A message of very many parts."""
    parts = [{"type": "text", "text": "a"}] * log_uniform(rng, 10, 200_000)
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}


CHATS = (many_messages, long_messages, many_tools, many_parts)


# ---------------------------------------------------------------- pooling


def encodings(rng: random.Random) -> Fields:
    """Any way to write numbers."""
    return rng.choice(
        (
            {},
            {
                "encoding_format": "base64",
                "embed_dtype": rng.choice(("float32", "float16", "bfloat16", None)),
            },
        )
    )


def embeddings_of_tokens(rng: random.Random) -> tuple[str, Fields]:
    """An embedding of every token: for a short body the longest answers that there are."""
    texts = [[300 + i % 700] * LONGEST for i in range(log_uniform(rng, 1, 40))]
    return "/pooling", {"input": texts, "task": "token_embed"} | encodings(rng)


def embeddings_of_texts(rng: random.Random) -> tuple[str, Fields]:
    """As many texts as there may be, or more."""
    texts = [f"text {i}" for i in range(log_uniform(rng, 100, 2100))]
    return rng.choice(("/v1/embeddings", "/pooling")), {"input": texts} | encodings(rng)


def many_scores(rng: random.Random) -> tuple[str, Fields]:
    """A text against very many others."""
    texts = [f"text {i}" for i in range(log_uniform(rng, 100, 2100))]
    return rng.choice(
        (("/v1/score", {"text_1": "a", "text_2": texts}), ("/v1/rerank", {"query": "a", "documents": texts}))
    )


POOLING = (embeddings_of_tokens, embeddings_of_tokens, embeddings_of_texts, many_scores)
