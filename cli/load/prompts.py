"""Prompts for a load test: random tokens, pieces of a text, or lines of a file."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pagewire.cli.console.parser import UsageError
from pagewire.cli.load.client import LoadClient, LoadQuery
from pagewire.frontend.text.tokenizer import load_tokenizer

LOWEST_ID = 10  # lower ids are special tokens in most vocabularies
COMMON_VOCABULARY = 1000  # ids below this are valid in every model's vocabulary

Source = Callable[[random.Random, int], list[int]]
"""Returns a prompt of the given number of tokens, drawn with the given random generator."""


@dataclass(frozen=True)
class LengthRange:
    """A range of token counts, both ends included, to draw from uniformly."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> LengthRange:
        """Parse `128` or `64:192`.

        Raises:
            ValueError: the text has another form, or a number is below 1.
        """
        low, colon, high = text.partition(":")
        span = cls(int(low), int(high) if colon else int(low))
        if not 1 <= span.low <= span.high:
            raise ValueError(f"must be N or LOW:HIGH with 1 <= LOW <= HIGH, got {text}")
        return span

    def draw(self, rng: random.Random) -> int:
        """Draw a number from the range."""
        return rng.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


class PromptTokenizer:
    """Converts text to tokens and back, with a local tokenizer or with the server's endpoints."""

    def __init__(self, client: LoadClient, name: str | None) -> None:
        self.client = client
        self.tokenizer = load_tokenizer(name) if name else None

    @property
    def vocab_size(self) -> int:
        """Exclusive upper limit of token ids."""
        return COMMON_VOCABULARY if self.tokenizer is None else len(self.tokenizer)

    async def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens.

        Raises:
            OSError: the server has no /tokenize, or it failed.
        """
        if self.tokenizer is not None:
            return self.tokenizer.encode(text, add_special_tokens=False)
        fields = {"model": self.client.target.model, "prompt": text, "add_special_tokens": False}
        return [int(token) for token in (await self.client.call("/tokenize", fields))["tokens"]]

    async def decode(self, tokens: list[int]) -> str:
        """Return the text of token ids.

        Raises:
            OSError: the server has no /detokenize, or it failed.
        """
        if self.tokenizer is not None:
            return self.tokenizer.decode(tokens)
        fields = {"model": self.client.target.model, "tokens": tokens}
        return str((await self.client.call("/detokenize", fields))["prompt"])


def random_tokens(ids: range, shared: int, seed: int) -> Source:
    """Return a source of random token ids, the first `shared` of which are the same in every prompt."""
    prefix = random.Random(seed).choices(ids, k=shared)

    def draw(rng: random.Random, length: int) -> list[int]:
        return prefix[:length] + rng.choices(ids, k=max(0, length - shared))

    return draw


def slices(tokens: Sequence[int]) -> Source:
    """Return a source of random slices of a text; a text shorter than a prompt is repeated."""

    def draw(rng: random.Random, length: int) -> list[int]:
        begin = rng.randrange(max(1, len(tokens) - length + 1))
        return [tokens[(begin + i) % len(tokens)] for i in range(length)]

    return draw


async def draw_queries(
    count: int,
    source: Source,
    input_len: LengthRange,
    output_len: LengthRange,
    seed: int,
    codec: PromptTokenizer | None,
) -> list[LoadQuery]:
    """Return `count` queries, the same for the same seed.

    With a codec, prompts are text; the server may encode that text to slightly more or fewer tokens.
    """
    rng, queries = random.Random(seed), []
    for _ in range(count):
        prompt = source(rng, input_len.draw(rng))
        max_tokens = output_len.draw(rng)
        queries.append(LoadQuery(prompt if codec is None else await codec.decode(prompt), max_tokens))
    return queries


def repeat_queries(count: int, prompts: Sequence[str], output_len: LengthRange, seed: int) -> list[LoadQuery]:
    """Return `count` queries that use these prompts in turn."""
    rng = random.Random(seed)
    return [LoadQuery(prompts[i % len(prompts)], output_len.draw(rng)) for i in range(count)]


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        UsageError: the file cannot be read, or is empty.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    if not text.strip():
        raise UsageError(f"{path} is empty")
    return text


def read_prompts(path: Path) -> list[str]:
    """Return the lines of a file as prompts; of a .jsonl file, the field `prompt` of each line's object.

    Raises:
        UsageError: the file cannot be read or is empty, or a line is not such an object.
    """
    lines = [line for line in read_text(path).splitlines() if line.strip()]
    if path.suffix != ".jsonl":
        return lines
    prompts = []
    for number, line in enumerate(lines, 1):
        try:
            prompts.append(str(json.loads(line)["prompt"]))
        except (ValueError, TypeError, KeyError) as error:
            raise UsageError(f"{path}: line {number} is not an object with a field prompt") from error
    return prompts
