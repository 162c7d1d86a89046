"""A call of a frontend, until it is answered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pagewire.engine_core.workers.group import Outcome
from pagewire.ipc.errors import error_place, error_text, error_type
from pagewire.ipc.wire.messages import CallAnswer


@dataclass(frozen=True, slots=True)
class FrontendCall:
    """A call that waits for its answer. Exactly one of its methods is called, once.

    identity: the frontend. call_id: its number for the call. send: sends it the answer.
    """

    identity: bytes
    call_id: int
    send: Callable[[bytes, CallAnswer], None]

    def reply(self, result: Any) -> None:
        """Answer with a result."""
        self.send(self.identity, CallAnswer(self.call_id, result))

    def refuse(self, error: Exception) -> None:
        """Answer with an error, which keeps its type."""
        text, kind, place = error_text(error), error_type(error), error_place(error)
        answer = CallAnswer(self.call_id, error=text, error_type=kind, error_place=place)
        self.send(self.identity, answer)

    def end(self, outcome: Outcome) -> None:
        """Answer with what the workers have answered."""
        if isinstance(outcome, Exception):
            self.refuse(outcome)
        else:
            self.reply(outcome)
