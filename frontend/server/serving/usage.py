"""The token counts in answers."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType


class PromptTokensDetails(msgspec.Struct):
    """Details of the prompt tokens.

    cached_tokens: those whose KV was in the prefix cache.
    retained_tokens: of prompt and output, those that are kept there for as long as the request
        asks; only if it does.
    """

    cached_tokens: int
    retained_tokens: int | UnsetType = UNSET


class CompletionTokensDetails(msgspec.Struct):
    """Tokens of the output that had been proposed by speculative decoding, and proposed ones that were wrong."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(msgspec.Struct):
    """Token counts. completion_tokens_details: only where tokens were proposed."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
