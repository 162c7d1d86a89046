"""The call with which frontends end promises."""

from __future__ import annotations

from typing import Protocol

from pagewire.engine_core.calls.frontend_call import FrontendCall
from pagewire.engine_core.retention.promises import PrefixPromises
from pagewire.engine_core.schedule.scheduler import Scheduler
from pagewire.ipc.tenants import check_tenant


class RetainingEngine(Protocol):
    """The part of the core that `RetentionControl` acts on."""

    scheduler: Scheduler
    promises: PrefixPromises


class RetentionControl:
    """Runs the call `release_prefixes`."""

    def __init__(self, core: RetainingEngine) -> None:
        self._core = core

    def release_prefixes(self, caller: FrontendCall, session: str, tenant: str) -> None:
        """End promises that prefixes stay cached. Answers how many tokens are not promised any more.

        Raises:
            ValueError: no tenant has such a name.
        """
        if tenant:
            check_tenant(tenant)
        kv = self._core.scheduler.kv
        released = self._core.promises.release(tenant or caller.identity, session, kv)
        caller.reply(released * kv.block_size)
