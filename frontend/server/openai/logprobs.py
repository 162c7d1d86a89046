"""Log probabilities in the formats of OpenAI's completions and chat endpoints."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from pagewire.frontend.client import Logprob, Tokenizer, token_bytes, token_text
from pagewire.frontend.server.openai.protocol import (
    CandidateLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    TokenLogprob,
)

LOWEST = -9999.0  # replaces minus infinity, which JSON cannot represent

Position = Mapping[int, Logprob]


class TokenNames:
    """Names of tokens in responses. as_ids: use "token_id:17" instead of the token's text."""

    def __init__(self, tokenizer: Tokenizer | None, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._bytes: dict[int, list[int] | None] = {}

    def name(self, token_id: int, entry: Logprob | None) -> str:
        """Return a token's name: its text, or "token_id:17"."""
        if self._as_ids or self._tokenizer is None:
            return f"token_id:{token_id}"
        if entry is not None:
            return entry.decoded_token or ""
        return token_text(self._tokenizer, token_id)

    def bytes(self, token_id: int, entry: Logprob) -> list[int] | None:
        """Return a token's UTF-8 bytes, which may be a part of a character; None without a tokenizer."""
        if self._tokenizer is None or entry.decoded_token is None:
            return None
        if token_id not in self._bytes:
            self._bytes[token_id] = list(token_bytes(self._tokenizer, token_id))
        return self._bytes[token_id]


def chat_logprobs(
    names: TokenNames, token_ids: Sequence[int], positions: Iterable[Position | None], top: int
) -> ChatLogprobs:
    """Return the log probabilities of a message: each token with its `top` most likely alternatives; -1: all."""
    content = []
    for token_id, position in zip(token_ids, positions, strict=True):
        assert position is not None, "output tokens have log probabilities"
        best = sorted(position.items(), key=lambda item: item[1].rank or 0)[: None if top < 0 else top]
        content.append(
            TokenLogprob(
                names.name(token_id, position[token_id]),
                clamp_logprob(position[token_id].logprob),
                names.bytes(token_id, position[token_id]),
                [
                    CandidateLogprob(names.name(i, e), clamp_logprob(e.logprob), names.bytes(i, e))
                    for i, e in best
                ],
            )
        )
    return ChatLogprobs(content)


def completion_logprobs(
    names: TokenNames,
    token_ids: Sequence[int],
    positions: Iterable[Position | None],
    text_offset: list[int],
    top: int,
) -> CompletionLogprobs:
    """Return the log probabilities of a completion, or of a part.

    Args:
        positions: by token; None for the first token of a prompt. text_offset: by token.
        top: number of most likely tokens beside the token itself; -1: all.
    """
    part = CompletionLogprobs([], [], [], text_offset)
    for token_id, position in zip(token_ids, positions, strict=True):
        entry = None if position is None else position[token_id]
        part.tokens.append(names.name(token_id, entry))
        part.token_logprobs.append(None if entry is None else clamp_logprob(entry.logprob))
        part.top_logprobs.append(None if position is None else best_by_name(names, token_id, position, top))
    return part


def best_by_name(names: TokenNames, token_id: int, position: Position, top: int) -> dict[str, float]:
    """Return the log probabilities of a token and of the `top` most likely ones, by name.

    Of tokens with the same text, only the first has it as its name, the others are "token_id:17".
    """
    best: dict[str, float] = {}
    for other, entry in position.items():
        if other == token_id or top < 0 or (entry.rank or 0) <= top:
            name = names.name(other, entry)
            best[f"token_id:{other}" if name in best else name] = clamp_logprob(entry.logprob)
    return best


def prompt_logprobs(positions: Iterable[Position | None]) -> list[dict[int, PromptLogprob] | None]:
    """Return the log probabilities of a prompt's tokens; None for the first one."""
    return [
        None
        if position is None
        else {
            i: PromptLogprob(clamp_logprob(e.logprob), e.rank, e.decoded_token) for i, e in position.items()
        }
        for position in positions
    ]


def clamp_logprob(logprob: float) -> float:
    """Return a log probability that JSON can represent: `LOWEST` for minus infinity."""
    return logprob if math.isfinite(logprob) else LOWEST
