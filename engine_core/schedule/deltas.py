"""The last deltas of sequences that end with no token: with a pooled result, or with an error."""

from __future__ import annotations

from pagewire.engine_core.schedule.sequence import Sequence
from pagewire.ipc.wire.codec import Tensor
from pagewire.ipc.wire.messages import TokenDelta


def pooled_delta(sequence: Sequence, pooled: Tensor, now: float) -> TokenDelta:
    """The delta of a sequence that ends with its pooled result."""
    return TokenDelta(
        sequence.key,
        sequence.index,
        [],
        finish_reason="stop",
        pooled=pooled,
        num_cached_tokens=sequence.num_cached_tokens,
        timing=sequence.timing(now),
    )


def error_delta(sequence: Sequence, text: str, now: float, error_type: str | None) -> TokenDelta:
    """The delta of a sequence that ends with an error. error_type: name of an exception, or None."""
    return TokenDelta(
        sequence.key,
        sequence.index,
        [],
        finish_reason="error",
        error=text,
        error_type=error_type,
        timing=sequence.timing(now),
    )
