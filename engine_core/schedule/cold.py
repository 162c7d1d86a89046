"""What the scheduler asks of a cold tier: memory that is slower than the KV cache, and keeps more.

A sequence that would be admitted, and of whose prefix the tier has more than the KV cache, may wait until that is
read. Blocks that the KV cache evicts are named in `BlockPool.evicted`.
"""

from __future__ import annotations

from typing import Protocol

from pagewire.engine_core.schedule.kv_cache import KVCache
from pagewire.engine_core.schedule.sequence import Sequence


class ColdPrefixes(Protocol):
    """The prefixes in a cold tier; see `pagewire.engine_core.tiers.reads`."""

    def delays(self, sequence: Sequence, kv: KVCache, watermark: int) -> bool:
        """True if a sequence is to wait, because a part of its prefix is being read from now on."""

    def forget(self) -> None:
        """What is being read shall not be found: all names of the KV cache are dropped."""


class NoColdPrefixes:
    """Stands in where there is no cold tier; methods as in `ColdPrefixes`."""

    def delays(self, sequence: Sequence, kv: KVCache, watermark: int) -> bool:
        """False: nothing is read."""
        return False

    def forget(self) -> None:
        """Nothing to do."""
