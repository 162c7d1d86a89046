"""Frontends that attach before the engine is ready."""

from __future__ import annotations

import time

from pagewire.engine_core.clients.clients import NOT_ATTACHED, Clients
from pagewire.ipc.errors import EngineBusyError
from pagewire.ipc.version import __version__
from pagewire.ipc.wire import messages
from pagewire.ipc.wire.messages import PROTOCOL, Hello, ToCore

# Processor time for messages before the loop turns to the worker again: a flood of them delays each step by this.
# On a busy machine the loop waits for longer than this within a message, and would read one in each turn.
RECEIVE_SECONDS = 0.003
MAX_EARLY = 1024  # frontends that may wait for the engine to be ready


class EarlyFrontends:
    """They wait for the engine, or hear why it does not start."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self._hellos: dict[bytes, Hello] = {}

    def receive(self) -> None:
        """Handle messages that have arrived, for about `RECEIVE_SECONDS`. One that raises ends its sender."""
        deadline = time.thread_time() + RECEIVE_SECONDS
        for identity, message, _ in self._clients.messages(time.monotonic()):
            if message is not None:
                try:
                    self._handle(identity, message)
                except Exception as error:
                    self._clients.fault(identity, error)
            if time.thread_time() >= deadline:
                return

    def take(self) -> dict[bytes, Hello]:
        """Those that have waited, by identity: the engine is ready."""
        hellos, self._hellos = self._hellos, {}
        return hellos

    def refuse(self, cause: BaseException) -> bool:
        """Answer those that wait with the reason why the engine does not start. False: none waits."""
        hellos = self.take()
        for identity in hellos:
            self._clients.turn_away(identity, cause)
        self._clients.told |= bool(hellos)
        return bool(hellos)

    def _handle(self, identity: bytes, message: ToCore) -> None:
        if not isinstance(message, Hello):
            self._clients.send(identity, messages.Detached(NOT_ATTACHED))
        elif (why := other_protocol(message)) is not None:
            self._clients.send(identity, messages.Refused(error=why))
        elif len(self._hellos) < MAX_EARLY or identity in self._hellos:
            self._hellos[identity] = message
        else:
            text = f"{MAX_EARLY} frontends wait for the engine to be ready; try again when it is"
            self._clients.turn_away(identity, EngineBusyError(text))


def other_protocol(hello: Hello) -> str | None:
    """Why a frontend is not understood; None: it is."""
    if hello.protocol == PROTOCOL:
        return None
    return (
        f"this core (pagewire {__version__}) uses protocol {PROTOCOL}, the frontend (pagewire "
        f"{hello.version}) protocol {hello.protocol}: install the same version on both sides"
    )
