"""Prompts of a load test from conversations in ShareGPT's format.

The file is a JSON list of {"conversations": [{"value": ...}, ...]}. As vLLM's benchmarks take it: the prompt is the
first turn, and as many tokens are generated as the second one has; turns of under 4 tokens, prompts over 1024 and
pairs over 2048 tokens are left out.
"""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from pagewire.cli.console.parser import UsageError
from pagewire.cli.load.prompts import read_text

MIN_TOKENS = 4  # of a prompt, and of an answer
MAX_PROMPT_TOKENS = 1024
MAX_TOKENS = 2048  # of both together
Encode = Callable[[str], Awaitable[list[int]]]


async def conversations(
    path: Path, count: int, seed: int, encode: Encode, max_tokens: int = MAX_TOKENS
) -> list[tuple[str, list[int], int]]:
    """Return the text and the token ids of `count` prompts, and how many tokens to generate; the same for a seed.

    max_tokens: of prompt and answer. Where too few conversations fit, they are repeated.

    Raises:
        UsageError: the file cannot be read, is of another format, or has no conversation that fits.
    """
    pairs = read_pairs(path)
    random.Random(seed).shuffle(pairs)
    chosen = [item async for item in fitting(pairs, count, encode, min(max_tokens, MAX_TOKENS))]
    if not chosen:
        raise UsageError(f"{path}: no conversation has a fitting prompt and answer")
    return [chosen[index % len(chosen)] for index in range(count)]


async def fitting(
    pairs: list[tuple[str, str]], count: int, encode: Encode, max_tokens: int
) -> AsyncIterator[tuple[str, list[int], int]]:
    """Yield at most `count` of the pairs that have neither too few tokens nor too many."""
    for prompt, answer in pairs:
        ids, num_out = await encode(prompt), len(await encode(answer))
        small = min(len(ids), num_out) < MIN_TOKENS
        if not small and len(ids) <= MAX_PROMPT_TOKENS and len(ids) + num_out <= max_tokens:
            yield prompt, ids, num_out
            count -= 1
        if count == 0:
            return


def read_pairs(path: Path) -> list[tuple[str, str]]:
    """Return the first two turns of every conversation that has two.

    Raises:
        UsageError: the file cannot be read, or is of another format.
    """
    try:
        found: list[dict[str, Any]] = json.loads(read_text(path))
        turns = [conversation["conversations"] for conversation in found]
        return [(str(pair[0]["value"]), str(pair[1]["value"])) for pair in turns if len(pair) >= 2]
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{path} has not ShareGPT's format: {error!r}") from error
