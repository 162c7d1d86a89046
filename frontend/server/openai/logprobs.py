"""Log probabilities in the formats of OpenAI's completions and chat endpoints."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from pagewire.frontend.server.openai.protocol import (
    CandidateLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    TokenLogprob,
)
from pagewire.frontend.text.logprobs import Logprob, token_text
from pagewire.frontend.text.steps import REPLACEMENT, byte_level_bytes, byte_token
from pagewire.frontend.text.tokenizer import Tokenizer

LOWEST = -9999.0  # replaces minus infinity, which JSON cannot represent

Position = Mapping[int, Logprob]


class TokenNames:
    """Names of tokens in responses. as_ids: use "token_id:17" instead of the token's text."""

    def __init__(self, tokenizer: Tokenizer | None, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids or tokenizer is None
        self._bytes: dict[int, list[int] | None] = {}

    def name(self, token_id: int, entry: Logprob | None) -> str:
        """Return a token's name: its text, or "token_id:17"."""
        return f"token_id:{token_id}" if self._as_ids else self.text(token_id, entry)

    def text(self, token_id: int, entry: Logprob | None) -> str:
        """Return a token's text; "" without a tokenizer."""
        if entry is not None:
            return entry.decoded_token or ""
        return "" if self._tokenizer is None else token_text(self._tokenizer, token_id)

    def bytes(self, token_id: int, entry: Logprob) -> list[int] | None:
        """Return a token's UTF-8 bytes, which may be a part of a character; None without a tokenizer."""
        if self._tokenizer is None or entry.decoded_token is None:
            return None
        if token_id not in self._bytes:
            self._bytes[token_id] = list(token_bytes(self._tokenizer, token_id))
        return self._bytes[token_id]


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """Return the UTF-8 bytes of one token, which may be a part of a character."""
    text = tokenizer.decode([token_id], skip_special_tokens=False)
    (name,) = tokenizer.convert_ids_to_tokens([token_id])
    if REPLACEMENT not in text or name is None or REPLACEMENT in name:
        return text.encode()
    return byte_token(name) or byte_level_bytes(name)


def chat_logprobs(
    names: TokenNames, token_ids: Sequence[int], positions: Iterable[Position | None], top: int
) -> ChatLogprobs:
    """Return the log probabilities of a message: each token with its `top` most likely alternatives."""
    content = []
    for token_id, position in zip(token_ids, positions, strict=True):
        assert position is not None, "output tokens have log probabilities"
        best = sorted(position.items(), key=lambda item: item[1].rank or 0)[:top]
        content.append(
            TokenLogprob(
                names.name(token_id, position[token_id]),
                finite(position[token_id].logprob),
                names.bytes(token_id, position[token_id]),
                [CandidateLogprob(names.name(i, e), finite(e.logprob), names.bytes(i, e)) for i, e in best],
            )
        )
    return ChatLogprobs(content)


class CompletionLogprobsWriter:
    """Writes the log probabilities of a completion in parts, and keeps track of the offset in its text.

    top: number of most likely tokens beside the token itself.
    """

    def __init__(self, names: TokenNames, top: int) -> None:
        self._names, self._top = names, top
        self._offset = 0

    def write(self, token_ids: Sequence[int], positions: Iterable[Position | None]) -> CompletionLogprobs:
        """Return the log probabilities of the next tokens. A position is None for the first token of a prompt."""
        part = CompletionLogprobs([], [], [], [])
        for token_id, position in zip(token_ids, positions, strict=True):
            entry = None if position is None else position[token_id]
            part.tokens.append(self._names.name(token_id, entry))
            part.text_offset.append(self._offset)
            part.token_logprobs.append(None if entry is None else finite(entry.logprob))
            part.top_logprobs.append(None if position is None else self._best(token_id, position))
            self._offset += len(self._names.text(token_id, entry))
        return part

    def _best(self, token_id: int, position: Position) -> dict[str, float]:
        best = [i for i, entry in position.items() if i == token_id or (entry.rank or 0) <= self._top]
        return {self._names.name(i, position[i]): finite(position[i].logprob) for i in best}


def prompt_logprobs(positions: Iterable[Position | None]) -> list[dict[int, PromptLogprob] | None]:
    """Return the log probabilities of a prompt's tokens; None for the first one."""
    return [
        None
        if position is None
        else {i: PromptLogprob(finite(e.logprob), e.rank, e.decoded_token) for i, e in position.items()}
        for position in positions
    ]


def finite(logprob: float) -> float:
    """Return a log probability that JSON can represent: `LOWEST` for minus infinity."""
    return logprob if math.isfinite(logprob) else LOWEST
