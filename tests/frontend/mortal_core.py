"""Fake cores that die of certain requests, and are replaced at their address, as a process supervisor does it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import zmq

from pagewire.ipc.wire.messages import Abort, Deltas, EngineInfo, Hello, Request, Submit, TokenDelta
from pagewire.ipc.wire.sockets import receive
from pagewire.ipc.wire.tasks import submitted
from tests.frontend.conftest import FakeCore

FIRST, LENGTH = 2, 14  # token ids of every output: position p has the token FIRST + p % 60
Kills = Callable[[Request, int], bool]


def output(length: int = LENGTH) -> list[int]:
    """The tokens of an output of this length, whatever became of cores meanwhile."""
    return [FIRST + position % 60 for position in range(length)]


class MortalCore(FakeCore):
    """A core that generates a token of each request per step, up to `max_tokens`.

    kills: called with a request and the number of its tokens that this core has made; True: the core dies.
    batches: the keys of each `Submit`.
    """

    def __init__(self, address: str, info: EngineInfo, kills: Kills) -> None:
        self._kills = kills
        self._live: dict[int, tuple[Request, int, int]] = {}  # with its first and its next position
        self.batches: list[list[int]] = []
        super().__init__(address, info)

    def _serve(self) -> None:
        while not self._stop.is_set():
            while not self._outbox.empty():
                self._reply(self._outbox.get())
            while not self._stop.is_set() and self._socket.poll(1):
                self.client, *frames = receive(self._socket)  # type: ignore[assignment]
                self._take(self._codec.decode(frames))
            self._step()
        self._gate.stop()
        self._context.destroy(linger=0)

    def _take(self, message: Any) -> None:
        if isinstance(message, Submit):
            requests = submitted(message)
            self.batches.append([request.key for request in requests])
            for request in requests:
                assert request.key not in self._live, "a request was submitted twice"
                position = len((request.output_token_ids or [[]])[0])
                self._live[request.key] = request, position, position
                self._check(request, 0)
        elif isinstance(message, Abort):
            for key in message.keys:
                self._live.pop(key, None)
        elif isinstance(message, Hello):
            self._live.clear()  # it has no requests of a frontend that attaches, or attaches again
        super()._take(message)

    def _check(self, request: Request, made: int) -> None:
        if not self._stop.is_set() and self._kills(request, made):
            self._stop.set()

    def _step(self) -> None:
        deltas = []
        for key, (request, first, position) in list(self._live.items()):
            last = position + 1 == request.params.max_tokens
            deltas.append(
                TokenDelta(key, 0, [FIRST + position % 60], finish_reason="length" if last else None)
            )
            self._live[key] = request, first, position + 1
            if last:
                del self._live[key]
        if deltas:
            self._reply(Deltas(deltas))
        for request, first, position in list(self._live.values()):
            self._check(request, position - first)


class Keeper:
    """Keeps a core running at an address: when one has died, it starts another. cores: all there were, in order."""

    def __init__(self, address: str, info: EngineInfo, kills: Kills = lambda request, made: False) -> None:
        self.address = address
        self.cores = [MortalCore(address, info, kills)]
        self._start: Callable[[], MortalCore] = lambda: MortalCore(address, info, kills)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    def _keep(self) -> None:
        while True:
            self.cores[-1]._thread.join()
            if self._stop.is_set():
                return
            with contextlib.suppress(OSError, zmq.ZMQError):
                self.cores.append(self._start())

    @property
    def submissions(self) -> list[list[list[int]]]:
        """By core, the keys of each `Submit`."""
        return [core.batches for core in self.cores]

    def close(self) -> None:
        """End the last core, and start no other."""
        self._stop.set()
        self.cores[-1].close()
        self._thread.join()
        self.cores[-1].close()
