"""The token counts in answers."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType


class PromptTokensDetails(msgspec.Struct):
    """cached_tokens: prompt tokens whose KV was in the prefix cache."""

    cached_tokens: int


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
