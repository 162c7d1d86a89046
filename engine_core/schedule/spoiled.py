"""Blocks with wrong keys and values: those of a row whose media could not be encoded, which was run all the same.

They may have their names already, and other sequences may have found them.
"""

from __future__ import annotations

from collections.abc import Iterable

from pagewire.engine_core.schedule.blocks import Block
from pagewire.engine_core.schedule.kv_cache import KVCache
from pagewire.engine_core.schedule.sequence import Sequence
from pagewire.ipc.wire.steps import Row, RowResult


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
