"""KV blocks and states between a worker's memory and its cold tiers, which are maps from names to bytes.

The swap space is no such map: it has places, and the core alone knows what is in them.
The core knows which names are where, and says what is moved. `MoveBlocks` and plans are handled in order:
blocks are copied out before a later plan overwrites them. Reading and writing go on beside the steps; the blocks
that are read into belong to no sequence until `BlocksMoved`.
"""

from __future__ import annotations

import msgspec

from pagewire.ipc.wire.codec import Tensor
from pagewire.ipc.wire.items import NOTHING, Item, Message

PART_BYTES = 1 << 20  # of blocks that go from one core to another in one message, unless one block has more
MAX_PARTS = 4  # of these messages that are on their way between two cores
NOT_IN_MEMORY = -1  # number of a block that is lent from disk


def state_name(name: bytes) -> bytes:
    """The name in a tier of the states behind the block of this name: its complement, which no block has."""
    return bytes(255 - byte for byte in name)


class TierConfig(msgspec.Struct, omit_defaults=True, frozen=True):
    """The cold tiers of a worker.

    folder: of the one on disk; empty: there is none. num_bytes: that all models and layouts in it may take.
    lends: blocks go to other cores, and come from them.
    swap_bytes: of the host memory of each worker that is swap space; 0: there is none.
    """

    folder: str = ""
    num_bytes: int = 0
    lends: bool = False
    swap_bytes: int = 0


class BlockOut(Item):
    """A block that goes to the tier. name, parent: of the block and of the one before it.

    is_state: it is a state slot, and has the name `state_name` of the block behind which its states are.
    """

    block_id: int
    name: bytes
    parent: bytes
    is_state: bool = False


class BlockBack(Item):
    """A block that is read from the tier. is_state: as in `BlockOut`."""

    block_id: int
    name: bytes
    is_state: bool = False


class SwapCopy(Item):
    """A block in the KV memory, and a place in the swap space: what is copied from one to the other.

    is_state: it is a state slot, and a place for one; both have numbers of their own.
    """

    block_id: int
    place: int
    is_state: bool = False


class MoveBlocks(Message, tag="move_blocks"):
    """Copy blocks out, which are written as far as there is room for them; then read blocks back.

    number: of the `BlocksMoved` that answers it; 0: none does. An answer comes once all that is read back is in
        memory, or if nothing is, once all that was copied out until then is written.
    swap_out, swap_back: what is copied to the swap space, and from there.
    entries: what another core has sent of the blocks `back`; without, they are read from disk.
    lend: blocks for another core, whose entries `LentBlocks` with this number has. `NOT_IN_MEMORY`: it is on disk.
    """

    number: int = 0
    out: list[BlockOut] = []
    back: list[BlockBack] = []
    entries: Tensor = NOTHING
    lend: list[BlockOut] = []
    swap_out: list[SwapCopy] = []
    swap_back: list[SwapCopy] = []


class ForgetBlocks(Message, tag="forget_blocks"):
    """Remove all blocks of this model and layout from the tier."""


class BlocksMoved(Item):
    """Answers the `MoveBlocks` with this number. missing: names of what could not be read."""

    number: int
    missing: list[bytes] = []


class LentBlocks(Item):
    """The entries of blocks that are lent, each a header and the content; of those that could be read.

    num_blocks: how many these are.
    """

    number: int
    entries: Tensor
    num_blocks: int


class TierReport(Message, tag="tier_report"):
    """The changes in the tiers.

    added, removed: names on disk, one behind the other. moved, lent: answers.
    identity: of the blocks that go to other cores, which have the same one; empty as long as it is not known.
    num_written, num_read, num_unreadable, num_dropped: blocks since the worker's start; bytes_written, bytes_read:
    of these. num_bytes: of all blocks of this model and layout on disk. read_seconds: that reading took.
    num_fetched, bytes_fetched: blocks that came from other cores as they were sent; num_damaged: the others.
    bytes_swapped, swap_seconds: that were copied from the swap space, and how long it took.
    """

    added: bytes = b""
    removed: bytes = b""
    moved: list[BlocksMoved] = []
    num_written: int = 0
    num_read: int = 0
    num_unreadable: int = 0
    num_dropped: int = 0
    bytes_written: int = 0
    bytes_read: int = 0
    num_bytes: int = 0
    read_seconds: float = 0.0
    identity: bytes = b""
    lent: list[LentBlocks] = []
    num_fetched: int = 0
    bytes_fetched: int = 0
    num_damaged: int = 0
    bytes_swapped: int = 0
    swap_seconds: float = 0.0
