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
from pagewire.ipc.errors import EngineBusyError
from pagewire.ipc.wire.budget import MAX_CALL_BYTES
from pagewire.ipc.wire.calls import CALLS
from pagewire.ipc.wire.worker_messages import WorkerCall

MAX_PENDING_CALLS = 256  # that the workers have not answered; well below what a socket queues

Done: TypeAlias = Callable[[Outcome], None]


@dataclass(frozen=True, slots=True)
class PendingCall:
    """A call that was sent. sent_at: monotonic time."""

    method: str
    sent_at: float
    done: Done

    def lateness(self, now: float, workers: WorkerGroup, step_limit: float) -> str | None:
        """Why the workers count as hung in this call, as text; None if they do not.

        They begin with it when they have answered what was sent before. step_limit: seconds that a step may take.
        """
        declared = CALLS[self.method].seconds if self.method in CALLS else None
        limit = step_limit if declared is None else declared
        if now - max(self.sent_at, workers.last_sign) > limit:
            return f"{self.method} has not returned within {limit:g} s"
        if now - max(self.sent_at, workers.last_message) > step_limit:
            return f"{self.method} has shown no progress for {step_limit:g} s"
        return None


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

    @property
    def num_unsent(self) -> int:
        """Number of calls that wait for the workers to be ready, or to answer the call before."""
        return len(self._unsent)

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

    def expire(self, now: float, step_limit: float) -> str | None:
        """End a call that takes too long with TimeoutError. Returns what was not done in time; None if all was.

        step_limit: seconds that a step may take, and a call that declares no limit, or shows no progress.
        """
        for call_id, call in self._sent.items():
            if (why := call.lateness(now, self._workers, step_limit)) is not None:
                del self._sent[call_id]
                call.done(TimeoutError(why))
                return why
        return None

    def workers_lost(self, why: str, *, were_ready: bool) -> None:
        """End the calls that the lost workers ran with an error, and if they were not ready those that waited."""
        lost = [call.done for call in self._sent.values()]
        self._sent = {}
        if not were_ready:
            lost += [done for _, done in self._unsent]
            self._unsent.clear()
        for done in lost:
            done(RuntimeError(f"the worker was lost: {why}"))

    def refuse_unsent(self, refusal: Callable[[str], Exception]) -> None:
        """End the calls that wait with an error, made of the method that each calls."""
        refused = list(self._unsent)
        self._unsent.clear()
        for call, done in refused:
            done(refusal(call.method))

    def _send_next(self) -> None:
        if self._sent or not self._unsent or not self._workers.accepting:
            return
        call, done = self._unsent.popleft()
        self._sent[call.call_id] = PendingCall(call.method, time.monotonic(), done)
        self._workers.send(call)
