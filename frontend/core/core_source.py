"""Where a session gets its engine core from: it attaches to one that runs, or spawns one (`spawned_cores.py`).

Both can give another core when one is lost, as often or for as long as their options say.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pagewire.frontend.core.client import HEARTBEAT_TIMEOUT_S, CoreClient
from pagewire.frontend.core.link import START_ERRORS
from pagewire.ipc.environment import env_float
from pagewire.ipc.errors import EngineDeadError
from pagewire.ipc.wire.sockets import CurveKeys

if TYPE_CHECKING:
    from pagewire.ipc.host.lifeline import Child

logger = logging.getLogger("pagewire.frontend")

RETRY_SECONDS = 0.5  # between two attempts to attach to another core
AGAIN_SECONDS = 5.0  # for a core that runs to take a frontend again that it has detached
MAX_PAUSE_SECONDS = 30.0  # between two starts of a core
HEALTHY_SECONDS = 60.0  # a core that lived longer did not die of its start: pauses begin anew


class CoreProcess(Protocol):
    """A core that was spawned here. child: its process. address: where it listens."""

    child: Child
    address: str

    @property
    def pid(self) -> int:
        """Process id."""

    def shutdown(self) -> None:
        """Stop it. May be called twice."""


class Attached(NamedTuple):
    """A client that is attached to a core. spawned: the core's process if it was spawned here."""

    client: CoreClient
    spawned: CoreProcess | None


class Dial(Protocol):
    """Attaches to a core. options: as of `CoreClient.connect`, which says what it raises."""

    def __call__(self, address: str, **options: object) -> CoreClient: ...


class CoreSource(Protocol):
    """Gives a session its cores."""

    def connect(self, dial: Dial) -> Attached:
        """The first core.

        Raises:
            as `open_session.spawn` or `attach`.
        """

    def replace(self, dial: Dial, error: EngineDeadError, closing: threading.Event) -> Attached:
        """Another core, after one was lost with `error`; the wait ends when `closing` is set.

        Raises:
            EngineDeadError: there is no other one; the text is the cause.
        """

    def again(self, dial: Dial, spawned: CoreProcess | None) -> Attached:
        """A new connection to the same core, which has detached this frontend.

        Raises:
            EngineDeadError and others, as `CoreClient.connect`.
        """


class Pauses:
    """Seconds to wait before each new start: 0, 1, 2, 4 ... 30, and 0 again after `HEALTHY_SECONDS` of peace."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._last = -HEALTHY_SECONDS

    def next(self) -> float:
        """The pause before a start now."""
        now = time.monotonic()
        if now - self._last >= HEALTHY_SECONDS:
            self._seconds = 0.0
        seconds = self._seconds
        self._last = now + seconds
        self._seconds = min(max(1.0, 2 * seconds), MAX_PAUSE_SECONDS)
        return seconds


def longest_silence() -> float:
    """Seconds for which a core may answer nothing."""
    return env_float("PAGEWIRE_HEARTBEAT_TIMEOUT_S", HEARTBEAT_TIMEOUT_S)


class RunningCores:
    """Attaches to whichever core runs at an address.

    peer_uid: see `CoreClient.connect`. name: of this frontend. timeout: seconds to wait for a connection.
    reattach_timeout: seconds to wait for another core after one was lost; 0: none may take its place.
    patience: seconds for which the first core may answer nothing at all once it is connected; None: any.
    """

    def __init__(
        self,
        address: str,
        curve: CurveKeys | None,
        peer_uid: int | None,
        name: str,
        timeout: float | None,
        reattach_timeout: float,
        patience: float | None = None,
    ) -> None:
        self._address, self._curve, self._peer_uid, self._name = address, curve, peer_uid, name
        self._timeout, self._reattach_timeout, self._patience = timeout, reattach_timeout, patience

    def connect(self, dial: Dial) -> Attached:
        """Attach to the core, and wait until it is ready."""
        return self._attach(dial, self._timeout, self._patience)

    def replace(self, dial: Dial, error: EngineDeadError, closing: threading.Event) -> Attached:
        """Wait for another core at the address. One that loads its model may take longer."""
        if self._reattach_timeout <= 0:
            raise error
        give_up = time.monotonic() + self._reattach_timeout
        cause = error
        limit = "" if math.isinf(self._reattach_timeout) else f" for {self._reattach_timeout:g} s"
        logger.error("%s; waiting%s for another core at %s", error, limit, self._address)
        while not closing.wait(RETRY_SECONDS) and time.monotonic() < give_up:
            try:
                return self._attach(dial, RETRY_SECONDS, longest_silence())
            except EngineDeadError:
                pass  # no core listens yet, or it hangs
            except START_ERRORS as failure:
                cause = EngineDeadError(f"{error}; another core did not start: {failure}")
        raise cause

    def again(self, dial: Dial, spawned: CoreProcess | None) -> Attached:
        """Attach to the core at the address, which runs."""
        return self._attach(dial, AGAIN_SECONDS, AGAIN_SECONDS)

    def _attach(self, dial: Dial, timeout: float | None, patience: float | None = None) -> Attached:
        client = dial(
            self._address,
            curve=self._curve,
            peer_uid=self._peer_uid,
            name=self._name,
            timeout=timeout,
            patience=patience,
        )
        return Attached(client, None)
