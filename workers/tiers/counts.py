"""What has become of the blocks of a worker's cold tiers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class TierCounts:
    """What has happened on disk and with what other cores have sent, in this process. Blocks, but for bytes.

    damaged: blocks that other cores have sent, or should have, and that are not as they were sent.
    """

    written: int = 0
    read: int = 0
    unreadable: int = 0
    dropped: int = 0
    bytes_written: int = 0
    bytes_read: int = 0
    fetched: int = 0
    bytes_fetched: int = 0
    damaged: int = 0
