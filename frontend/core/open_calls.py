"""The calls to a core that it has not answered yet, and until when it must."""

from __future__ import annotations

import math
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from itertools import count
from typing import Any

import msgspec

from pagewire.ipc.errors import EngineDeadError, received_error
from pagewire.ipc.wire.calls import CALLS, RunsIn
from pagewire.ipc.wire.messages import CallAnswer


class OpenCall(msgspec.Struct):
    """A call without an answer. due: until when the core must answer it; infinite before it is sent."""

    method: str
    future: Future[Any] = msgspec.field(default_factory=Future)
    due: float = math.inf


class OpenCalls:
    """Calls by id. Any thread may use it.

    grace: seconds that a core has beyond the time limit of a call, after which it would answer TimeoutError.
    """

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._ids = count()
        self._calls: dict[int, OpenCall] = {}

    def open(self, method: str) -> tuple[int, Future[Any]]:
        """A new call: its id, and the future that gets the answer."""
        call_id, call = next(self._ids), OpenCall(method)
        self._calls[call_id] = call
        return call_id, call.future

    def forget(self, call_id: int) -> None:
        """Forget a call that is not made."""
        self._calls.pop(call_id, None)

    def sent(self, call_id: int, now: float) -> None:
        """Record that a call was sent. Only those that the core runs itself, and that declare a limit, have one."""
        call = self._calls.get(call_id)
        declared = None if call is None else CALLS.get(call.method)
        if call is None or declared is None or declared.runs_in is not RunsIn.CORE:
            return
        if declared.seconds is not None:
            call.due = now + declared.seconds + self._grace

    def overdue(self, now: float) -> str | None:
        """The method of a call that the core should have answered by now; None if there is none."""
        return next((call.method for call in list(self._calls.values()) if now > call.due), None)

    def settle(self, answer: CallAnswer) -> None:
        """Take the core's answer."""
        if answer.error is not None:
            self.fail(answer.call_id, received_error(answer.error, answer.error_type, answer.error_place))
        elif (call := self._calls.pop(answer.call_id, None)) is not None:
            with suppress(InvalidStateError):  # the caller has cancelled it
                call.future.set_result(answer.result)

    def fail(self, call_id: int, error: Exception) -> None:
        """End a call with an error."""
        if (call := self._calls.pop(call_id, None)) is not None:
            with suppress(InvalidStateError):
                call.future.set_exception(error)

    def fail_all(self, error: EngineDeadError) -> None:
        """End all calls with an error, each with one of its own."""
        for call_id in list(self._calls):
            self.fail(call_id, EngineDeadError(*error.args))
