"""Calls of the workers' methods: sent once the workers are ready, and over once all of them have answered.

They are sent one at a time. Workers take messages in order, so each call may delay one step, however many wait.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeAlias

import msgspec

from pagewire.engine_core.workers.group import GroupReply, Outcome, WorkerGroup
from pagewire.ipc.budget import MAX_CALL_BYTES
from pagewire.ipc.calls import CALL_SECONDS, CALLS
from pagewire.ipc.errors import EngineBusyError
from pagewire.ipc.worker_messages import WorkerCall

MAX_PENDING_CALLS = 256  # that the workers have not answered; well below what a socket queues

Done: TypeAlias = Callable[[Outcome], None]


@dataclass(frozen=True, slots=True)
class PendingCall:
    """A call that was sent. sent_at: monotonic time. seconds: its time limit."""

    method: str
    sent_at: float
    seconds: float
    done: Done


class PendingCalls:
    """The calls that the workers have not answered yet. Each ends with one `Outcome`, in the order of the calls."""

    def __init__(self, workers: WorkerGroup) -> None:
        self._workers = workers
        self._call_ids = count()
        self._sent: dict[int, PendingCall] = {}  # in the order of the calls
        self._unsent: deque[tuple[WorkerCall, Done]] = deque()

    @property
    def oldest(self) -> PendingCall | None:
        """The call that the workers run, or are about to run; None if there is none."""
        return next(iter(self._sent.values()), None)

    def call(self, method: str, kwargs: dict[str, Any], done: Done, args: Iterable[Any] = ()) -> None:
        """Call a method of every worker, as soon as they are ready; `done` gets the outcome, later.

        Raises:
            TypeError, ValueError, RecursionError: arguments that a message cannot hold, or too large ones.
            EngineBusyError: too many calls wait.
        """
        self._unsent.append((self._new(method, kwargs, args), done))
        self._send_next()

    def call_first(self, method: str, kwargs: dict[str, Any], done: Done) -> None:
        """Call a method of every worker, as `call` does, before the calls that wait."""
        self._unsent.appendleft((self._new(method, kwargs), done))
        self._send_next()

    def _new(self, method: str, kwargs: dict[str, Any], args: Iterable[Any] = ()) -> WorkerCall:
        call = WorkerCall(next(self._call_ids), method, list(args), kwargs)
        size = len(msgspec.msgpack.encode(call))
        if size > MAX_CALL_BYTES:
            raise ValueError(
                f"{method[:100]}: the call takes {size:,} bytes, and workers take no more than {MAX_CALL_BYTES:,}"
            )
        if (num_pending := len(self._sent) + len(self._unsent)) >= MAX_PENDING_CALLS:
            raise EngineBusyError(f"{num_pending} calls already wait for the workers")
        return call

    def workers_ready(self) -> None:
        """Send the first of the calls that were made while no worker was ready."""
        self._send_next()

    def receive(self, reply: GroupReply) -> None:
        """End the call that the workers have answered."""
        call = self._sent.pop(reply.call_id, None)
        if call is not None:  # else it has expired
            call.done(reply.outcome())
        self._send_next()

    def expire(self, now: float) -> str | None:
        """End the calls whose time limit has passed with TimeoutError. Returns what was not done in time."""
        why = None
        for call_id, call in list(self._sent.items()):
            if now - call.sent_at > call.seconds:
                del self._sent[call_id]
                text = f"{call.method} has not returned within {call.seconds:g} s"
                why = why or text
                call.done(TimeoutError(text))
        return why

    def workers_lost(self, why: str, *, were_ready: bool) -> None:
        """End the calls that the lost workers ran with an error, and if they were not ready those that waited."""
        lost = [call.done for call in self._sent.values()]
        self._sent = {}
        if not were_ready:
            lost += [done for _, done in self._unsent]
            self._unsent.clear()
        for done in lost:
            done(RuntimeError(f"the worker was lost: {why}"))

    def _send_next(self) -> None:
        if self._sent or not self._unsent or not self._workers.accepting:
            return
        call, done = self._unsent.popleft()
        seconds = CALLS[call.method].seconds if call.method in CALLS else CALL_SECONDS
        self._sent[call.call_id] = PendingCall(call.method, time.monotonic(), seconds, done)
        self._workers.send(call)
