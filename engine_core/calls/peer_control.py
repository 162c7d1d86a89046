"""The calls with which other cores take KV blocks."""

from __future__ import annotations

from typing import Protocol

from pagewire.engine_core.calls.frontend_call import FrontendCall
from pagewire.engine_core.tiers.tier import ColdTier


class LendingEngine(Protocol):
    """The part of the core that `PeerControl` acts on."""

    @property
    def tier(self) -> ColdTier | None:
        """KV blocks on disk and of other cores; None if there are none."""


class PeerControl:
    """Runs the calls `find_blocks` and `fetch_blocks`; a core without `kv_peers` has nothing for others."""

    def __init__(self, core: LendingEngine) -> None:
        self._core = core

    def find_blocks(self, caller: FrontendCall, identity: bytes, names: bytes) -> None:
        """Answer which blocks are there; raises as `BlockLending.find`."""
        lending = None if self._core.tier is None else self._core.tier.lending
        caller.reply(b"" if lending is None else lending.find(identity, names))

    def fetch_blocks(self, caller: FrontendCall, identity: bytes, names: bytes, ticket: bytes) -> None:
        """Answer with blocks; raises as `BlockLending.fetch`."""
        if self._core.tier is None or self._core.tier.lending is None:
            caller.reply(b"")
        else:
            self._core.tier.lending.fetch(caller, identity, names, ticket)
