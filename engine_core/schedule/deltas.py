"""What deltas say of their sequence, and those of sequences that end with no token."""

from __future__ import annotations

from pagewire.engine_core.schedule.sequence import Sequence
from pagewire.ipc.errors import NotFiniteError
from pagewire.ipc.wire.codec import Tensor
from pagewire.ipc.wire.requests import TokenDelta
from pagewire.ipc.wire.steps import RowResult


def add_facts(delta: TokenDelta, sequence: Sequence, now: float) -> None:
    """Set what the first and the last delta of a sequence say of it, and one whose token comes of other weights."""
    delta.num_cached_tokens, delta.timing = sequence.num_cached_tokens, sequence.timing(now)
    delta.retained = list(sequence.retained)
    delta.weights, sequence.num_versions_told = list(sequence.versions), len(sequence.versions)
    if sequence.adapter is not None:
        delta.adapter = sequence.request.prompt.adapter


def pooled_delta(sequence: Sequence, pooled: Tensor, now: float) -> TokenDelta:
    """The delta of a sequence that ends with its pooled result."""
    delta = TokenDelta(sequence.key, sequence.index, [], finish_reason="stop", pooled=pooled)
    add_facts(delta, sequence, now)
    return delta


def error_of(sequence: Sequence, result: RowResult) -> tuple[str, str | None]:
    """The text and type of a row's error. Numbers that are not finite are the fault of the media, if there are any:
    their content is the client's, while all tokens are the model's own.
    """
    text = result.error or ""
    if result.error_type == NotFiniteError.__name__ and sequence.request.prompt.media:
        return f"{text}: the media or embeddings of the prompt lead to it", ValueError.__name__
    return text, result.error_type


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
