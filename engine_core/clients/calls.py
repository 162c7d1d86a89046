"""Calls of the workers' methods: sent once the workers are ready, and over once all of them have answered."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count
from typing import Any, TypeAlias

from pagewire.engine_core.workers.group import GroupReply, Outcome, WorkerGroup
from pagewire.ipc.worker_messages import WorkerCall

Done: TypeAlias = Callable[[Outcome], None]


class PendingCalls:
    """The calls that the workers have not answered yet. Each ends with one `Outcome`, in the order of the calls."""

    def __init__(self, workers: WorkerGroup) -> None:
        self._workers = workers
        self._call_ids = count()
        self._sent: dict[int, Done] = {}
        self._unsent: list[tuple[WorkerCall, Done]] = []

    def call(self, method: str, kwargs: dict[str, Any], done: Done, args: Iterable[Any] = ()) -> None:
        """Call a method of every worker, as soon as they are ready; `done` gets the outcome."""
        call = WorkerCall(next(self._call_ids), method, list(args), kwargs)
        if self._workers.ready is None:
            self._unsent.append((call, done))
        else:
            self._send(call, done)

    def workers_ready(self) -> None:
        """Send the calls that were made while no worker was ready."""
        unsent, self._unsent = self._unsent, []
        for call, done in unsent:
            self._send(call, done)

    def receive(self, reply: GroupReply) -> None:
        """End the call that the workers have answered."""
        self._sent.pop(reply.call_id)(reply.outcome())

    def workers_lost(self, why: str) -> None:
        """End the calls that the lost workers had not answered with an error."""
        lost, self._sent = self._sent, {}
        for done in lost.values():
            done(RuntimeError(f"the worker was lost: {why}"))

    def _send(self, call: WorkerCall, done: Done) -> None:
        self._sent[call.call_id] = done
        self._workers.send(call)
