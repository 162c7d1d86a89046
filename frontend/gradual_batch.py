"""A batch of requests of which the core has only as many at a time as keep it busy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pagewire.frontend.inputs import Prepared
from pagewire.frontend.mailbox import Inbox
from pagewire.frontend.outputs import RequestState
from pagewire.frontend.session import Session
from pagewire.ipc.messages import Request
from pagewire.ipc.params import SamplingParams

# Tokens of unfinished requests, in all their sequences. A core bounds the memory of what waits there
# (`ipc.budget.unfinished_bytes`), and a batch may be of any size.
MAX_TOKENS_IN_CORE = 1 << 24


class GradualBatch:
    """Requests that are submitted while earlier ones run.

    tick: called with each output.

    Attributes:
        states: the requests that were submitted, in order.
    """

    def __init__(self, session: Session, tick: Callable[[Any], object]) -> None:
        self.states: list[RequestState] = []
        self._session, self._tick = session, tick
        self._inbox = Inbox()
        self._outputs: dict[int, Any] = {}  # by key
        self._num_tokens = 0

    def submit(self, prepared: Sequence[Prepared]) -> None:
        """Submit requests; waits while the core has more than enough of them.

        Raises:
            ValueError: a request id is in use. EngineDeadError: the core is lost.
        """
        self.states += self._session.submit(prepared, self._inbox)
        self._num_tokens += sum(num_tokens(item.request) for item in prepared)
        while self._num_tokens > MAX_TOKENS_IN_CORE:
            self._take()

    def outputs(self) -> list[Any]:
        """Wait for the output of every request that was submitted; returns them in order.

        Raises:
            EngineDeadError: the core is lost.
        """
        while len(self._outputs) < len(self.states):
            self._take()
        return [self._outputs[state.key] for state in self.states]

    def _take(self) -> None:
        for state in self._inbox.get():
            if (output := self._session.take(state)) is not None:
                self._outputs[state.key] = output
                self._num_tokens -= num_tokens(state.request)
                self._tick(output)


def num_tokens(request: Request) -> int:
    """The tokens that the core keeps of a request's prompt: once, and for each sequence."""
    num_sequences = request.task.n if isinstance(request.task, SamplingParams) else 1
    return len(request.prompt.token_ids) * (1 + num_sequences)
