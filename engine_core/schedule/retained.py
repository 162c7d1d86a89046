"""What the scheduler asks of the promises to keep prefixes: blocks that are not evicted before a time.

A promise holds a reference to each of its blocks, as a sequence does. So the pool knows nothing of promises, and
what they hold is never more than leaves room for the longest sequence.
"""

from __future__ import annotations

from typing import Protocol

from pagewire.engine_core.schedule.kv_cache import KVCache
from pagewire.engine_core.schedule.sequence import Sequence


class RetainedPrefixes(Protocol):
    """The promised prefixes; see `pagewire.engine_core.retention.promises`."""

    def tick(self, now: float, kv: KVCache) -> None:
        """End the promises whose time has come. Called before each plan and each commit."""

    def retain(self, sequence: Sequence, kv: KVCache) -> None:
        """Promise what a running sequence's request asks for, as far as it is computed, and say so in it."""

    def forget(self, kv: KVCache) -> None:
        """End all promises, because all names of the KV cache are dropped."""


class NoRetainedPrefixes:
    """Stands in where nothing is promised; methods as in `RetainedPrefixes`."""

    def tick(self, now: float, kv: KVCache) -> None:
        """Nothing to do."""

    def retain(self, sequence: Sequence, kv: KVCache) -> None:
        """Nothing to do."""

    def forget(self, kv: KVCache) -> None:
        """Nothing to do."""
