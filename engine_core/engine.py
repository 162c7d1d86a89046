"""What every engine consists of once its workers are ready. `wiring.py` says what else one has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pagewire.engine_core.admission.lobby import Lobby
from pagewire.engine_core.clients.clients import Clients
from pagewire.engine_core.clients.requests import EngineRequests
from pagewire.engine_core.schedule.attachments import Tenant
from pagewire.engine_core.schedule.scheduler import Scheduler
from pagewire.engine_core.steps import StepDriver
from pagewire.engine_core.wings.wing import Wing
from pagewire.engine_core.workers.group import WorkerGroup
from pagewire.engine_core.workers.supervisor import WorkerSupervisor
from pagewire.ipc.shares import Name
from pagewire.ipc.wire.messages import EngineInfo
from pagewire.ipc.wire.requests import Request


class TenantAccounts(Protocol):
    """What each tenant holds; see `engine_core.tenants`."""

    def get(self, name: Name) -> Tenant:
        """The tenant of this name; of the frontend with this identity, for requests without a tenant."""

    def charge(self, frontend: int, name: Name, request: Request) -> Callable[[], None]:
        """Charge a request of a frontend to its tenant. Returns what gives the memory back; it is called once.

        Raises:
            ValueError: it would have no room in an idle engine either. EngineBusyError: there is no room now.
        """


@dataclass
class EngineHost:
    """What there is of an engine before its workers are ready.

    wake: interrupts the wait of the core's loop; for any thread. is_stopping: no new requests are accepted.
    started_at: monotonic time.
    """

    worker: WorkerGroup
    supervisor: WorkerSupervisor
    clients: Clients
    wake: Callable[[], None]
    is_stopping: Callable[[], bool]
    started_at: float


@dataclass
class OpenEngine:
    """An engine that serves requests.

    wings: what it has beside, in the order in which the loop calls them; `requests` and `steps` call them, too.
    tenants: what each holds. shares_prefixes: requests find the prefixes of others in the cache.
    keeps_extra_args: something reads `SamplingParams.extra_args`. Otherwise as `EngineHost`.
    """

    worker: WorkerGroup
    clients: Clients
    is_stopping: Callable[[], bool]
    info: EngineInfo
    tenants: TenantAccounts
    scheduler: Scheduler
    lobby: Lobby
    requests: EngineRequests
    steps: StepDriver
    wings: list[Wing]
    shares_prefixes: bool
    keeps_extra_args: bool

    @property
    def stopping(self) -> bool:
        """True once the core accepts no new requests."""
        return self.is_stopping()

    def admit(self) -> None:
        """Schedule the sequences that need wait no longer, and look after those that wait on."""
        self.requests.admit()
        for wing in self.wings:
            wing.admitted()
