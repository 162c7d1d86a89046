"""How those who wait for requests learn of new output."""

from __future__ import annotations

import threading
from typing import Protocol

from pagewire.frontend.requests.outputs import RequestState


class Mailbox(Protocol):
    """Receives the requests that have new output."""

    def put(self, states: list[RequestState]) -> None:
        """Receive requests that have new output. Called on the client's thread: must not block."""


class Inbox:
    """A mailbox for a thread that blocks until there is new output."""

    def __init__(self) -> None:
        self._ready: dict[int, RequestState] = {}
        self._arrival = threading.Condition()

    def put(self, states: list[RequestState]) -> None:
        """Wake the waiting thread."""
        with self._arrival:
            self._ready.update([(state.key, state) for state in states])
            self._arrival.notify()

    def get(self) -> list[RequestState]:
        """Wait until a request has new output; returns all that have, each once."""
        with self._arrival:
            self._arrival.wait_for(lambda: self._ready)
            ready, self._ready = self._ready, {}
        return list(ready.values())
