"""The results of rows: deltas for frontends, errors, and blocks with wrong keys and values.

The blocks of a row whose media could not be encoded, which was run all the same, are wrong. They may have their
names already, and other sequences may have found them.
"""

from __future__ import annotations

from collections.abc import Iterable

from pagewire.engine_core.schedule.blocks import Block
from pagewire.engine_core.schedule.kv_cache import KVCache
from pagewire.engine_core.schedule.sequence import Sequence
from pagewire.ipc.errors import NotFiniteError
from pagewire.ipc.wire.codec import Tensor
from pagewire.ipc.wire.requests import TokenDelta
from pagewire.ipc.wire.steps import Row, RowResult


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


def spoiled_by(
    sequence: Sequence, row: Row, result: RowResult, block_size: int, running: Iterable[Sequence]
) -> tuple[list[Sequence], set[Block]]:
    """The running sequences that end because a row has an error, and those of their blocks that must not be found.

    If the row is spoiled, whoever shares a block that it has written ends with its own sequence.
    """
    if not result.is_spoiled:
        return [sequence], set()
    first = row.start // block_size
    written = set(sequence.blocks[first:])
    ending = [one for one in running if one is sequence or not written.isdisjoint(one.blocks)]
    return ending, written.union(*(one.blocks[first:] for one in ending))


def forget_blocks(kv: KVCache, blocks: Iterable[Block]) -> None:
    """Drop the names of blocks, and what the cache's groups have under them."""
    for block in blocks:
        if block.name is not None:
            for group in kv.groups:
                group.forget_name(block.name)
            kv.pool.unname(block)
